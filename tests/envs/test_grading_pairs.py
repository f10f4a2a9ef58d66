r"""A table of tricky answers, written by hand: what must count as right, and what must not.

Each line of a block is ``reference | answer``; both go through the whole path of a grading, the
answer in a box. Above each block stands why.
"""

import textwrap

import pytest

from marft_jax.envs.grading import GradingPool


@pytest.fixture(scope="module")
def pool():
    pool = GradingPool(1, 30)
    yield pool
    pool.close()


EQUAL = r"""
# integers with decoration
7 | 07
7 | +7
7 | 7.
7 | 7.0
7 | \mathbf{7}
7 | \text{7}
7 | **7**
7 | $7$
7 | \(7\)
7 | (7)
7 | x = 7
7 | n=7
7 | 3 + 4 = 7
7 | \displaystyle 7
-7 | −7
-7 | -7.00
0 | -0
0 | 0.0
# digit groups
1000 | 1,000
1,000 | 1000
12,345,678 | 12345678
5,\!866,\!608 | 5,866,608
5,\!866,\!608 | 5866608
1{,}234 | 1234
10000 | 10\,000
1,234.5 | 1234.5
# money
18 | \$18
18 | $18.00
\$1.25 | 1.25
\$0.50 | \$.50
\$20 | 20 dollars
18 | 18 dollars
18 | -\$-18 = 18
1,500 | \$1,500.00
18 | €18
# units may be left out or added, and spelled another way
10\text{ cm} | 10
10\text{ cm} | 10 cm
10\text{ cm} | 10\,\mathrm{cm}
10\text{ cm} | 10 centimeters
45\text{ square inches} | 45 in^2
45\text{ units}^2 | 45 square units
144\mbox{ m}^3 | 144\text{ cubic meters}
99\pi \text{ square inches} | 99\pi
99\pi | 99\pi \text{ cm}^2
16 | 16 eggs
16 | 16\text{ eggs per day}
2\sqrt{3} | 2\sqrt{3} cm
60 | 60 km/h
60 | 60\text{ mph}
90 | 90 miles per hour
90 | 90\text{ miles per hour}
90\text{ mph} | 90 miles per hour
90\text{ miles per hour} | 90
90\text{ miles per hour} | 90\text{ miles}
60\text{ km/h} | 60 kilometers per hour
12 | 12 dollars per hour
5 | 5 m/s
45^\circ | 45
45^\circ | 45^{\circ}
45 | 45°
45^\circ | 45 degrees
3 | 3 \text{ hours}
# percentages
28\% | 28%
28\% | 28
28\% | 0.28
28\% | 28 percent
28 | 28\%
0.28 | 28\%
\frac{1}{4} | 25\%
12.5\% | 12.5
# fractions and decimals
\frac{1}{2} | 1/2
\frac{1}{2} | \frac12
\frac{1}{2} | \dfrac{1}{2}
\frac{1}{2} | \tfrac 12
\frac{1}{2} | 0.5
\frac{1}{2} | .5
\frac{1}{2} | 0.50
\frac{1}{2} | \frac{2}{4}
\frac{1}{2} | ½
\frac{1}{2} | 1 / 2
.5 | \frac{1}{2}
-\frac{1}{2} | \frac{-1}{2}
-\frac{1}{2} | \frac{1}{-2}
-\frac{1}{2} | -0.5
-\frac12 | -1/2
\frac{7}{2} | 3.5
\frac{7}{2} | 3\frac{1}{2}
3\frac{1}{2} | 3 1/2
12\frac{3}{5} | \frac{63}{5}
\frac{1}{3} | 0.333333
\frac{2}{3} | 0.666667
\frac{2}{3} | 0.6666666
\frac{1}{3} | \frac{\frac{2}{3}}{2}
\frac{a}{b} | a/b
\frac{1}{2}x | \frac{x}{2}
# powers of ten, big and small
30000 | 3 \times 10^4
30000 | 3 \cdot 10^{4}
3000000 | 3 million
3000000 | 3\text{ million}
28\% | 28\text{ percent}
1500 | 1.5e3
0.0005 | 5 \times 10^{-4}
2^{10} | 1024
1024 | 2^{10}
120 | 5!
# decimals that repeat
\frac{1}{3} | 0.\overline{3}
0.\overline{3} | \frac{1}{3}
0.\overline{3} | 1/3
\frac{1}{6} | 0.1\overline{6}
0.1\overline{6} | \frac16
-\frac{1}{3} | -0.\overline{3}
\frac{4}{3} | 1.\bar{3}
\frac{4}{3} | 1.\dot3
\frac{41}{333} | 0.\overline{123}
0.\overline{12} | 0.\overline{1212}
1 | 0.\overline{9}
x+\frac{1}{3} | 0.\overline{3}+x
# surds, pi, i, logarithms
\sqrt{8} | 2\sqrt{2}
\frac{\sqrt{3}}{2} | \sqrt3/2
\frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2}
\sqrt{5} | \sqrt5
\sqrt{5} | sqrt(5)
\sqrt{5} | √5
\sqrt{5} | 5^{1/2}
2\sqrt{113} | \sqrt{452}
\sqrt[3]{8} | 2
\frac{\pi}{4} | π/4
\frac{\pi}{4} | \frac{1}{4}\pi
\frac{\pi}{4} | pi/4
6\pi | 2\cdot 3\pi
\frac \pi4 + 2 | 2+\frac{\pi}{4}
-1-5i | -5i-1
-1 - 5i | -1-5 i
(1+i)^2 | 2i
\log_2 8 | 3
e^2 | e^{2}
\sin 30^\circ + x | x+\sin 30^\circ
# algebra
x+1 | 1+x
x^2-1 | (x-1)(x+1)
x^2+2x+1 | (x+1)^2
3x | 3\cdot x
3x | 3*x
x^2 | x**2
x^2 | x²
2(x+3) | 2x+6
\frac{x+1}{2} | \frac{1}{2}(x+1)
\frac{x}{2}+\frac{1}{2} | \frac{x+1}{2}
x^3 + 2x^2 + x | x(x+1)^2
y = 2x+3 | 2x+3
y = 2x+3 | y=3+2x
2x - y + 3 = 0 | -2x + y - 3 = 0
10x - 4y - 5z - 20 = 0 | 20x-8y-10z-40=0
x = 5 | 5
a=9 | 9
# lists and sets: order is free
1,2 | 2,1
1,2 | 1, 2
1,2 | 2 and 1
1,2 | 1 \text{ or } 2
1,2 | x=1, x=2
1,2 | \{1,2\}
-2,1 | 1,-2
\{1,2,3\} | \{3,2,1\}
\{1,2,3\} | \left\{1, 2, 3\right\}
-5, 1, 4 | 4, 1, -5
\pm 2 | 2,-2
2,-2 | \pm 2
1 \pm \sqrt{2} | 1+\sqrt{2}, 1-\sqrt{2}
27,93 | 93,27
100,200 | 100, 200
45^\circ, 135^\circ | 45, 135
\sqrt{67}, -\sqrt{85} | -\sqrt{85},\sqrt{67}
# points and vectors: order counts, brackets may be spelled another way
(1,2) | (1, 2)
(1,2) | \left(1,2\right)
(1,2) | 1,2
(1,4\sqrt3) | (1, 4\sqrt{3})
\left( \frac{4}{3}, -\frac{1}{3} \right) | (4/3, -1/3)
(0.5,2) | \left(\frac{1}{2}, 2\right)
(3,-3,1) | ( 3 , -3 , 1 )
(6,7) | (x,y) = (6,7)
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix} 1/2 & 0 \\ 0 & 1 \end{pmatrix} | \begin{pmatrix}\frac{1}{2}&0\\0&1\end{pmatrix}
# intervals
[0,1] | [0, 1]
(0,1] | \left(0,1\right]
[-4,0) | [ -4 , 0 )
(-\infty,3)\cup(3,\infty) | (-\infty, 3) \cup (3, +\infty)
(-\infty,3)\cup(3,\infty) | (3,\infty)\cup(-\infty,3)
[3,\infty) | [3, ∞)
[1,2] | x \in [1,2]
[\frac{1}{2},1] | [0.5,1]
x < 2 | x<2
x < 2 | 2 > x
x \le 2 | x \leq 2
(-\infty,2) | x<2
(-\infty,2)\cup(3,\infty) | x<2 or x>3
(-\infty,2)\cup(3,\infty) | x<2 \text{ or } x>3
(-\infty,2)\cup(3,\infty) | x > 3 \text{ or } x < 2
(-\infty,2]\cup[3,\infty) | x \le 2 \lor 3 \le x
x<2 \text{ or } x>3 | (-\infty,2)\cup(3,\infty)
x<2 \text{ or } x>3 | x>3 or x<2
(-\infty,-\frac{1}{2})\cup(0,1] | t < -1/2 or 0 < t \leq 1
\emptyset | \varnothing
\varnothing | \emptyset
\emptyset | ∅
\emptyset | \{\}
# dates
2020-01-05 | 2020-01-05
2020-01-05 | 2020-1-5
2020-01-05 | 2020/01/05
2020-01-05 | January 5, 2020
2020-01-05 | 5 Jan. 2020
\text{January 5, 2020} | 2020-01-05
# words, times, letters, bases
\text{even} | even
\text{even} | \text{Even}
\text{Sunday} | Sunday
\text{circle} | \mathrm{circle}
\text{neither} | \textbf{neither}
\text{4:30 p.m.} | 4:30 PM
\text{(E)} | E
\text{(E)} | (E)
E | \text{E}
B | (B)
B | B) 42
B | B. 42
\text{B, E, G} | B, E, G
\text{B, E, G} | G, E, B
AC | AC
1011_2 | 1011
1011_2 | 1011_{2}
4210_{5} | 4210_5
# choices as competitions print them
A | \textbf{(A)}
A | \textbf{A}
A | \textbf{(A) }14
A | \textbf{(A)}\ 14
B | \mathbf{B}
B | \mathrm{(B)}
C | \boldsymbol{C}
D | \textit{D}
D | \emph{(D)}
E | \underline{E}
B | \rm B
B | {\bf (B)}
C | \text{Option C}
C | choice (C)
\textbf{(E)} | E
# colours, fonts, degrees inside of functions, left sides, abbreviations
42 | \color{red}{42}
42 | {\color{red} 42}
16 | \textcolor{red}{16}
x+1 | \textcolor{blue}{1+x}
\frac{1}{2} | \textcolor[rgb]{1,0,0}{\frac{1}{2}}
\frac{1}{2} | \sin 30^\circ
\frac{1}{4} | \cos^2(60^{\circ})
1 | \tan{45°}
2x | dy/dx=2x
2x | \frac{dy}{dx} = 2x
2x | f'(x) = 2x
\text{does not exist} | DNE
\text{DNE} | does not exist
# things that are counted
5 \text{ apples} | 5 red apples
5 \text{ apples} | 5 apples per day
1 \text{ apple} | 1 apples
5 \text{ boxes} | 5 box
45^\circ | 45\text{ deg}
12.5\% | 12.5\% \text{ of them}
# ratios, and lists with dots: order counts, spaces do not
3:4:6 | 3 : 4 : 6
3:4:6 | 3\!:\!4\!:\!6
3:4:6 | 3 \colon 4 \colon 6
3:4:6 | 3∶4∶6
3:2 | 3 : 2
a:b:c | a:b:c
1:\sqrt{3}:2 | 1:\sqrt3:2
3, 6, \dots, 3n | 3,6,...,3n
3, 6, \dots, 3n | 3, 6, …, 3n
3, 6, \dots, 3n | 3, 6, \cdots, n \cdot 3
\{2, 4, \ldots, 20\} | \{2,4,\dots,20\}
\{2, 4, \ldots, 20\} | 2, 4, \ldots, 20
1, 2, \ldots, n | 1,2,\dots,n
1, 2, \ldots | 1,2,\dots
1, 2, \ldots, 2n | 1,2,\dots,n+n
(1, 2, \ldots, n) | (1,2,...,n)
1+2+\dots+n | 1 + 2 + ... + n
4, 5, 6 | 6, 5, 4
# characters of Unicode
2^8 | 2⁸
2⁸ | 2^8
2⁸ | 256
256 | 2⁸
y^{10} | y¹⁰
y⁻³ | y^{-3}
2ⁿ⁺¹ | 2^{n+1}
a_{10} | a₁₀
1/3 | ⅓
⅚ | \frac{5}{6}
11/3 | 3⅔
3⅔ | 11/3
-\frac{11}{3} | −3⅔
1/2 | 1⁄2
\frac{x}{2} | ½x
x \ge 5 | x ⩾ 5
x ⩽ 5 | x \le 5
x \ge 5 | x ≧ 5
[5, \infty) | x ⩾ 5
x>5 | x＞5
\sqrt[3]{7} | ∛7
3 | ∛27
∜16 | 2
2\sqrt[3]{7} | 2∛7
\sqrt[3]{x+1} | ∛(x+1)
\sqrt{10} | √10
\lfloor y \rfloor | ⌊y⌋
⌈y⌉ | \lceil y \rceil
3 | ⌊3.7⌋
\lfloor \frac{x}{2} \rfloor | ⌊x/2⌋
-5 | －5
-5 | ‑5
x-1 | x ‒ 1
2.5 | ２．５
# exponents without braces, degrees of temperature
10^{-6} | 10^-6
10^-6 | 0.000001
2^-3 | 1/8
x^{-2} | x^-2
x^{-10} | x^-10
x^-n | x^{-n}
10^{-6} | 10**-6
5 \times 10^{-4} | 5 \times 10^-4
-5 | -5°C
-5 | -5 °C
-5 | -5℃
-5°C | -5
-5 | -5^{\circ}\mathrm{C}
98.6 | 98.6°F
300 | 300 K
# mixed numbers in words
5.25 | 5 and 1/4
21/4 | 5 and 1/4
5\frac{1}{4} | 5 and 1/4
\frac{21}{4} | 5 \text{ and } \frac{1}{4}
21/4 | 5 and ¼
21/4 | 5 and 1/4 cups
-5/2 | -2 and 1/2
5.5 | 5 and 3/6
5, \frac{1}{4} | 5 and 1/4
5 \text{ and } \frac{1}{4} | 5, 1/4
4, 6 | 4 and 6
# decimals that repeat are no decimals that end
1/7 | 0.\overline{142857}
0.\overline{142857} | 1/7
1/7 | 0.142857
# names on the left side
\frac{dy}{dx}=2x | 2x
dy/dx = 2x | 2x
\frac{dy}{dx}=2x | dy/dx=2x
\frac{dy}{dx}=2x | 2x = \frac{dy}{dx}
\frac{dV}{dt}=2x | 2x
\frac{d^2y}{dx^2}=2x | 2x
\frac{d}{dx}f(x) = 2x | 2x
\frac{\partial f}{\partial x}=2x | 2x
f'(x) = 2x | 2x
y'=2x | 2x
f'(x)=2x | \frac{dy}{dx} = 2x
x \ge 5 | x >= 5
[5, \infty) | x >= 5
f(2)=7 | 7
7 | f(2)=7
4 | x+y=4
# small letters of choices
B | (b)
B | b
B | b) 42
B | \text{(b)}
(b) | B
\textbf{(B)} | (b)
"""

UNEQUAL = r"""
# near misses
7 | -7
7 | 70
7 | 7.5
7 | 77
7 | 7!
7 | 7x
7 | 7\pi
7 | \sqrt{7}
7 | 7^2
7 | \frac{1}{7}
7 | 6, 7
7 | 6 \text{ or } 7
7 | [7, 8]
7 | \pm 7
7 | 7 or 8
7 | seven and a half
7 | 7 million
7 | 7\text{ million}
7 | 7 eighths
7 | 7 million dollars
7 | ?
7 | \text{unknown}
7 | x
1000000 | 1000001
123456789 | 123456788
100 | 1,00,000
1,000 | 1
1,000 | 1.000
12 | 1,2
12 | 1 2
# numbers that only look alike
\frac{1}{2} | \frac{2}{1}
\frac{1}{2} | 1, 2
\frac{1}{2} | 12
\frac{1}{2} | 0.05
\frac{1}{3} | 0.3
\frac{1}{3} | 0.333
\frac{1}{3} | 0.343333
\frac{2}{3} | 0.666666\%
12\frac{3}{5} | \frac{36}{5}
3\frac{1}{2} | \frac{3}{2}
0.0000001 | 0
0.0000001 | 0.0000002
\frac{1}{2004!} | \frac{1}{2005!}
10^{-20} | 10^{-21}
10^{20} | 10^{20}+1
3.14 | \pi
\pi | 3.14
\pi | \frac{22}{7}
\sqrt{2} | 1.41
e | 2.718
# decimals that repeat
\frac{1}{3} | 0.\overline{6}
\frac{1}{3} | 0.3\overline{0}
0.\overline{3} | 0.3
0.1\overline{6} | 0.\overline{16}
3 | \overline{3}
# percent and units
28\% | 2.8
90\text{ mph} | 90 km per hour
60\text{ km/h} | 60\text{ mph}
5\text{ m/s} | 5\text{ km/s}
5 | 5 per cent
5 | 5 per 2 hours
28\% | 2800\%
28 | 0.28
0.5 | 0.5\%
0.28 | 28
10\text{ cm} | 10\text{ m}
10\text{ cm} | 100\text{ cm}
45\text{ cm}^2 | 45\text{ cm}^3
45\text{ cm}^2 | 45\text{ cm}
5 \text{ cents} | 5 \text{ dollars}
\$5 | 5 cents
60 \text{ minutes} | 60 \text{ hours}
3s^2 | 3s^3
3s^2 | 3s
# surds, pi, i
2\sqrt{2} | \sqrt{2}
2\sqrt{2} | 2^{\sqrt{2}}
2\sqrt{3} | 3\sqrt{2}
\frac{\sqrt{3}}{2} | \frac{\sqrt{2}}{3}
\sqrt[3]{2} | \sqrt{2}
6\pi | 6
6\pi | \pi^6
6\pi | 9\pi
2i | 2
2i | -2i
-1-5i | -1+5i
e^2 | 2e
# algebra
x+1 | x-1
x+1 | y+1
x+1 | x
x^2 | 2x
x^2 | 2^x
x^2-1 | (x-1)^2
3x | 3
3x | x^3
3abc | 3
\frac{1}{2}abc | \frac{1}{2}
2x+6 | 2(x+6)
y=2x+3 | y=3x+2
y=2x+3 | x=2y+3
2x - y + 3 = 0 | 2x - y - 3 = 0
2x - y + 3 = 0 | 2x - y + 3
x=5 | x=-5
\frac{x+1}{2} | x+\frac{1}{2}
n! | n
# lists and sets
1,2 | 1
1,2 | 1,3
1,2 | 1,2,3
1,2 | 12
1,2 | 1,1
-2,1 | 2,-1
\{1,2,3\} | \{1,2\}
\{1,2\} | (1,2)
\{1,2\} | [1,2]
\pm 2 | 2
1 \pm \sqrt{2} | 1+\sqrt{2}
27,93 | 2793
45^\circ, 135^\circ | 45^\circ, 130^\circ
# points, vectors, matrices
(1,2) | (2,1)
(1,2) | 2,1
(1,2) | [1,2]
(1,2) | (1,2]
(1,2) | \{1,2\}
(1,2) | (1,2,3)
(1,2) | (1,-2)
(1,2) | 1
(3,-3,1) | (3,3,1)
\left(3,\frac{\pi}{2}\right) | \left(3,\frac{\pi}{3}\right)
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}
# intervals
[0,1] | (0,1)
[0,1] | [0,1)
[0,1] | [0,2]
[0,1] | \{0,1\}
(-\infty,3)\cup(3,\infty) | (-\infty,3]\cup(3,\infty)
(-\infty,3)\cup(3,\infty) | (-\infty,\infty)
[3,\infty) | (3,\infty)
x < 2 | x > 2
x < 2 | x \le 2
x < 2 | x < 3
(-\infty,2) | x>2
(-\infty,2)\cup(3,\infty) | x<2 and x>3
(-\infty,2)\cup(3,\infty) | x<2 or x\ge 3
(-\infty,2)\cup(3,\infty) | x<2 or y>3
(-\infty,2)\cup(3,\infty) | x<2
(-\infty,2)\cup(3,\infty) | x>2 or x<3
(2,3) | x>2 or x<3
\emptyset | 0
\emptyset | \{0\}
\varnothing | \mathbb{R}
# dates are no differences
2020-01-05 | 2020-05-01
2020-01-05 | 2014
2020-01-05 | 2014-01-05
2020-01-05 | 2020-01
2020-01-05 | May 1, 2020
1/5/2020 | 5/1/2020
1/5/2020 | \frac{1}{10100}
(-\infty,2) | x\le 2
# words, times, letters, bases
\text{even} | odd
\text{even} | not even
\text{Sunday} | Monday
\text{yes} | \text{no}
\text{4:30 p.m.} | 4:30 a.m.
\text{4:30 p.m.} | 5:30 p.m.
\text{(E)} | D
\text{(E)} | (A)
B | D
B | 2
B | b or c
\text{B, E, G} | B, E
\text{B, E, G} | B, E, F
AC | AB
AC | A
1011_2 | 1011_3
1011_2 | 1010_2
1011_2 | 11
4210_5 | 4210_6
# units of another kind
12.5 \text{ kg} | 12.5\%
45 \text{ cm} | 45^\circ
45 \text{ rad} | 45^\circ
45^\circ | 45 \text{ radians}
30\% | 30^\circ
5\% | 5 \text{ m}
5\% | \$5
\$5 | 5\%
5 \text{ oranges} | 5 apples
5 \text{ oranges} | 5 cm
# other choices, in the same dress
A | \textbf{(B)}
A | \textbf{(B) }14
B | \text{Option A}
B | \underline{E}
# other numbers, in the same dress
42 | \color{red}{43}
\frac{1}{2} | \sin 60^\circ
2x | dy/dx=3x
f \circ g | f g
\text{does not exist} | 0
# ratios, and lists with dots
3:4:6 | 3:6:4
3:4:6 | 3:4
3:4:6 | 3:4:7
3:4:6 | 3, 4, 6
3:2 | 2:3
a:b:c | a:c:b
1:\sqrt{3}:2 | 1:2:\sqrt{3}
3, 6, \dots, 3n | 3, 9, 27, \dots, 3^n
3, 6, \dots, 3n | 3, 9, \dots, 3n
\{2, 4, \ldots, 20\} | \{2, 6, \ldots, 20\}
\{2, 4, \ldots, 20\} | \{4, 2, \ldots, 20\}
\{2, 4, \ldots, 20\} | \{2, 4, 20\}
\{2,4,20\} | \{2, 4, \ldots, 20\}
1, 2, \ldots, n | n, \ldots, 2, 1
1, 2, \ldots, n | 1, 2, \ldots, m
1, 2, \ldots | 1, 2
1+2+\dots+n | 1+3+\dots+n
# characters of Unicode
28 | 2⁸
2⁸ | 28
y^{-3} | y³
32/3 | 3⅔
3⅔ | 32/3
3⅔ | 2
x \ge 5 | x > 5
x ⩾ 5 | x>5
\sqrt[3]{7} | √7
7 | ∛7
\lfloor y \rfloor | ⌈y⌉
⌊y⌋ | \lceil y \rceil
⌊y⌋ | y
5 | －5
# exponents without braces, degrees of temperature
x^{-}2 | x^-2
2^3 | 2^-3
2^-3 | 2^3
8 | 2^-3
-5°C | -5°F
5 | -5°C
# mixed numbers in words
1/4 | 5 and 1/4
5 | 5 and 1/4
10 | 4 and 6
6 | 4 and 6
6.25 | 5 and 5/4
5.25 | 5, 1/4
5.25 | 5 or 1/4
21/4 | 1/4 and 5
5, \frac{1}{4} | 5.25
# decimals that repeat are no decimals that end
0.142857 | 0.\overline{142857}
0.\overline{142857} | 0.142857
0.333333 | 0.\overline{3}
0.\bar{3} | 0.333333
0.\overline{6} | 0.666667
# names on the left side
\frac{dy}{dx}=2x | 3x
\frac{dy}{dx}=2x | \frac{dy}{dx}=3x
f'(x)=2x | f'(x)=3x
f'(x)=2x | f(x)=2x
f(x)=2x | f(x)=3x
x >= 5 | x > 5
\frac{dy}{dx}=2x | \frac{dx}{dy}=2x
\frac{dy}{dx}=2x | y=2x
f(2)=7 | 8
x+y=4 | 4
xy=4 | 4
# small letters of choices
B | (c)
b | (a)
"""


def pairs(table):
    lines = [line.strip() for line in textwrap.dedent(table).splitlines()]
    return [
        tuple(part.strip() for part in line.split(" | "))
        for line in lines
        if line and not line.startswith("#")
    ]


def test_the_table_is_long_and_has_no_pair_twice():
    table = pairs(EQUAL) + pairs(UNEQUAL)
    assert len(set(table)) == len(table) >= 300


@pytest.mark.parametrize("reference, answer", pairs(EQUAL))
def test_tricky_right_answers_are_right(pool, reference, answer):
    grade = pool.grade(f"so it is \\boxed{{{answer}}}.", reference)
    assert grade.verdict == "right", grade


@pytest.mark.parametrize("reference, answer", pairs(UNEQUAL))
def test_tricky_wrong_answers_are_wrong(pool, reference, answer):
    grade = pool.grade(f"so it is \\boxed{{{answer}}}.", reference)
    assert grade.verdict == "wrong", grade
