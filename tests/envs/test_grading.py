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
from pathlib import Path

import pytest

from marft_jax.envs.base import Grade
from marft_jax.envs.grading import GradingPool, extract
from marft_jax.envs.grading.compare import quick
from marft_jax.envs.grading.normalize import split

TABLE = Path(__file__).with_name("graded_answers.txt")


@pytest.fixture(scope="module")
def pool():
    pool = GradingPool(2, 20)
    yield pool
    pool.close()


@pytest.mark.parametrize("text, reference, answer", [
    ("so \\boxed{1} and then \\boxed{\\frac{1}{2}}.", "1", "\\frac{1}{2}"),
    ("\\boxed{7} but later I counted 8 9", "7", "7"),
    ("cut off \\boxed{12} and \\boxed{13", "12", "12"),
    ("$\\boxed{2} \\quad \\text{and} \\quad \\boxed{6}$", "2,6", "2, 6"),
    ("\\boxed{2}, then\nagain \\boxed{2}, \\boxed{2}.", "2", "2"),
    ("work 3\n#### 18\nignored 4", "18", "18"),
    ("that is 3 \\pi", "3", "3 \\pi"),
    ("that is \\sqrt 3", "3", "\\sqrt 3"),
    ("no digits", "3", None),
    ("", "3", None),
    ("A man walks", "x+1", "A man walks"),
    ("so we get\n\\[x+2\\]", "x+2", "x+2"),
])  # fmt: skip
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


@pytest.mark.parametrize("reference, answer, equal", [
    ("1080", "1,08", False),
    ("1000.99", "1000,99", True),
    ("28", "28%", True),
    ("5", "5 pi", None),
    ("3s^2", "3s^3", None),
    ("E", "D", False),
    ("\\text{even}", "Even", True),
    ("2 3", "23", None),
])  # fmt: skip
def test_plain_answers_are_compared_without_algebra(reference, answer, equal):
    assert quick(reference, answer) is equal


def test_units_are_recognised_with_their_power():
    for answer in ("45\\text{ square inches}", "45 in^2", "45 sq. in."):
        assert split(answer) == ("45", "in^2")
    assert (split("45"), split("45 apples")) == (("45", ""), ("45", "apple"))
    assert split("45abc") == ("45abc", ""), "a product"


KINDS = "equal", "unequal", "right", "wrong"  # the first two stand in a box


@pytest.mark.parametrize(
    "kind", ["right", "wrong", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS[:2])]
)
@pytest.mark.slow
def test_answers_are_graded_as_the_table_says(pool, kind):
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ", 2) for line in lines if line and not line.startswith("#")]
    form = "so it is \\boxed{%s}." if kind in KINDS[:2] else "%s"
    texts = [(form % text, reference) for name, reference, text in rows if name == kind]
    with ThreadPoolExecutor(4) as threads:
        grades = list(threads.map(lambda text: pool.grade(*text), texts))
    verdicts = {"unequal": ["wrong"], "wrong": ["wrong", "no answer"]}.get(kind, ["right"])
    graded = zip(texts, grades, strict=True)
    mistakes = [(*text, grade) for text, grade in graded if grade.verdict not in verdicts]
    assert mistakes == [] and len(texts) > 50


@pytest.mark.parametrize(
    "reference, text",
    [
        ("\frac{1}{2}", "\\boxed{\\frac{1}{2}}"),  # as JSON reads a single backslash
        ("2\text{ cm}", "\\boxed{2\\text{ cm}}"),
        ("\beta+1", "\\boxed{\\beta+1}"),
        ("7", "<answer>\n7\n</answer>\nI checked 12 cases"),
    ],
)
def test_answers_of_several_lines_and_with_control_characters_are_right(pool, reference, text):
    assert pool.grade(text, reference).score == 1


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
        "fine(x)": "right", "other(x)": "wrong", "hang(x)": "timeout", "crash(x)": "crashed",
    }  # fmt: skip
    with ThreadPoolExecutor(8) as threads:
        grades = list(threads.map(lambda answer: fake.grade(f"\\boxed{{{answer}}}", "y"), answers))
    assert [grade.verdict for grade in grades] == [expected[answer] for answer in answers]


@pytest.mark.slow
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


@pytest.mark.slow
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
    "Thus we get $\\boxed{%s}$.", "We compute it from 12 and 7. The answer is $%s$.",
    "12 and 7\n#### %s", "Final Answer: The final answer is $%s$. I hope it is correct.",
)  # fmt: skip


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


MONEY = ("so she has \\boxed{\\$%s}", "so she has %s dollars.", "so she has $%s.", "It is %s.")
GSM8K = "gsm8k/test.jsonl", "answer", FORMS + MONEY
MATH = "math/test.jsonl", "final_answer", FORMS


@pytest.mark.parametrize("file, field, forms, count", [
    (*GSM8K, 60),
    (*MATH, 120),
    pytest.param(*GSM8K, None, marks=pytest.mark.release),
    pytest.param(*MATH, None, marks=pytest.mark.release),
])  # fmt: skip
def test_reference_answers_equal_themselves_and_no_other(
    pool, shared_data, file, field, forms, count
):
    """Of MATH those that are no whole numbers."""
    answers = sorted(set(references(shared_data, file, field)))
    answers = [answer for answer in answers if field == "answer" or not answer.isdigit()]
    answers = random.Random(0).sample(answers, count or len(answers))
    texts = [(form % answer, answer, 1.0) for answer in answers for form in forms]
    texts += [(forms[0] % wrong(answer), answer, 0.0) for answer in answers]
    with ThreadPoolExecutor(4) as threads:
        grades = list(threads.map(lambda item: pool.grade(item[0], item[1]), texts))
    mistakes = [(text, answer, grade) for (text, answer, score), grade
                in zip(texts, grades, strict=True) if grade.score != score]  # fmt: skip
    assert mistakes == []
