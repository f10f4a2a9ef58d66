"""Grading: what is read from a text, what counts as equal, and workers that hang or die."""

import json
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from marft_jax.envs.base import Grade
from marft_jax.envs.grading import GradingPool, extract
from marft_jax.envs.grading.compare import quick
from marft_jax.envs.grading.normalize import split
from marft_jax.envs.maths import Settings


@pytest.fixture(scope="module")
def pool():
    pool = GradingPool(2, 20)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "text, reference, answer",
    [
        ("so \\boxed{1} and then \\boxed{\\frac{1}{2}}.", "1", "\\frac{1}{2}"),
        ("\\boxed{7} but later I counted 8 9", "7", "7"),
        ("cut off \\boxed{12} and \\boxed{13", "12", "12"),
        ("\\boxed 5.", "5", "5"),
        ("\\boxed{\\boxed{5}}", "5", "5"),
        ("$\\boxed{2} \\quad \\text{and} \\quad \\boxed{6}$", "2,6", "2, 6"),
        ("\\boxed{2}, then\nagain \\boxed{2}, \\boxed{2}.", "2", "2"),
        ("work 3\n#### 18\nignored 4", "18", "18"),
        ("16 - 3 - 4 = 9 eggs, so $18 a day.", "18", "$18"),
        ("She makes 9 * 2 = 18.", "18", "18"),
        ("it costs $5 and the other $6 more", "6", "$6"),
        ("The total is **1,080** dollars.", "1080", "1,080"),
        ("that is 3/4.", "3/4", "3/4"),
        ("that is 12 3/5 of it", "63/5", "12 3/5"),
        ("thus 28% of them", "28", "28%"),
        ("thus 28 percent of them", "28", "28 percent"),
        ("The answer is $\\frac{1}{2}$.", "2", "\\frac{1}{2}"),
        ("that is 3 \\pi", "3", "3 \\pi"),
        ("that is \\sqrt 3", "3", "\\sqrt 3"),
        ("no digits", "3", None),
        ("", "3", None),
        ("Hence (B) holds, not (C)... so the answer is B.", "B", "B"),
        ("I think it must be (C)", "C", "C"),
        ("答案是D。", "D", "D"),
        ("A man walks", "x+1", "A man walks"),
        ("The answer is Sunday.", "\\text{Sunday}", "Sunday"),
        ("Final Answer: the final answer is $x+1$. I hope it is right.", "1+x", "x+1"),
        ("so we get $x+1$ and finally $x+2$ there", "x+2", "x+2"),
        ("so we get\n\\[x+2\\]", "x+2", "x+2"),
    ],
)
def test_the_answer_is_found_in_the_text(text, reference, answer):
    assert extract(text, reference) == answer


def test_one_way_of_answering_can_be_demanded():
    text = "\\boxed{1}\n#### 2\nthe answer is 3 (D)"
    found = [extract(text, "9", how) for how in ("boxed", "hashes", "number", "letter")]
    assert found == ["1", "2", "3", "D"]
    assert extract("just 7", "7", "boxed") is None


@pytest.mark.slow
def test_reading_hostile_texts_takes_no_time():
    """It happens in the trainer's own process, where nothing could stop it."""
    pieces = ["\\boxed{", "$", "1 ", "(", "9", "1 + ", "\\text{", "1,", "a", "answer is ", "a."]
    pieces += ["\\frac{", "\\frac1", "{{", "}", "\\(", "\\[", "A ", "#### ", "3 km/", "- ", "= "]
    pieces += ["answer to ", "lly ", "((a)", "3 and ", "⅔", "²", "\\dots ", "1:", "√", "{1"]
    pieces += ["\\sqrt", "%", "\\boxed{1}", "\\boxed{1},", "5 a", "$$ ", "\\{"]
    hostile = [piece * (30_000 // len(piece)) for piece in pieces]
    hostile += [f"answer: 3 {text}" for text in hostile]
    hostile += [f"\\boxed{{{piece * (990 // len(piece))}}}" for piece in pieces]
    hostile += [f"\\boxed{{5 {piece * (900 // len(piece))}!}}" for piece in pieces]
    for text in hostile:
        for reference in ("7", "B", "x+1", "5\\text{ cm}", "\\text{a, b}"):
            start = time.thread_time()
            answer = extract(text, reference)
            if answer is not None:
                quick(reference, answer)
                quick(answer, reference)
            assert time.thread_time() - start < 1, (text[:20], text[-20:], reference)


@pytest.mark.parametrize(
    "reference, answer, equal",
    [
        ("18", "18.00", True),
        ("18", "$18", True),
        ("18", "18 dollars", True),
        ("1,080", "1080", True),
        ("1080", "1,08", False),
        ("1000.99", "1000,99", True),
        ("0.5", "\\frac12", True),
        ("\\frac{1}{3}", "0.333333", True),
        ("\\frac{1}{3}", "0.333", False),
        ("1000000", "1000001", False),
        ("0.0000001", "0", False),
        ("28\\%", "28", True),
        ("28\\%", "0.28", True),
        ("28", "28%", True),
        ("28", "0.28", False),
        ("0.5", "0.5\\%", False),
        ("5", "5 pi", None),
        ("3s^2", "3s^3", None),
        ("45\\text{ cm}^2", "45 square centimeters", True),
        ("45\\text{ cm}^2", "45 cm^3", False),
        ("10\\text{ cm}", "10\\text{ m}", False),
        ("10\\text{ cm}", "10", True),
        ("1011_2", "1011", True),
        ("1011_2", "1011_{2}", True),
        ("1011_2", "1011_3", False),
        ("\\text{(E)}", "E", True),
        ("E", "(E) 42", True),
        ("E", "D", False),
        ("\\text{even}", "Even", True),
        ("\\text{even}", "odd", False),
        ("\\text{B, E, G}", "B,G,E", True),
        ("\\text{4:30 p.m.}", "4:30 PM", True),
        ("\\text{4:30 p.m.}", "4:30 a.m.", False),
        ("2 3", "23", None),
        ("3 million", "3,000,000", True),
    ],
)
def test_plain_answers_are_compared_without_algebra(reference, answer, equal):
    assert quick(reference, answer) is equal


def test_units_are_recognised_with_their_power():
    for answer in ("45\\text{ square inches}", "45 in^2", "45 sq. in."):
        assert split(answer) == ("45", "in^2")
    assert (split("45"), split("45 apples")) == (("45", ""), ("45", "apple"))
    assert split("45abc") == ("45abc", ""), "a product"


@pytest.mark.parametrize(
    "reference, answer, score",
    [
        ("x+1", "1+x", 1),
        ("x+1", "x-1", 0),
        ("(1,2)", "[1,2]", 0),
        ("(1,2)", "\\{1,2\\}", 0),
        ("(1,2)", "(2,1)", 0),
        ("(1,2)", "(1, \\frac{4}{2})", 1),
        ("1,2", "2, 1", 1),
        ("1,2", "1,2,3", 0),
        ("\\frac{\\sqrt{3}}{2}", "\\sqrt{3}/2", 1),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\ 2\\end{bmatrix}", 1),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}", 0),
        ("(-\\infty, 2) \\cup (3, \\infty)", "(-\\infty,2)\\cup(3,\\infty)", 1),
        ("(-\\infty, 2) \\cup (3, \\infty)", "(-\\infty,2]\\cup(3,\\infty)", 0),
        ("\\frac{1}{2004!}", "\\frac{1}{2005!}", 0),
        ("2", "x = 2", 1),
        ("6", "6 \\text{ or } 7", 0),
    ],
)
def test_answers_that_take_algebra(pool, reference, answer, score):
    assert pool.grade(f"so \\boxed{{{answer}}}", reference).score == score


def test_grades_carry_the_verdict_and_the_answer(pool):
    assert pool.grade("it is \\boxed{x+1}", "1+x") == Grade(1.0, "right", "x+1")
    assert pool.grade("it is \\boxed{x}", "1+x") == Grade(0.0, "wrong", "x")
    assert pool.grade("", "1+x") == Grade(0.0, "no answer")


FAKE = """
import json, os, sys, time
print('{"ready": true}', flush=True)
for line in sys.stdin:
    answer = json.loads(line)["answer"]
    if answer == "hang(x)":
        time.sleep(1000)
    if answer == "crash(x)":
        os._exit(3)
    print(json.dumps({"equal": answer == "fine(x)"}), flush=True)
"""


@pytest.fixture
def fake():
    pool = GradingPool(2, 2.0, command=[sys.executable, "-c", FAKE])
    yield pool
    pool.close()


def test_a_hung_worker_is_replaced_and_its_text_scores_zero(fake):
    assert fake.grade("\\boxed{hang(x)}", "y") == Grade(0.0, "timeout", "hang(x)")
    for _ in range(4):
        assert fake.grade("\\boxed{fine(x)}", "y").verdict == "right"


def test_an_answer_whose_reading_fails_scores_zero(fake, monkeypatch):
    def fail(*_):
        raise OverflowError("too large")

    monkeypatch.setattr("marft_jax.envs.grading.pool.quick", fail)
    assert fake.grade("\\boxed{7}", "8") == Grade(0.0, "crashed", "7")
    monkeypatch.setattr("marft_jax.envs.grading.pool.extract", fail)
    assert fake.grade("\\boxed{7}", "8") == Grade(0.0, "crashed", "")


def test_a_crashed_worker_is_replaced_and_its_text_scores_zero(fake):
    for _ in range(3):
        assert fake.grade("\\boxed{crash(x)}", "y") == Grade(0.0, "crashed", "crash(x)")
        assert fake.grade("\\boxed{fine(x)}", "y").verdict == "right"


def test_many_threads_share_the_workers(fake):
    answers = ["fine(x)", "other(x)", "crash(x)", "fine(x)"] * 6 + ["hang(x)"] * 2
    expected = {
        "fine(x)": "right",
        "other(x)": "wrong",
        "hang(x)": "timeout",
        "crash(x)": "crashed",
    }
    with ThreadPoolExecutor(8) as threads:
        grades = list(threads.map(lambda answer: fake.grade(f"\\boxed{{{answer}}}", "y"), answers))
    assert [grade.verdict for grade in grades] == [expected[answer] for answer in answers]


def test_an_expression_that_never_ends_is_given_up():
    pool = GradingPool(1, 3.0)
    try:
        assert pool.grade("\\boxed{9^{9^{9^{9}}}}", "x+2").verdict == "timeout"
        assert pool.grade("\\boxed{2+x}", "x+2").verdict == "right"
    finally:
        pool.close()


def test_a_worker_that_cannot_start_says_why():
    pool = GradingPool(1, 1.0, command=[sys.executable, "-c", "import no_such_thing"])
    with pytest.raises(RuntimeError, match="no_such_thing"):
        pool.grade("\\boxed{x}", "y")
    pool.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_workers_end_with_the_pool(fake):
    pids = [worker._process.pid for worker in fake._workers._workers]
    assert all(map(alive, pids))
    fake.close()
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        fake.grade("\\boxed{x}", "y")


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads /proc")
def test_workers_end_when_their_parent_is_killed(repository):
    program = textwrap.dedent("""
        import os, sys, threading, time
        from marft_jax.envs.grading import GradingPool
        pool = GradingPool(2, 1.0)
        pool.grade("\\\\boxed{x+1}", "1+x")
        for text in ("\\\\boxed{9^{9^{9^{9}}}}",):
            threading.Thread(target=pool.grade, args=(text, "x"), daemon=True).start()
        time.sleep(0.3)
        print(*[worker._process.pid for worker in pool._workers._workers], flush=True)
        os.kill(os.getpid(), 9)
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    end = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(alive, pids))


FORMS = (
    "Thus we get $\\boxed{%s}$.",
    "We compute it from 12 and 7. The answer is $%s$.",
    "12 and 7\n#### %s",
    "Final Answer: The final answer is $%s$. I hope it is correct.",
)


def references(folder, name, field):
    with (folder / name).open(encoding="utf-8") as lines:
        answers = [json.loads(line)[field] for line in lines]
    return [answer.rpartition("####")[2].strip() for answer in answers]


def wrong(answer):
    """A wrong answer of the same kind: its last number one higher, another letter, another word."""
    numbers = list(re.finditer(r"\d+", answer))
    if numbers:
        last = numbers[-1]
        return f"{answer[: last.start()]}{int(last[0]) + 1}{answer[last.end() :]}"
    letters = re.findall(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", answer)
    if letters:
        return answer.replace(letters[-1], "A" if letters[-1] != "A" else "B")
    if re.search(r"\\(?:text|mbox)\{[^}]*\}", answer):
        return "\\text{something else}"
    return f"1+({answer})"


def check_all(pool, answers, forms, pick=0):
    """Every answer is right in every form, a wrong one in none (or in one form of many)."""
    texts = [(form % answer, answer, 1.0) for answer in answers for form in forms]
    texts += [(forms[0] % wrong(answer), answer, 0.0) for answer in answers]
    with ThreadPoolExecutor(4) as threads:
        grades = list(threads.map(lambda item: pool.grade(item[0], item[1]), texts))
    return [
        (text, answer, grade)
        for (text, answer, score), grade in zip(texts, grades, strict=True)
        if grade.score != score
    ]


MONEY = ("so she has \\boxed{\\$%s}", "so she has %s dollars.", "so she has $%s.", "It is %s.")


@pytest.mark.release
def test_every_gsm8k_answer_equals_itself_and_no_other(pool, shared_data):
    answers = references(shared_data, "gsm8k/test.jsonl", "answer")
    assert len(answers) == 1319
    assert check_all(pool, answers, FORMS + MONEY) == []


def test_a_slice_of_gsm8k_answers_equal_themselves_and_no_other(pool, shared_data):
    answers = references(shared_data, "gsm8k/test.jsonl", "answer")
    assert check_all(pool, random.Random(0).sample(answers, 60), FORMS + MONEY) == []


def test_a_slice_of_math_answers_equal_themselves_and_no_other(pool, shared_data):
    answers = references(shared_data, "math/test.jsonl", "final_answer")
    hard = [answer for answer in answers if not answer.isdigit()]
    assert check_all(pool, random.Random(0).sample(hard, 120), FORMS) == []


@pytest.mark.release
def test_every_hard_math_answer_equals_itself_and_no_other(pool, shared_data):
    """Whole numbers are tested with the answers of GSM8K."""
    answers = references(shared_data, "math/test.jsonl", "final_answer")
    assert len(answers) == 5000
    hard = {answer for answer in answers if not answer.isdigit()}
    assert check_all(pool, sorted(hard), FORMS) == []


MARKED = """
30 | The answer is 30, that is 6 more than 24.
30 | The answer is $30$, that is $6$ more than $24$.
30 | The answer is $30, that is $6 more than $24.
30 | The answer is **30**, that is 6 more than 24.
30 | **Answer:** 30 (24 plus 6)
30 | Answer: \\(30\\), since \\(24+6=30\\), not 31
30 | The answer to the question is 30, 6 more than 24.
30 | The final answer is therefore 30 apples, because 24 + 6 = 30 and 7 is odd: 7.
30 | My answer: 30. Confidence: 90%
9 | Answer: 9 (since 9 * 4 = 36).
60 | Answer: about 60 (59.7)
18 | The answer is x = 18, for y = 4.
18 | The answer is 3 × 6 = 18 (not 24).
18 | The answer is $3 \\times 6$ = $18$, not 24
8 | The answer is 6 + 2 = 8
8 | The answer is 6 + 2, which is 8
8 | The answer is 5 more than 3, which is 8.
40 | The answer is 20% of 200, which is 40.
1234 | The answer is 1,234, i.e. about 1200.
28 | The answer is 28%, i.e. 7 of 25.
3000000 | The answer is 3 million, 2 more than 1 million.
63/5 | The answer is 12 3/5, i.e. 63 of 5
-7 | The answer is −7, as 3 - 10 = -7, see line 2.
4 | The answer is 4. Check: 4 * 2 = 8
72 | 答案是 72，因为 8*9=72，不是 70。
72 | The answer is 72 — 8 times 9.
771400 | The answer is 771,\\!400, since 12 - 5 = 7.
9/7 | The answer is \\frac 97, since 12 - 5 = 7.
-3/8 | The answer is - \\dfrac 3 8, since 12 - 5 = 7.
9/20 | The answer is \\frac 9{20}, since 12 - 5 = 7.
139 | The answer is \\$ 139, since 12 - 5 = 7.
14 | The answer is the product of 2 and 7, which is 14.
4 | I thought the answer is 3. But the answer is 4.
18 | 16 - 3 - 4 = 9 eggs at $2 make $18 a day.
11/3 | She needs 3⅔ cups.
7/2 | It is 3 ½.
5/6 | the probability is ⅚.
21/4 | So he needs 5 and 1/4 cups.
7 | between 5 and 7
6 | They have 84 towels, which means there are 84/14 =6 loads of laundry
3400 | So each year the number of people added is 17 000/5 = 3 400.
3/56 | so \\[p(8) = \\frac{q(8) + 8}{8^2 - 1} = \\frac{3}{56}.\\]
-128 | Our answer is therefore $16\\cdot (-8) = -128$.
3\\pi | The answer is $3\\pi$, that is about $9.42$.
x+1 | The answer is x+1, since 3 = 2 + 1.
1, 2, \\ldots, n | The answer is 1, 2, ..., n.
B | The answer is (b).
B | Answer: b
B | So the option (b) fits, not (c)... so (b)
"""
UNMARKED = """
24 | The answer is 30, that is 6 more than 24.
36 | Answer: 9 (since 9 * 4 = 36).
24 | The answer is $30$, that is $6$ more than $24$.
8 | The answer is 4. Check: 4 * 2 = 8
6 | The answer is 6 + 2 = 8
3 | I thought the answer is 3. But the answer is 4.
3 | The answer is 3 or 4.
4 | The answer is 3 or 4.
3 | The answer is 3\\pi.
32/3 | That makes 3⅔.
3 | That makes 3⅔.
1/4 | It takes 5 and 1/4 hours
7 | it is ∛7
A | The answer is a cat.
"""


@pytest.mark.parametrize("score, table", [(1, MARKED), (0, UNMARKED)])
def test_the_marked_answer_counts_and_not_what_explains_it(pool, score, table):
    rows = [line.split(" | ") for line in table.strip().splitlines()]
    grades = [(text, pool.grade(text, reference)) for reference, text in rows]
    assert [grade for grade in grades if grade[1].score != score] == []


@pytest.mark.parametrize(
    "text, reference, score",
    [
        ("It has \\boxed{1,000.99m²}.", "1000.99", 1),
        ("1,000.99 m²", "1000.99 \\text{ m}^2", 1),
        ("\\boxed{12cm³}", "12", 1),
        ("\\boxed{12cm²}", "12\\text{ cm}^3", 0),
        ("\\boxed{3}. No: the units. Final answer is 5.", "5", 1),
        ("\\boxed{3}. No: the units. Final answer is 5.", "3", 0),
        ("\\boxed{3}. Final answer: $\\frac12$.", "0.5", 1),
        ("Final answer: \\boxed{3}. I checked it 5 times.", "3", 1),
        ("\\boxed{A}. No. Final answer: (B).", "B", 1),
        ("\\boxed{7}. That is my final answer.", "7", 1),
        ("\\boxed{3=7}", "7", 0),
        ("\\boxed{2+5=7}", "7", 1),
        ("\\boxed{x=7}", "7", 1),
        ("\\boxed{1/3=0.333}", "0.333", 1),
    ],
)
def test_gaps_that_once_were(pool, text, reference, score):
    assert pool.grade(text, reference).score == score


@pytest.mark.parametrize("how, score", [("boxed", 0), ("number", 1), ("hashes", 0), ("auto", 1)])
def test_the_way_of_answering_is_a_setting(how, score):
    settings = Settings(extract=how, workers=1)
    pool = GradingPool(1, 5.0, settings.extract)
    try:
        assert pool.grade("so it is 7.", "7").score == score
    finally:
        pool.close()
