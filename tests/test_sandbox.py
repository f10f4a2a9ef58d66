"""The sandbox: programs run, limits hold, nothing gets out, and no verdict can be forged."""

import collections
import contextlib
import datetime
import decimal
import fractions
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile
import pytest

from marft_jax.envs.sandbox import Limits, Sandbox, Unusable
from marft_jax.envs.sandbox.guest import values

SECONDS = 0.5
ANSWER = "The answer is 3.14159 by decree"


@pytest.fixture(scope="module")
def sandbox():
    try:
        made = Sandbox("bubblewrap", 2, Limits(memory=256 << 20, output=1 << 20, scratch=8 << 20))
    except Unusable as reason:
        pytest.skip(f"no isolation on this machine: {reason}")
    yield made
    made.close()


def descendants(root=None):
    """Process ids below this one, from /proc."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = stat.read_text().split(" (", 1)
        except (OSError, ValueError):
            continue
        children.setdefault(int(rest.rpartition(")")[2].split()[1]), []).append(int(number))
    found, todo = set(), [root or os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def test_a_program_reads_its_input_and_prints(sandbox):
    outcome = sandbox.run("print(int(input()) * 2)", "21\n", 5)
    assert (outcome.verdict, outcome.output) == ("ok", "42\n")


def test_what_ended_a_program_is_told(sandbox):
    outcome = sandbox.run("print(1)\n1 / 0", "", 5)
    assert outcome.verdict == "error" and "ZeroDivisionError" in outcome.detail
    assert sandbox.run("import sys; sys.exit('no')", "", 5).verdict == "error"
    assert sandbox.run("import sys; sys.exit()", "", 5).verdict == "ok"
    assert sandbox.run("import os; os.abort()", "", 5).detail.endswith("SIGABRT")
    assert sandbox.run("syntax error", "", 5).verdict == "error"


def test_threads_and_exit_functions_end_as_in_a_script(sandbox):
    program = """
    import atexit, sys, threading, time
    sys.setrecursionlimit(10**6)
    threading.stack_size(1 << 26)
    atexit.register(lambda: print("last"))
    def main():
        time.sleep(0.05); print(sys.stdin.read().strip())
    threading.Thread(target=main).start()
    print("first")
    """
    outcome = sandbox.run(textwrap.dedent(program), "second", 5)
    assert outcome.output.split() == ["first", "second", "last"]


def test_a_program_sees_nothing_of_the_host(sandbox):
    os.environ["MARFT_SECRET"] = ANSWER
    program = """
    import os, sys
    print(dict(os.environ), os.listdir(), os.getuid(), os.path.exists("/proc"))
    for folder in sys.path + ["/"]:
        print(os.listdir(folder) if os.path.isdir(folder) else "")
    """
    outcome = sandbox.run(textwrap.dedent(program), "", 5)
    del os.environ["MARFT_SECRET"]
    assert outcome.verdict == "ok" and "['program.py'] 1000 False" in outcome.output
    assert ANSWER not in outcome.output and "etc" not in outcome.output
    assert "marft_jax" not in outcome.output and "'numpy'" not in outcome.output


def test_nothing_passes_from_one_program_to_the_next(sandbox):
    leave = "import builtins, json, random; json.dumps = builtins.left = 1; open('left', 'w')"
    look = "import builtins, json, os, random; print(hasattr(builtins, 'left'), json.dumps(2), "
    look += "os.listdir(), os.listdir('..'), random.random())"
    seen = [(sandbox.run(leave, "", 60).verdict, sandbox.run(look, "", 5).output) for _ in range(4)]
    assert {verdict for verdict, _ in seen} == {"ok"}
    assert len({output for _, output in seen}) == 1 and seen[0][1].startswith(
        "False 2 ['program.py'] ['input', 'program'] 0.8"
    )


def test_functions_and_methods_are_called(sandbox):
    assert sandbox.call("def f(a, b): return a, [b]", "f", [1, "x"], 60).output == '[1, ["x"]]'
    method = "class Solution:\n    def f(self, a): print('noise'); return {'a': a}"
    assert sandbox.call(method, "f", [None], 60).output == '{"a": null}'
    assert sandbox.call("def g(): return 1", "f", [], 60).verdict == "error"
    assert sandbox.call("def f(): return object()", "f", [], 60).verdict == "error"


def test_tests_run_apart_from_the_program(sandbox):
    program = """
    import collections, math
    class Node:
        def __init__(self, value): self.value, self.next = value, None
    def length(node): return 1 + length(node.next) if node else 0
    def f(x): return (x, {x: [1.5, None]}, {1, 2}, b"b", 10**30, 2j, float("inf"))
    def count(text): return collections.Counter(text)
    def pairs(): return zip([1], [2])
    def bad(): raise KeyError("k")
    """
    tests = [
        "assert f(3) == (3, {3: [1.5, None]}, {1, 2}, b'b', 10**30, 2j, math.inf)",
        "root = Node(1)\nroot.next = Node(2)\nassert length(root) == 2 and root.value == 1",
        "assert count('aab') == {'a': 2, 'b': 1}",
        "assert list(pairs()) == [(1, 2)]",
        "try: bad()\nexcept KeyError: pass\nelse: assert False",
        "assert bad() == 1",
        "assert f(1) == 2, 'not two'",
        "assert missing(1) == 2",
    ]
    outcomes = sandbox.check(textwrap.dedent(program), "", tests, None, 10)
    assert [outcome.verdict for outcome in outcomes] == ["ok"] * 5 + ["failed"] * 3
    assert outcomes[6].detail == "not two" and outcomes[5].detail.startswith("error:")


def test_the_prelude_and_the_language_win_over_the_program(sandbox):
    program = "def helper(x): return ANSWER\ndef sum(x): return 7\ndef f(x): return x"
    prelude = "def helper(x): return x + 1"
    tests = ["assert helper(f(1)) == 2 and sum([f(1), 1]) == 2"]
    assert sandbox.check(program, prelude, tests, ["f"], 60)[0].verdict == "ok"


def test_a_program_that_hangs_fails_the_rest_of_its_tests(sandbox):
    program = "def f(x):\n    while x: pass\n    return 0"
    tests = ["assert f(0) == 0", "assert f(1) == 0", "assert f(0) == 0"]
    outcomes = sandbox.check(program, "", tests, ["f"], 5)
    assert [outcome.verdict for outcome in outcomes] == ["ok", "timeout", "timeout"]


def test_hostile_programs_end_in_time_without_a_reward_and_leave_nothing(sandbox):
    assert len(hostile.SCRIPTS) + len(hostile.JUDGED) >= 80
    for _ in range(2):  # one after the other, and each of the two now has both of its rooms
        sandbox.check("f = abs", "", ["assert f(-1) == 1"], ["f"], 5)
    before, own = set(os.listdir("/tmp")), len(descendants())
    seconds = {}

    def attack(name):
        start = time.monotonic()
        if name in hostile.SCRIPTS:
            outcomes = [sandbox.run(hostile.SCRIPTS[name], "", SECONDS)]
        else:
            test = f"assert f(1) == {ANSWER!r}"
            outcomes = sandbox.check(hostile.JUDGED[name], "", [test], ["f"], SECONDS)
        seconds[name] = time.monotonic() - start
        passed = [o for o in outcomes if o.verdict == "ok" and ANSWER in o.output]
        judged = name in hostile.JUDGED and any(o.verdict == "ok" for o in outcomes)
        after = sandbox.run("import os; print(os.listdir('/tmp'), os.listdir(), 6 * 7)", "", 30)
        return name, not passed and not judged, outcomes, after.output

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(attack, [*hostile.SCRIPTS, *hostile.JUDGED]))
    for name, unrewarded, outcomes, after in results:
        assert unrewarded, (name, outcomes)
        assert after == "['input', 'program'] ['program.py'] 42\n", (name, after, outcomes)
    slow = {name: taken for name, taken in seconds.items() if taken > SECONDS + 6}
    assert not slow
    deadline = time.monotonic() + 5
    while len(descendants()) > own and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(descendants()) <= own
    assert not {name for name in set(os.listdir("/tmp")) - before if "left" in name}


REFUSED = ["fork bomb", "subprocess", "own interpreter again", "multiprocessing", "network",
           "netlink", "new namespaces", "mount", "ptrace", "kill the parent", "stop the parent",
           "starve the parent", "read /proc", "read the host", "symbolic links", "shared memory",
           "memory in files without a name", "raise the limits", "become root"]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_kernel_refuses_what_is_not_allowed(sandbox, name):
    outcome = sandbox.run(hostile.SCRIPTS[name], "", 5)
    assert outcome.verdict == "error" and "Error" in outcome.detail, outcome


def test_rooms_end_with_the_process_that_made_them():
    code = "import sys, time\nfrom marft_jax.envs.sandbox import Sandbox\n"
    code += "s = Sandbox('bubblewrap', 2)\nprint('up', flush=True)\n"
    code += "s.run('while True: pass', '', 60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    if process.stdout.readline() != b"up\n":
        pytest.skip("no isolation on this machine")
    time.sleep(0.3)
    below = descendants(process.pid)
    assert below
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{number}").exists() for number in below):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_room_that_is_killed_is_replaced(sandbox):
    for number in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    assert sandbox.run("print(1)", "", 5).verdict in ("lost", "ok")
    assert sandbox.run("print(1)", "", 5).verdict in ("lost", "ok")
    assert [sandbox.run("print(1)", "", 5).verdict for _ in range(4)] == ["ok"] * 4


def test_without_isolation_limits_still_hold(tmp_path):
    plain = Sandbox("none", 1)
    try:
        assert plain.run("print(input())", "x", 5).output == "x\n"
        assert plain.run("while True: pass", "", 0.3).verdict == "timeout"
        assert plain.run("open('left', 'w')", "", 5).verdict == "ok"
        assert plain.run("import os; print(os.listdir())", "", 5).output == "['program.py']\n"
        assert plain.check("f = abs", "", ["assert f(-1) == 1"], ["f"], 5)[0].verdict == "ok"
    finally:
        plain.close()


def test_isolation_that_cannot_be_had_is_an_error(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("marft_jax.envs.sandbox.rooms.bubblewrap", lambda: str(broken))
    with pytest.raises(Unusable, match="No permissions"):
        Sandbox("bubblewrap", 1)


VALUES = [
    None, True, 0, -(10**40), 1.5, float("inf"), "é\ud800", [1, [2]], (1, (2,)), {1, 2}, {1: (2,)},
    frozenset({1}), b"\0", bytearray(b"x"), 2j, range(3), slice(1, None), {(1, 2): {"int": "0x1"}},
    collections.deque([1, [2]], 3), collections.Counter("aab"), collections.OrderedDict(a=1),
    collections.defaultdict(list, a=[1]), fractions.Fraction(10**30, 7), decimal.Decimal("1.50"),
    datetime.date(2020, 2, 29), datetime.datetime(2020, 1, 1, 2, 3), datetime.timedelta(1, 2, 3),
    int, ..., [[]] * 2,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_travel_with_their_types(value):
    def nothing(_):
        raise AssertionError

    sent = json.loads(json.dumps(values.Heap(nothing, nothing).dump(value)))
    back = values.Heap(nothing, nothing).load(sent)
    assert back == value and type(back) is type(value)
