r"""Kinds of answers that once were graded wrong, each with neighbours.

A line is ``reference | text``. In a table of answers the text stands in a box; in a table of texts
it is the whole reply.
"""

import itertools

import pytest

from marft_jax.envs.grading import GradingPool, extract, units
from marft_jax.envs.grading.compare import quick


@pytest.fixture(scope="module")
def pool():
    pool = GradingPool(1, 30)
    yield pool
    pool.close()


TEXTS = r"""
# an answer between tags
7 | <answer>7</answer> I checked 3 cases and 2 proofs.
\frac{1}{2} | <answer>\frac{1}{2}</answer>, from 4 equations.
B | <answer>B</answer> not (C)
7 | <think>maybe <answer>3</answer></think><answer>7</answer> of 12
7 | <answer>so \boxed{7}, from 3 cases</answer>
7 | <answer>\boxed{7}</answer> (checked 3 times)
7 | <Answer> 7 </Answer> 3 checks
7 | <answer>$7$</answer> 12
7 | <answer>The answer is 7, since 3 + 4 = 7.</answer>
7 | <answer>She has 7 apples.</answer> I used 2 facts.
7 | I checked 3 cases. <answer>7
7 | <final_answer>7</final_answer> 3 checks
x+1 | <answer>x+1</answer> after 2 steps
2, 3 | <answer>2, 3</answer> 4
(1,2) | <answer>(1, 2)</answer> 4
\text{Sunday} | <answer>Sunday</answer>, 2 days later
B | <answer>(B) 12</answer> not (C)
B | <answer>Option B</answer>. A is wrong.
B | <answer>b</answer>
7 | The tags are <answer> and </answer>. So <answer>7</answer>.
7 | \boxed{3}? No. <answer>7</answer>
18 | <answer>$18 per day</answer> 16 eggs
# letters of choices
B | The answer is (b).
B | The answer is b.
B | b)
D | d
D | d.
D | (d)
C | c) 12
C | **c**
B | Option b
B | option (b)
B | The correct option is b.
B | I choose b
E | The answer is: e
A | The answer is a.
A | (a)
A | a)
B | b) because the others are false
B | So the answer is b) 12 apples
B | ans: b
C | C. 12
B | The correct choice is **b**.
# booleans
True | Yes, because 7 is prime.
True | yes
True | The statement is true.
True | The answer is yes.
True | It is **True**.
True | 是
True | 是的，因为 7 是质数。
True | 答案是：对
True | 答案：正确。
False | No, 9 is 3 times 3.
False | The statement is false.
False | The statement is not true.
False | It isn't true.
False | No.
False | 否
False | 不是。
False | 不对
False | 错误
False | \boxed{\text{No}}
False | Therefore, the claim is \boxed{false}.
True | \boxed{\text{Yes}}
True | \boxed{Yes, it is}
\text{Yes} | True
\text{Yes} | The answer is yes, since both are even.
\text{True} | \boxed{True}
yes | It is true.
no | False
No | No, there are none.
no | The answer: **no**
是 | Yes
否 | No, it is odd.
正确 | True
错误 | false
True | So the answer is: Yes.
False | <answer>No</answer>
False | Is it true? Let us see. 4 is even. So no.
True | No number divides it, so the answer is yes.
True | Yes. It is not the case that 7 is even.
# units behind the answer in a sentence
1500\text{ J} | So the answer is 1500 J.
5\text{ m} | The answer is 5 m.
5\text{ m} | It is 5 m long.
9.8\text{ m/s}^2 | The answer is $9.8$ m/s^2.
5\text{ kg} | It has a mass of 5 kg.
5 | The answer is 5 kg.
5\text{ km} | They walk 5 km.
"""

NOT_TEXTS = r"""
# an answer between tags
2 | <answer>7</answer> I checked 3 cases and 2 proofs.
3 | <answer>7</answer> I checked 3 cases.
C | <answer>B</answer> not (C)
3 | <answer>3</answer> no: <answer>7</answer>
3 | <answer>2, 3</answer>
3 | <answer>2 or 3</answer>
3 | <answer>7
# letters of choices
B | a bag of b
B | The answer is (c).
B | a b c
A | The answer is a cat.
A | a man
B | \boxed{c}
B | I took a bag, b was not there, and c
D | I am done
# booleans
True | No, because 9 is not prime.
True | The statement is false.
True | not true
True | It isn't true.
False | Yes
False | The statement is true.
True | 不是
True | 否
True | 不对
True | 7
True | no
True | \boxed{No, it is not true}
False | It is not false.
\text{Yes} | No
yes | I know.
no | It is now known.
True | It is untrue.
# units behind the answer in a sentence
5\text{ m} | The answer is 5 km.
1500\text{ J} | So the answer is 1500 kJ.
5\text{ m} | It weighs 5 kg.
"""

EQUAL = r"""
# Euler's number upright
e^2 | \mathrm{e}^2
2e | 2\mathrm{e}
\mathrm{e}^2 | e^2
2\mathrm{e} | 2e
e | \mathrm{e}
\mathrm{e} | e
e^{-x} | \mathrm{e}^{-x}
x e^x | x\mathrm{e}^{x}
\frac{1}{e} | \frac{1}{\mathrm{e}}
e^{i\pi} | \mathrm{e}^{\mathrm{i}\pi}
2+3i | 2+3\mathrm{i}
2i | 2\mathrm{i}
e+1 | \mathrm e+1
e^2 | \mathrm e^2
e^2 | {\rm e}^2
e^2 | \text{e}^2
\sqrt{e} | \sqrt{\mathrm{e}}
3e | 3\,\mathrm{e}
e^2 | \operatorname{e}^2
12 | 12\mathrm{m}
12\mathrm{m} | 12
12\mathrm{m} | 12\text{ m}
# doubled backslashes
\\sqrt{2} | \sqrt{2}
2\\pi | 2\pi
\\frac{\\pi}{4} | \frac{\pi}{4}
50\\% | 50\%
\\frac{1}{2} | 0.5
\\frac{1}{2} | \frac{1}{2}
\sqrt{2} | \\sqrt{2}
\\text{(B)} | B
\\text{Sunday} | Sunday
10\\text{ cm} | 10 cm
\\left(1, 2\\right) | (1,2)
\\{1, 2\\} | \{2, 1\}
5,\\!866 | 5866
\\$18 | 18
x \\le 5 | x \le 5
\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\\begin{pmatrix} 1 \\ 2 \\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix} a \\b \end{pmatrix} | \begin{pmatrix} a \\ b \end{pmatrix}
\\\\sqrt{2} | \sqrt{2}
45^\\circ | 45
\\log_2 8 | 3
# functions without a backslash
\sin(x) | sin(x)
\sin x+\cos x | cos(x) + sin(x)
\ln(8) | 3 ln(2)
\sin(2x) | 2sin(x)cos(x)
sin(x) | \sin(x)
\sin x | sin x
\ln 2 | ln 2
\ln 2 | ln(2)
\tan x | tan(x)
\arctan x | arctan(x)
\log_2 8 | log_2 8
\log_2(5) | log_2(5)
\sin^2 x | sin^2(x)
1 - \cos^2 x | sin^2(x)
e^x | exp(x)
x\sin x | x sin(x)
x\sin x | x*sin(x)
x\sin x | xsin(x)
\frac{\ln 2}{2} | ln(2)/2
-\cos x + C | C - cos(x)
\sin x | sinx
\sin\theta | sin(theta)
\max(1,2) | max(1,2)
\sinh x | sinh(x)
\sec x | sec(x)
\ln x + C | ln(x)+C
# letters of choices
C | C 12
C | c 12
B | b
B | b)
C | C\ 12
C | \text{C } 12
C | (C) 12
C | C: 12
C | C - 12
# a root of a fraction, of a product
\frac{1}{\sqrt{n}} | \sqrt{1/n}
\frac{1}{\sqrt{n}} | \sqrt{\frac{1}{n}}
\sqrt{\frac{2}{n}} | \frac{\sqrt{2}}{\sqrt{n}}
\sqrt{\frac{a}{b}} | \frac{\sqrt{a}}{\sqrt{b}}
\sqrt{\frac{n-1}{n+1}} | \frac{\sqrt{n-1}}{\sqrt{n+1}}
\sqrt[3]{\frac{1}{n}} | \frac{1}{\sqrt[3]{n}}
n^{-1/2} | \sqrt{\frac{1}{n}}
\frac{\sqrt{n}}{n} | \sqrt{\frac{1}{n}}
2\pi\sqrt{\frac{l}{g}} | \frac{2\pi\sqrt{l}}{\sqrt{g}}
\sqrt{ab} | \sqrt{a}\sqrt{b}
\sqrt{\frac{k}{m}} | (k/m)^{1/2}
\frac{\sqrt{2gh}}{2} | \sqrt{\frac{gh}{2}}
\frac{1}{\sqrt{n}} + 1 | 1 + \sqrt{\frac{1}{n}}
y = \sqrt{\frac{1}{n}} | y = \frac{1}{\sqrt{n}}
\frac{\sqrt{n}}{n} | \frac{1}{\sqrt n}
# exact numbers, and decimals that round them
\frac{1}{3} | 0.333333
\frac{2}{3} | 0.6666667
1/1000001 | 1/1000001
0.000001 | \frac{1}{1000000}
1/1000001 | 9.99999e-7
\frac{999999}{1000000} | 0.999999
22/7 | 3.142857
22/7 | 3.1428571
1/7 | 0.1428571
12.5 | \frac{25}{2}
# names, membership, sets by their condition
n=2, 3, 4 | 4, 3, 2
n=2, 3, 4 | n = 3, 2, 4
D = (0, 1) | (0, 1)
(x,y) = (1,2) | (1,2)
(1,2) | (x, y) = (1, 2)
x \in [-2,7] | [-2,7]
x \in [-2,7] | -2 \le x \le 7
[-2,7] | x∈[-2,7]
x \in \{1,2\} | \{2,1\}
\{x : x > 2\} | (2, \infty)
\{x \mid x > 2\} | x > 2
x > 2 | \{x \in \mathbb{R} \mid x > 2\}
x \equiv 3 \pmod{7} | 3 \pmod 7
x \equiv 3 \pmod{7} | x ≡ 3 (mod 7)
40_9 | x = 40_9
\{(1,2),(3,4)\} | (3,4),(1,2)
\text{All real numbers} | \mathbb{R}
(-\infty, \infty) | all real numbers
\text{no solution} | \emptyset
\text{No solutions} | no solution
\text{(B)} | \displaystyle \text{(B)}
3 | three
12 | \text{twelve}
9 | 9页
9 | 9 元
3.5 | 3.5千克
20 | 20平方米
90000 | 9万
90000 | 9万元
2 | 2小时
# units: there or not
1500 \text{ J} | 1500 J
1500 \text{ J} | 1500J
1500 \text{ J} | 1500
1500 | 1500 J
1500 | 1500\text{ J}
1500 \text{ J} | 1500\,\mathrm{J}
1500 \text{ J} | 1500 joules
1500 \text{ J} | 1500 Joules
1.5 \text{ kJ} | 1.5 kJ
1.5 \text{ kJ} | 1.5 kilojoules
9.8 \text{ m/s}^2 | 9.8 m/s^2
9.8 \text{ m/s}^2 | 9.8 \text{ m/s}^{2}
9.8 \text{ m/s}^2 | 9.8\ \mathrm{m\,s^{-2}}
9.8 \text{ m/s}^2 | 9.8 m s^{-2}
9.8 \text{ m/s}^2 | 9.8 m/s²
9.8 \text{ m/s}^2 | 9.8 meters per second squared
9.8 \mathrm{~m} / \mathrm{s}^{2} | 9.8 m/s^2
9.8 \mathrm{~m} / \mathrm{s}^{2} | 9.8
9.8 | 9.8 \mathrm{~m} / \mathrm{s}^{2}
9.8 | 9.8\text{ m/s}^2
9.8 | 9.8 m/s²
12 \text{ kg·m/s} | 12 kg m/s
12 \text{ kg·m/s} | 12 kg·m/s
12 \text{ kg} \cdot \text{m/s} | 12 kg*m/s
12 \text{ kg·m/s} | 12
12 | 12 kg·m/s
12 | 12\ \mathrm{kg \cdot m/s}
5 \text{ N} \cdot \text{m} | 5 N·m
5 \text{ N·m} | 5 N m
5 \text{ N} | 5 newtons
5 \text{ N} | 5 N
3 \text{ eV} | 3 eV
3 \text{ MeV} | 3 MeV
3 | 3 eV
20^\circ\text{C} | 20 °C
20^\circ\text{C} | 20°C
20 ^{\circ} \mathrm{C} | 20 degrees Celsius
20 | 20 ^\circ \text{C}
100 \Omega | 100 ohms
100 \Omega | 100\ \Omega
100 \,\Omega | 100 Ω
100\text{ }\Omega | 100
100 | 100 Ω
100 | 100\,\Omega
4.7 \text{ k}\Omega | 4.7 kΩ
0.1 \text{ mol/L} | 0.1 mol/L
0.1 \text{ mol/L} | 0.1 mol L^{-1}
0.1 | 0.1 mol/L
0.1 \text{ M} | 0.1 M
50 \text{ Hz} | 50 Hz
50 \text{ Hz} | 50 hertz
50 | 50 Hz
2.4 \text{ GHz} | 2.4 GHz
12 \text{ V} | 12 volts
12 \text{ V} | 12 V
12 | 12 V
12 \text{ A} | 12 amperes
12 \text{ A} | 12 amps
60 \text{ W} | 60 watts
60 \text{ W} | 60 W
101 \text{ kPa} | 101 kPa
101 \text{ kPa} | 101 kilopascals
1 \text{ atm} | 1 atm
5 \mu\text{m} | 5 μm
5\ \mu\mathrm{m} | 5 micrometers
5\ \mu\mathrm{m} | 5
5 \text{ nm} | 5 nm
600 | 600 nm
3 \text{ mA} | 3 mA
2 \text{ T} | 2 T
2 \text{ T} | 2 tesla
5 \text{ F} | 5 F
5\ \mu\text{F} | 5 μF
3 \times 10^8 \text{ m/s} | 3 \times 10^8 m/s
3 \times 10^8 \text{ m/s} | 3 \times 10^{8}
3 \times 10^8 | 3\times10^8\ \mathrm{m/s}
3 \times 10^8 \text{ m/s} | 3e8 m/s
4.18 \text{ J/(g·K)} | 4.18 J/(g·K)
4.18 \text{ J/(g·K)} | 4.18 J g^{-1} K^{-1}
4.18 | 4.18 J/(kg·K)
6.67 \times 10^{-11} | 6.67 \times 10^{-11}\ \mathrm{N\,m^2/kg^2}
20 \text{ kWh} | 20 kWh
20 \text{ ft/s} | 20 feet per second
32 \text{ ft/s}^2 | 32 ft/s^2
60 \text{ km/h} | 60 km/hr
60 | 60 km h^{-1}
5 \text{ dollars} | \$5
5 \text{ cents} | 5 cents
5 | 5 euros
25 \text{ rpm} | 25 rpm
8 \text{ bits} | 8 bits
8 \text{ GB} | 8 GB
300 \text{ K} | 300 kelvin
3.5 \text{ ha} | 3.5 hectares
10 \text{ cm}^2 | 10 cm²
5 \text{ m}^3/\text{s} | 5 m^3/s
5 \text{ m}^3/\text{s} | 5
\frac{1}{2} \text{ A} | 0.5 A
2\pi \text{ rad/s} | 2\pi
2\pi \text{ rad/s} | 2\pi rad/s
2\sqrt{3} \text{ N} | 2\sqrt{3} N
2\sqrt{3} \text{ N} | 2\sqrt{3}
10\sqrt{2} | 10\sqrt{2}\ \mathrm{m/s}
v = 5 \text{ m/s} | 5 m/s
5 \text{ m/s} | v = 5 m/s
5 | v = 5\ \mathrm{m/s}
-5 \text{ V} | -5 V
12m | 12m
12m | 12 m
3t | 3t
5 \text{ m} | 5m
5m | 5\text{ m}
# units: the same by conversion
5 \text{ m} | 500 cm
500 \text{ cm} | 5 m
1.5 \text{ kJ} | 1500 J
1500 \text{ J} | 1.5\text{ kJ}
60 \text{ minutes} | 1 hour
2 \text{ m}^2 | 20000 cm^2
36 \text{ km/h} | 10 m/s
5 \text{ dollars} | 500 cents
0.5 \text{ L} | 500 mL
1 \text{ kg} | 1000 g
2 \text{ J} | 2 N·m
5 \text{ N} | 5 kg m/s^2
1 \text{ ft} | 12 in
"""

UNEQUAL = r"""
# Euler's number upright
e^{2} | \mathrm{e}^{3}
2e | 3\mathrm{e}
2e | 2
2 | 2\mathrm{e}
2i | 2
2 | 2\mathrm{i}
# doubled backslashes
\\sqrt{2} | \sqrt{3}
2\\pi | 2
\\frac{1}{2} | \frac{1}{3}
50\\% | 5
\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} | \begin{pmatrix} 2 \\ 1 \end{pmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1 & 2 \end{pmatrix}
# functions without a backslash
\sin(x) | isn(x)
\sin(x) | nis(x)
\sin(x) | cos(x)
\ln(8) | 2 ln(2)
\sin x | s i n x
\sin(2x) | 2sin(x)
\log_2 5 | log_3 5
# letters of choices
C | B 12
B | a bag of b
B | C 12
B | b or c
B | B or C
B | A, B
B | ab
A | a cat
A | a 12
# a root of a fraction
\frac{1}{\sqrt{n}} | \sqrt{2/n}
\sqrt{x^2} | x
x | \sqrt{x^2}
\sqrt{\frac{2}{n}} | \frac{2}{\sqrt{n}}
\frac{1}{\sqrt{n}} | \sqrt{n}
\frac{1}{\sqrt{n}} | \frac{1}{n}
\sqrt{a+b} | \sqrt{a}+\sqrt{b}
\sqrt{ab} | \sqrt{a}b
# exact numbers are compared exactly
1/1000001 | 0.000001
\frac{999999}{1000000} | 1
\frac{999999}{1000000} | 1.0
\frac{1}{1000001} | \frac{1}{1000000}
1/1000000 | \frac{1}{1000001}
\frac{1}{3} | 0.3333
1 | \frac{1000001}{1000000}
\frac{1000001}{1000000} | 1
1000000 | \frac{1000001}{1}
\frac{3000001}{1000000} | 3
2 | \frac{2000001}{1000000}
\frac{10000001}{2} | 5000000
\frac{1}{\sqrt{1000001}} | 0.001
\sqrt{1000001} | 1000
\sqrt{2} | \frac{1414213}{1000000}
\frac{1}{999999} | 10^{-6}
10^{-6} | \frac{1}{999999}
2^{-20} | 0.00000095
(1, \frac{999999}{1000000}) | (1, 1)
\frac{999999}{1000000}x | x
\frac{\pi}{1000001} | \frac{\pi}{1000000}
# names, membership, sets by their condition
n=2, 3, 4 | n=1, 2, 3
D = (0, 1) | D = (0, 1.5)
(x,y) = (1,2) | (x,y) = (1,3)
x=1, y=2 | x=1, y=3
F_n = \sum_{k=0}^{n-1} F_k | F_n = \sum_{k=0}^{n-2} F_k
x \in [-2,7] | x \in [-2,8]
x \in (-2,7) | x \in [-2,7]
\theta \in [0, \pi] | \theta \in [0, 2\pi]
x \in \{1,2\} | x \in \{1,3\}
\{x : x > 2\} | \{x : x > 3\}
\{x \mid x > 2\} | \{x \mid x \ge 2\}
x \equiv 3 \pmod{7} | x \equiv 4 \pmod{7}
x \equiv 3 \pmod{7} | x \equiv 3 \pmod{8}
\sum_{k=1}^{n} k | \sum_{k=1}^{n} k^2
40_9 | x = 41_9
9 | 9万
9 | 9千
3 | four
x=5, y=4 | 4
# units that differ
1500 \text{ J} | 1500 kJ
1500 \text{ J} | 1500 W
5 \text{ m} | 5 cm
5 \text{ m} | 500 m
5 \text{ m} | 5 s
5 \text{ m} | 50 cm
9.8 \text{ m/s}^2 | 9.8 m/s
9.8 \text{ m/s} | 9.8 m/s^2
9.8 \text{ m/s} | 9.8 km/h
12 \text{ kg·m/s} | 12 g·m/s
5 \text{ N·m} | 5 N
5 \text{ mA} | 5 A
5 \text{ mA} | 5 MA
5 \text{ MW} | 5 mW
5 \text{ eV} | 5 MeV
20^\circ\text{C} | 20^\circ\text{F}
20^\circ\text{C} | 20 K
100\ \Omega | 100\text{ k}\Omega
0.1 \text{ mol/L} | 0.1 mol
50 \text{ Hz} | 50 kHz
5 \text{ dollars} | 5 cents
5\ \mu\text{m} | 5 nm
5\ \mu\text{m} | 5 m
1 \text{ kg} | 1 g
1500 \text{ J} | 1501 J
1500 | 1501 J
60 \text{ minutes} | 60 seconds
12 | 12x
12m | 12n
12m | 13m
3x | 3
5 \text{ m} | 5x
5 \text{ m/s} | 5 m/min
"""

NEIGHBOURS = r"""
1 | 7 | Answer: <answer>7</answer>.
1 | 7 | <answer>7</answer><answer></answer>
1 | 7 | <answer> x = 7 </answer>
1 | 7 | <answer>**7**</answer>
1 | 7 | <answer>\(7\)</answer>
1 | 7 | <answer>7 apples</answer> of 12
1 | 7 | <answer>7.</answer> 12
1 | 0.5 | <answer>1/2</answer> 12
1 | \frac{1}{2} | <answer>$\dfrac12$</answer>, 4
1 | 7 | <answer>#### 7</answer> 12
0 | 7 | <answer>8</answer> I mean 7
0 | 7 | <answer>8</answer> \boxed{7}
1 | B | <answer> (B) </answer> but A
1 | B | <answer>B. Bonn</answer> C
1 | B | <answer>The correct option is B because A is wrong.</answer>
1 | x^2+1 | <answer>The answer is $x^2+1$.</answer> 12
1 | yes | <answer>Yes, it is.</answer>
1 | \text{Monday} | <answer>Monday</answer> or Friday
1 | 3,5 | <answer>3 and 5</answer> 7
1 | 1,234 | <answer>1,234</answer>.
1 | 7 | <|assistant|><answer>7</answer></s>
1 | e^2 | so $\boxed{\mathrm{e}^{2}}$
1 | e^{2x} | \boxed{\mathrm{e}^{2x}}
1 | \ln 2 | \boxed{\mathrm{ln}\,2}
1 | \sin x | \boxed{\mathrm{sin}\,x}
1 | \sin x | \boxed{\operatorname{sin} x}
1 | \frac{dy}{dx} = 2x | \boxed{\frac{\mathrm{d}y}{\mathrm{d}x} = 2x}
1 | \int_0^1 x\,dx | \boxed{\frac12}
1 | \mathrm{e}-1 | \boxed{e-1}
1 | \frac{\mathrm{e}}{2} | \boxed{e/2}
1 | 3\mathrm{e}^{-2} | \boxed{3/e^2}
0 | 3\mathrm{e}^{-2} | \boxed{3e^2}
1 | \\frac{3}{4} | \boxed{0.75}
1 | \\frac{3}{4} | The answer is 3/4.
1 | x^2 \\cdot y | \boxed{x^2y}
1 | \\pm 3 | \boxed{3, -3}
1 | \\emptyset | \boxed{\varnothing}
1 | (-\\infty, 3] | \boxed{x \le 3}
1 | \\text{even} | even
1 | \\mathbf{B} | The answer is (B)
1 | \\overline{3} | \boxed{\overline{3}}
1 | 0.\\overline{3} | \boxed{1/3}
1 | \\binom{5}{2} | \boxed{10}
1 | \\begin{bmatrix} 1 \\\\ 3 \\end{bmatrix} | \boxed{\begin{bmatrix} 1 \\ 3 \end{bmatrix}}
1 | \begin{bmatrix} 1 \\3 \end{bmatrix} | \boxed{\begin{bmatrix} 1 \\ 3 \end{bmatrix}}
1 | \begin{pmatrix} x \\y \end{pmatrix} | \boxed{\begin{pmatrix} x \\ y \end{pmatrix}}
1 | 2\sin x\cos x | \boxed{sin(2x)}
1 | \sin x + 1 | \boxed{1 + sin x}
1 | \ln(x+1) | \boxed{ln(1+x)}
1 | e^{\sin x} | \boxed{e^{sin x}}
1 | e^{\sin x} | \boxed{e^(sin(x))}
1 | \frac{\sin x}{x} | \boxed{sin(x)/x}
1 | \cos 2\theta | \boxed{cos(2theta)}
1 | x \ln x - x | \boxed{x ln(x) - x}
1 | x \ln x - x | \boxed{xln(x) - x}
1 | \log 5 | \boxed{log(5)}
1 | \sqrt{\sin x} | \boxed{sqrt(sin(x))}
1 | \tan^{-1} x | \boxed{arctan(x)}
0 | \sin x | \boxed{sin(y)}
0 | \sin x | \boxed{sinn(x)}
0 | \ln 8 | \boxed{nl(8)}
0 | \cos x | \boxed{ocs(x)}
1 | B | The answer is: (b)
1 | B | answer: b)
1 | B | **Answer: b**
1 | B | Answer: (B) 12 apples
1 | B | (b) 12
1 | B | My final choice is (b).
1 | B | Therefore the correct answer is option b.
1 | B | It is b.
1 | B | $\boxed{\text{b}}$
1 | B | $\boxed{(b)}$
1 | B | $\boxed{\text{(b) } 12}$
1 | B | $\boxed{\mathrm{B}}$
1 | C | c
1 | C | C
1 | C | c.
1 | C | (c) because
1 | E | \boxed{E 7/2}
1 | E | \boxed{E \frac{1}{2}}
1 | E | \boxed{\textbf{(E)}\ \frac{1}{2}}
0 | E | \boxed{D \frac{1}{2}}
0 | C | \boxed{12 C}
0 | B | bag
0 | B | the set b is empty, a is full
0 | A | \boxed{a + b}
0 | B | \boxed{b + 1}
0 | B | \boxed{bc}
1 | True | Yes.
1 | True | **Yes**, it is.
1 | True | Yes - because 4 is even.
1 | True | yes, since 7 > 3
1 | True | The claim is correct.
1 | True | So the statement holds: true.
1 | True | The answer is: True.
1 | True | \boxed{\text{True}}
1 | True | $\boxed{\text{yes}}$
1 | True | TRUE
1 | True | Answer: Yes
1 | True | I think yes.
1 | False | I think no.
1 | False | The claim is incorrect.
1 | False | The statement is untrue.
1 | False | \boxed{\textbf{No}}
1 | False | No - 9 is odd.
1 | False | No; 9 is odd.
1 | False | No, that is not the case. It would be true only for even numbers.
1 | False | It cannot be true.
1 | False | This is not correct.
1 | False | It is never true.
1 | False | The answer is no, because it is true only for 2.
1 | True | Yes, it is not false.
1 | \text{True} | yes
1 | \text{No} | The answer is False.
1 | yes | True
1 | Yes | \boxed{\text{Yes}}
1 | No | \boxed{\text{no}}.
1 | 对 | 正确
1 | 错 | 这个说法是错误的。
1 | 错 | 这个说法不正确。
1 | 对 | 这个说法是正确的。
1 | 是 | 答案是：是
1 | 否 | 答案：否
0 | True | \boxed{False}
0 | False | \boxed{True}
0 | True | It cannot be true.
0 | True | Not true.
0 | False | Yes, it is.
0 | True | 12
0 | True | perhaps
1 | 1500\text{ J} | \boxed{1500\ \text{Joule}}
1 | 1500\text{ J} | The work is 1500 J.
1 | 1500\text{ J} | The work done is $1500 \text{ J}$.
1 | 1500\text{ J} | The answer is $1500\,\mathrm{J}$.
1 | 1500\text{ J} | The answer is 1.5 kJ.
0 | 1500\text{ J} | The answer is 1.5 J.
1 | 9.8\ \text{m/s}^2 | \boxed{9.8\ \text{m} \cdot \text{s}^{-2}}
1 | 9.8\ \text{m/s}^2 | \boxed{9.8\ \frac{\text{m}}{\text{s}^2}}
1 | 9.8\ \frac{\text{m}}{\text{s}^2} | \boxed{9.8 m/s^2}
1 | 9.8 | \boxed{9.8\ \frac{\text{m}}{\text{s}^2}}
1 | 20\text{ m/s} | \boxed{72 km/h}
1 | 72\text{ km/h} | \boxed{20\text{ m/s}}
1 | 3\text{ hours} | \boxed{180\text{ minutes}}
1 | 3\text{ hours} | \boxed{3h}
1 | 3\text{ h} | \boxed{3 hrs}
1 | 5\text{ kg} | \boxed{5000 g}
1 | 5\text{ kg} | \boxed{5kg}
0 | 5\text{ kg} | \boxed{5 g}
0 | 5\text{ kg} | \boxed{5 lb}
1 | 6.02 \times 10^{23} | \boxed{6.02 \times 10^{23}\ \text{mol}^{-1}}
1 | 6.02 \times 10^{23}\text{ mol}^{-1} | \boxed{6.02 \times 10^{23}}
1 | 1.6 \times 10^{-19} \text{ C} | \boxed{1.6 \times 10^{-19} C}
1 | 1.6 \times 10^{-19} \text{ C} | \boxed{1.6e-19}
1 | 25^{\circ}\text{C} | \boxed{25^\circ}
1 | 25^{\circ}\text{C} | \boxed{25}
1 | 25^{\circ}\text{C} | \boxed{25\,{}^{\circ}\mathrm{C}}
1 | 25^{\circ}\text{C} | \boxed{25 C}
1 | 25\ ^\circ C | \boxed{25^{\circ}\mathrm{C}}
1 | 45^\circ | \boxed{45 \text{ degrees}}
1 | 2\pi\text{ rad} | \boxed{2\pi}
1 | \frac{\pi}{2}\text{ radians} | \boxed{\frac{\pi}{2}}
1 | 4.5\text{ V} | \boxed{V = 4.5\text{ V}}
1 | 4.5\text{ V} | \boxed{V = 4.5 V}
1 | 4.5\text{ V} | \boxed{4.5\,V}
1 | 12\text{ N} | \boxed{F = 12 N}
1 | 0.25\text{ A} | \boxed{250 mA}
1 | 0.25\text{ A} | \boxed{250\,\mathrm{mA}}
1 | 2\text{ mol} | \boxed{2 moles}
1 | 18\text{ g/mol} | \boxed{18 g/mol}
1 | 18 | \boxed{18\ \text{g}\,\text{mol}^{-1}}
1 | 1\text{ g/cm}^3 | \boxed{1000\text{ kg/m}^3}
1 | 1\text{ g/cm}^3 | \boxed{1 g/cm^3}
1 | 5\text{ m} | \boxed{5\textrm{ m}}
1 | 5\text{ m} | \boxed{5\,\mathsf{m}}
1 | 5\,\text{m} | \boxed{5\mathrm{\,m}}
1 | 5\text{ m} | \boxed{5\ m}
1 | 5\text{ m} | \boxed{5~\text{m}}
1 | 5\text{ m} | \boxed{\text{5 m}}
1 | \SI{5}{m} | \boxed{5\text{ m}}
1 | 5\text{ m} | \boxed{\SI{5}{m}}
1 | 5\text{ m} | \boxed{5\,\si{m}}
1 | \$12.50 | \boxed{12.50\text{ dollars}}
1 | 12.5 | \boxed{\$12.50}
1 | \$1 | \boxed{100 cents}
1 | 75\% | \boxed{75\text{ percent}}
1 | 75\% | \boxed{0.75}
0 | 75\% | \boxed{75\text{ m}}
0 | x\text{ m} | \boxed{y\text{ m}}
1 | 12m | \boxed{12 \cdot m}
1 | 12m | \boxed{m \cdot 12}
1 | 3V | \boxed{3V}
1 | 2mg | \boxed{2mg}
1 | mgh | \boxed{mgh}
1 | \frac{1}{2}mv^2 | \boxed{\frac{mv^2}{2}}
0 | \frac{1}{2}mv^2 | \boxed{\frac{1}{2}}
1 | 2s | \boxed{2s}
1 | 5g | \boxed{5g}
0 | 5x\text{ cm} | \boxed{5\text{ cm}}
1 | 5x\text{ cm} | \boxed{5x}
0 | 3a | \boxed{3}
0 | 3 a | \boxed{3}
0 | 3L | \boxed{3W}
1 | L | \boxed{L}
1 | 3\text{ cm}, 4\text{ cm} | \boxed{3, 4}
1 | 3, 4 | \boxed{3\text{ cm}, 4\text{ cm}}
1 | 3, 4 | \boxed{3 cm, 4 cm}
1 | 3\text{ cm}, 4\text{ cm} | \boxed{4\text{ cm}, 3\text{ cm}}
0 | 3\text{ cm}, 4\text{ cm} | \boxed{3\text{ cm}, 5\text{ cm}}
1 | 3 \text{ and } 4\text{ cm} | \boxed{3, 4}
1 | 5\text{ cm} \times 3\text{ cm} | \boxed{5\text{ cm} \times 3\text{ cm}}
1 | 6\text{ units} | \boxed{6}
1 | 3\text{ hours } 20\text{ minutes} | \boxed{3 hours 20 minutes}
1 | 3\text{ hours and } 20\text{ minutes} | \boxed{3\text{ hours and } 20\text{ minutes}}
1 | [3, 4]\text{ cm} | \boxed{[3,4]}
1 | x = 3\text{ cm}, y = 4\text{ cm} | \boxed{x = 3, y = 4}
1 | 2\pi r\text{ cm} | \boxed{2\pi r}
1 | 5\text{ feet }3\text{ inches} | \boxed{5\text{ feet }3\text{ inches}}
1 | 50\%, 25\% | \boxed{50\%, 25\%}
1 | \$3, \$4 | \boxed{3, 4}
1 | 3, 4 | \boxed{\$3, \$4}
1 | 3\text{ apples}, 4\text{ pears} | \boxed{3\text{ apples}, 4\text{ pears}}
1 | 10\text{ cm} | \boxed{\approx 10\text{ cm}}
1 | 3.14 | \boxed{\approx 3.14}
1 | 12\text{ m/s} \text{ north} | \boxed{12\text{ m/s} \text{ north}}
1 | 20\text{ meters} | \boxed{20 \text{ meters long}}
1 | 20\text{ square feet} | \boxed{20 \text{ ft}^2}
1 | 100 | \boxed{100\text{ people}}
1 | 100\text{ people} | \boxed{100}
1 | 5:30 | \boxed{5:30\text{ pm}}
1 | 5:30\text{ pm} | \boxed{5:30 PM}
1 | (2,1) | \boxed{= (2,1)}
1 | 7p+4e | \boxed{= 7p+4e}
1 | 8_9 | \boxed{= 8_9}
1 | 4+\sqrt{2} | \boxed{\text{Answer: } 4+\sqrt{2}}
1 | (2,1) | \boxed{\text{The answer is } (2,1)}
1 | -\frac{16}{63} | \boxed{\mathbf{-\frac{16}{63}}}
1 | 4+\sqrt{2} | \boxed{\mathbf{4+\sqrt{2}}}
1 | (8,-2) | \boxed{\big(8,-2\big)}
1 | 3(x-2)(x+1) | \boxed{3\bigl(x-2\bigr)\bigl(x+1\bigr)}
1 | (-\infty, 2) \cup (3, \infty) | \boxed{(-\infty, 2) U (3, \infty)}
1 | (-\infty, 2) \cup (3, \infty) | \boxed{(-\infty, 2) \bigcup (3, \infty)}
1 | 0, \frac{2 \pi}{3} | \boxed{0, {2 \pi \over 3}}
1 | \text{4:30 p.m.} | \boxed{\text{4:30 p.m.}.}
0 | (2,1) | \boxed{= (1,2)}
0 | (8,-2) | \boxed{\big(8,2\big)}
0 | -\frac{16}{63} | \boxed{\mathbf{\frac{16}{63}}}
0 | (-\infty, 2) \cup (3, \infty) | \boxed{(-\infty, 3) U (2, \infty)}
1 | 9 \pi | \boxed{9 \pi\ }
1 | (46,2004) | \boxed{(46,2004)\ }
1 | 9 \pi | \boxed{9 \pi \square}
1 | (46,2004) | \boxed{\therefore (46,2004)}
1 | \frac{1}{20} | \boxed{\large \frac{1}{20}}
1 | (-5,\sqrt{26}] | \boxed{{(-5,\sqrt{26}]}}
1 | 45\text{ mph} | \boxed{"45\text{ mph}"}
1 | 2\sqrt{13} | \boxed{2 sqrt 13}
1 | \sqrt{109} | \boxed{sqrt 109}
1 | 8\sqrt2 | \boxed{\textbf{8\sqrt2}}
0 | \sqrt{109} | \boxed{sqrt 10}
0 | \{1, 2\} | \boxed{{1, 3}}
"""
"""Score, reference and text of more answers of the same kinds."""


def pairs(table):
    lines = [line for line in table.strip().splitlines() if not line.startswith("#")]
    return [tuple(line.split(" | ", 1)) for line in lines]


@pytest.mark.parametrize("reference, text", pairs(TEXTS))
def test_the_answer_of_a_text_is_found(pool, reference, text):
    assert pool.grade(text, reference).score == 1


@pytest.mark.parametrize("reference, text", pairs(NOT_TEXTS))
def test_what_is_not_the_answer_of_a_text_earns_nothing(pool, reference, text):
    assert pool.grade(text, reference).score == 0


def test_an_answer_between_tags_may_have_lines_of_its_own(pool):
    assert pool.grade("<answer>\n7\n</answer>\nI checked 12 cases", "7").score == 1
    assert pool.grade("", "True").score == 0


@pytest.mark.parametrize("reference, answer", pairs(EQUAL))
def test_other_spellings_of_an_answer_are_right(pool, reference, answer):
    grade = pool.grade(f"so it is \\boxed{{{answer}}}.", reference)
    assert grade.verdict == "right", grade


@pytest.mark.parametrize("reference, answer", pairs(UNEQUAL))
def test_answers_that_only_look_alike_are_wrong(pool, reference, answer):
    grade = pool.grade(f"so it is \\boxed{{{answer}}}.", reference)
    assert grade.verdict == "wrong", grade


@pytest.mark.parametrize(
    "reference, answer",
    [("\frac{1}{2}", "\\frac{1}{2}"), ("2\text{ cm}", "2\\text{ cm}"), ("\beta+1", "\\beta+1")],
)
def test_commands_that_json_read_as_control_characters_are_restored(pool, reference, answer):
    assert pool.grade(f"so it is \\boxed{{{answer}}}.", reference).score == 1


@pytest.mark.parametrize(
    "score, reference, text", [line.split(" | ", 2) for line in NEIGHBOURS.strip().splitlines()]
)
def test_neighbours_are_graded_alike(pool, score, reference, text):
    assert pool.grade(text, reference).score == float(score)


UNITS = {name: first for name, (first, _) in units._entries().items()}
WRITTEN = ("5 %s", "5\\text{ %s}", "5\\,\\mathrm{%s}", "5~\\text{%s}", "x = 5\\text{ %s}")


def same(reference, answer):
    found = extract(f"so it is \\boxed{{{answer}}}", reference)
    return found is not None and quick(reference, found)


@pytest.mark.parametrize("form", WRITTEN)
def test_every_unit_is_read_by_its_names_and_may_be_left_out(form):
    for name, first in UNITS.items():
        reference = f"5\\text{{ {first.rstrip('*')}}}"
        for prefix in ("", "k", "M", "m") if first == f"{name}*" else ("",):
            answer = form % (prefix + name)
            assert same(reference, answer) is not bool(prefix), (reference, answer)
            assert same("5", answer) is True, answer
            assert same("6", answer) is False, answer


def test_units_of_another_size_or_kind_differ():
    known = {symbol: units.read(symbol) for symbol in (name.rstrip("*") for name in UNITS.values())}
    alike = {"C", "F", "°C", "°F", "degree"}
    for one, other in itertools.permutations(known, 2):
        if known[one][1:] != known[other][1:] and not {one, other} & alike:
            assert same(f"5\\text{{ {one}}}", f"5\\text{{ {other}}}") is False, (one, other)


@pytest.mark.parametrize(
    "unit",
    ["m/s", "km/h", "m/s^2", "N m", "kg m/s", "J/(kg K)", "mol/L", "W/m^2", "V/m", "kg/m^3",
     "g/mol", "Pa s", "m^3/s", "ft/s"],
)  # fmt: skip
def test_products_and_quotients_of_units_are_read_in_every_spelling(unit):
    signs = {"·": " ", "*": " ", "\\cdot ": " ", "-": " ", " / ": "/"}
    for answer in [unit, *(unit.replace(there, sign) for sign, there in signs.items())]:
        assert same(f"5\\text{{ {unit}}}", f"5 {answer}") is True, answer
        assert same("5", f"5\\ {answer}") is True, answer
        assert same(f"5\\text{{ {unit}}}", f"6 {answer}") is False, answer
        assert same("5\\text{ lx}", f"5 {answer}") is False, answer
