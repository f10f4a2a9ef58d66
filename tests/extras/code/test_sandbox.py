"""The sandbox: programs run, limits hold, nothing gets out, and no verdict can be forged."""

import collections
import contextlib
import datetime
import decimal
import fractions
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile
import ordinary
import pytest

from marft_jax.extras.code.sandbox import Limits, Sandbox, Unusable
from marft_jax.extras.code.sandbox.guest import filter, values
from marft_jax.extras.code.statements import IMPORTS, requirements

SECONDS = 0.3
DEVICES = [f"/dev/{name}" for name in ("null", "zero", "random", "urandom")]
ANSWER = "The answer is 3.14159 by decree"


@pytest.fixture(scope="module")
def sandbox():
    try:
        made = Sandbox("bubblewrap", 2, Limits(memory=256 << 20, output=1 << 20, scratch=8 << 20))
    except Unusable as reason:
        pytest.skip(f"no isolation on this machine: {reason}")
    yield made
    made.close()


def judged(sandbox, program, tests, names=None, seconds=30):
    """Outcomes of tests, with the names that they are read to want, or these."""
    wanted = requirements("", tests, names)
    return sandbox.check(program, IMPORTS, tests, wanted.names, seconds)


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
    outcome = sandbox.run("print(int(input()) * 2)", "21\n", 60)
    assert (outcome.verdict, outcome.output) == ("ok", "42\n")


def test_what_ended_a_program_is_told(sandbox):
    outcome = sandbox.run("print(1)\n1 / 0", "", 60)
    assert outcome.verdict == "error" and "ZeroDivisionError" in outcome.detail
    assert sandbox.run("import sys; sys.exit('no')", "", 60).verdict == "error"
    assert sandbox.run("import sys; sys.exit()", "", 60).verdict == "ok"
    assert sandbox.run("import os; os.abort()", "", 60).detail.endswith("signal 6 (Aborted)")
    outcome = sandbox.run("import os; os.kill(os.getpid(), 40)", "", 60)
    assert outcome.detail.startswith("ended by signal 40")
    assert sandbox.run("syntax error", "", 60).verdict == "error"


def test_a_program_sees_nothing_of_the_host(sandbox):
    os.environ["MARFT_SECRET"] = ANSWER
    program = """
    import os, sys
    print(dict(os.environ), os.listdir(), os.getuid(), os.path.exists("/proc"))
    for folder in sys.path + ["/"]:
        print(os.listdir(folder) if os.path.isdir(folder) else "")
    """
    outcome = sandbox.run(textwrap.dedent(program), "", 60)
    del os.environ["MARFT_SECRET"]
    assert outcome.verdict == "ok" and "['program.py'] 1000 False" in outcome.output
    assert ANSWER not in outcome.output and "etc" not in outcome.output
    assert "marft_jax" not in outcome.output and "'numpy'" not in outcome.output


def test_nothing_passes_from_one_program_to_the_next(sandbox):
    leave = "import builtins, json, random; json.dumps = builtins.left = 1; open('left', 'w')"
    look = "import builtins, json, os, random; print(hasattr(builtins, 'left'), json.dumps(2), "
    look += "os.listdir(), os.listdir('..'), random.random())"
    seen = {(sandbox.run(leave, "", 60).verdict, sandbox.run(look, "", 60).output)
            for _ in range(4)}  # fmt: skip
    [(verdict, output)] = seen
    assert verdict == "ok" and output.startswith("False 2 ['program.py'] ['input', 'program'] 0.8")


def test_functions_and_methods_are_called(sandbox):
    assert sandbox.call("def f(a, b): return a, [b]", "f", [1, "x"], 60).output == '[1, ["x"]]'
    method = "class Solution:\n    def f(self, a): print('noise'); return {'a': a}"
    assert sandbox.call(method, "f", [None], 60).output == '{"a": null}'
    rest = "from collections import deque\nfrom fractions import Fraction\ndef f(): "
    rest += "return deque([(1,)]), Fraction(1, 2), range(2), map(str, [3]), {'a': 1}.values()"
    assert sandbox.call(rest, "f", [], 60).output == '[[[1]], 0.5, [0, 1], ["3"], [1]]'
    assert sandbox.call("def g(): return 1", "f", [], 60).verdict == "error"
    assert sandbox.call("def f(): return object()", "f", [], 60).verdict == "error"


def test_tests_run_apart_from_the_program(sandbox):
    program = """
    import collections, math
    def f(x): return (x, {x: [1.5, None]}, {1, 2}, b"b", 10**30, 2j, float("inf"))
    def count(text): return collections.Counter(text)
    def pairs(): return zip([1], [2])
    def turn(items): items.reverse()
    def bad(): raise KeyError("k")
    def thing(): return object()
    """
    tests = [
        "assert f(3) == (3, {3: [1.5, None]}, {1, 2}, b'b', 10**30, 2j, math.inf)",
        "x = [1, [2]]\nturn(x)\nassert x == [[2], 1]",
        "assert count('aab') == {'a': 2, 'b': 1}",
        "assert list(pairs()) == [(1, 2)]",
        "try: bad()\nexcept KeyError: pass\nelse: assert False",
        "assert bad() == 1",
        "assert f(1) == 2, 'not two'",
        "assert missing(1) == 2",
        "assert thing()",
    ]
    outcomes = judged(sandbox, textwrap.dedent(program), tests)
    assert [outcome.verdict for outcome in outcomes] == ["ok"] * 5 + ["failed"] * 4
    assert outcomes[6].detail == "not two" and outcomes[5].detail.startswith("error:")
    assert outcomes[8].detail == "error: expected a plain value, got a object"


def test_the_prelude_and_the_language_win_over_the_program(sandbox):
    program = "def helper(x): return ANSWER\ndef sum(x): return 7\ndef f(x): return x"
    prelude = "def helper(x): return x + 1"
    tests = ["assert helper(f(1)) == 2 and sum([f(1), 1]) == 2"]
    assert sandbox.check(program, prelude, tests, ["f"], 60)[0].verdict == "ok"


def test_a_program_has_a_bounded_number_of_files():
    small = Sandbox("bubblewrap", 1, Limits(files=50))
    make = "for i in range({}): open(f'/tmp/{{i}}', 'w').close()\nimport time; time.sleep(0.1)"
    try:
        assert small.run(make.format(30), "", 60).verdict == "ok"
        outcome = small.run(make.format(60), "", 60)
        assert (outcome.verdict, outcome.detail) == ("output", "too many files")
        left = "import os\nos.mkdir('/tmp/x', 0o300); os.mkdir('/tmp/x/y')"  # not to be listed
        assert small.run(left, "", 60).verdict == "ok"
        assert small.run("import os; print(os.listdir())", "", 60).output == "['program.py']\n"
    finally:
        small.close()


def test_a_program_that_hangs_fails_the_rest_of_its_tests(sandbox):
    program = "def f(x):\n    while x: pass\n    return 0"
    tests = ["assert f(0) == 0", "assert f(1) == 0", "assert f(0) == 0"]
    outcomes = sandbox.check(program, "", tests, ["f"], 2)
    assert [outcome.verdict for outcome in outcomes] == ["ok", "timeout", "timeout"]


def devices():
    """All of the host's device nodes that a program could change."""
    stats = [os.stat(path) for path in DEVICES]
    return [(s.st_mode, s.st_uid, s.st_gid, s.st_mtime, s.st_nlink, s.st_rdev) for s in stats], [
        os.listxattr(path) for path in DEVICES
    ]


def kernel_memory():
    """Megabytes that no limit of a process counts: of the kernel itself, and shared."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (sizes["SUnreclaim"] + sizes["Shmem"]) / 1024


@contextlib.contextmanager
def growth():
    """A list that gets the kernel's memory while something runs, less what it was."""
    seen, over, before = [0.0], threading.Event(), kernel_memory()

    def watch():
        while not over.wait(0.05):
            seen.append(kernel_memory() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    over.set()
    thread.join()


def test_hostile_programs_end_in_time_without_a_reward_and_leave_nothing(sandbox):
    assert len(hostile.SCRIPTS) + len(hostile.JUDGED) + len(hostile.FORGED) >= 250
    for _ in range(2):  # one after the other, and each of the two now has both of its rooms
        sandbox.check("f = abs", "", ["assert f(-1) == 1"], ["f"], 5)
    before, own, nodes = set(os.listdir("/tmp")), len(descendants()), devices()
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
        after = sandbox.run("import os; print(sorted(os.listdir('/tmp')), os.listdir())", "", 30)
        return name, not passed and not judged, outcomes, after.output

    with growth() as grown, ThreadPoolExecutor(2) as threads:
        results = list(threads.map(attack, [*hostile.SCRIPTS, *hostile.JUDGED]))
    for name, unrewarded, outcomes, after in results:
        assert unrewarded, (name, outcomes)
        assert after == "['input', 'program'] ['program.py']\n", (name, after, outcomes)
    slow = {name: taken for name, taken in seconds.items() if taken > SECONDS + 60}
    assert not slow
    deadline = time.monotonic() + 60
    while len(descendants()) > own and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(descendants()) <= own
    assert not {name for name in set(os.listdir("/tmp")) - before if "left" in name}
    assert devices() == nodes
    assert max(grown) < 500, f"{max(grown):.0f} MB of the kernel's memory"


def test_no_verdict_is_forged(sandbox):
    def forged(case):
        name, names = case
        program, test = hostile.FORGED[name]
        return name, names, judged(sandbox, program, [test], names, 5)[0]

    cases = [(name, names) for name in hostile.FORGED for names in (None, ["f"])]
    with ThreadPoolExecutor(2) as threads:
        passed = [case for case in threads.map(forged, cases) if case[2].verdict == "ok"]
    assert not passed


def plain(program, text):
    """Standard output of a program under a plain interpreter, and whether it ended well."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8")
        done = subprocess.run([sys.executable, "program.py"], cwd=folder, input=text.encode(),
                              capture_output=True, env={"PYTHONUTF8": "1"}, timeout=60)  # fmt: skip
    return done.stdout.decode(), done.returncode == 0


def test_ordinary_programs_behave_as_under_plain_python(sandbox):
    assert len(ordinary.PROGRAMS) >= 100

    def both(name):
        outcome = sandbox.run(*ordinary.PROGRAMS[name], 30)
        here = (outcome.output, outcome.verdict == "ok")
        return name, here, plain(*ordinary.PROGRAMS[name]), outcome.detail

    with ThreadPoolExecutor(2) as threads:
        assert not [row for row in threads.map(both, ordinary.PROGRAMS) if row[1] != row[2]]


def test_the_judge_passes_what_passes_in_one_plain_script(sandbox):
    def failed(name):
        program, test = ordinary.JUDGED[name]
        exec(compile(f"{program}\n{test}", name, "exec"), {"__name__": "__main__"})
        return name, judged(sandbox, program, [test])[0]

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(failed, ordinary.JUDGED))
    assert not [outcome for outcome in outcomes if outcome[1].verdict != "ok"]


def test_tests_that_need_more_than_plain_values_are_found():
    tests = {name: test for name, (_, test) in (ordinary.JUDGED | ordinary.OBJECTS).items()}
    needy = {name for name, test in tests.items() if requirements("", [test]).objects}
    assert needy == set(ordinary.OBJECTS)


def test_locks_of_a_program_do_not_reach_the_host(sandbox):
    import fcntl

    with ThreadPoolExecutor(1) as threads, open("/dev/null") as null, open(os.__file__) as library:
        run = threads.submit(sandbox.run, hostile.SCRIPTS["lock the host's files"], "", 1.0)
        time.sleep(0.5)
        for file in (null, library):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
        assert run.result().verdict == "timeout"


def numbers_of(header):
    """Numbers of system calls in a C header: ``#define __NR_read 63``, ``__NR3264_lseek 62``."""
    text = header.read_text()
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text))
    again = re.findall(r"__NR_(\w+) __NR3264_(\w+)", text)
    return found | {name: found[of] for name, of in again if of in found}


@pytest.mark.parametrize(
    "column, header", [(1, "x86_64-linux-gnu/asm/unistd_64.h"), (2, "asm-generic/unistd.h")]
)
def test_the_numbers_of_system_calls_are_the_kernels(column, header):
    path = Path("/usr/include", header)
    if not path.is_file():
        pytest.skip(f"no {path}")
    known = {"fchmodat2": "452", "newfstatat": "79"} | numbers_of(path)
    tables = ",".join((filter._CALLS, filter._IGNORED, filter._DECIDED))
    rows = [row.split() for row in tables.split(",")]
    wrong = {row[0] for row in rows if row[column] != known.get(row[0], "-")}
    assert not wrong


def test_a_machine_without_a_filter_is_refused_in_a_clear_line(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(Unusable, match="no filter of system calls for riscv64"):
        Sandbox("bubblewrap", 1)


REFUSED = [
    "fork bomb", "subprocess", "own interpreter again", "multiprocessing", "network", "netlink",
    "new namespaces", "mount", "ptrace", "kill the parent", "stop the parent", "starve the parent",
    "read /proc", "read the host", "symbolic links", "shared memory",
    "memory in files without a name", "raise the limits", "become root", "attributes of a device",
    "attributes without end", "attributes by descriptor", "remove a device", "link a device",
    "control a device", "wide pipes", "full sockets", "descriptors in sockets", "a lease",
    "a lease on the host's file", "signals to the parent by a descriptor",
    "signals to all by a descriptor", "signals to a thread by a descriptor",
    "another signal by a descriptor", "asynchronous input", "asynchronous input by control",
    "an owner by control", "typing into a terminal", "news of a folder", "watches",
    "watches of all", "timers without end", "event descriptors", "semaphores", "message queues",
    "keys", "rings", "programs in the kernel", "faults of pages", "handles of files",
    "another filter", "readable again", "memory that stays", "pipes into pages", "raw network",
    "packets", "ciphers of the kernel", "pairs of another kind", "calls not made yet",
    "calls of the other table", "go first", "choose a processor", "a group of its own",
    "pipes by name",
]  # fmt: skip


def test_the_kernel_refuses_what_is_not_allowed(sandbox):
    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(lambda n: sandbox.run(hostile.SCRIPTS[n], "", 60), REFUSED))
    for name, outcome in zip(REFUSED, outcomes, strict=True):
        assert outcome.verdict == "error" and "Error" in outcome.detail, (name, outcome)


def test_rooms_end_with_the_process_that_made_them():
    code = "import sys, time\nfrom marft_jax.extras.code.sandbox import Sandbox\n"
    code += "s = Sandbox('bubblewrap', 2)\nprint('up', flush=True)\n"
    code += "s.run('while True: pass', '', 60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    if process.stdout.readline() != b"up\n":
        pytest.skip("no isolation on this machine")
    deadline = time.monotonic() + 60
    while not (below := descendants(process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{number}").exists() for number in below):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_room_that_is_killed_is_replaced(sandbox):
    for number in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    assert sandbox.run("print(1)", "", 60).verdict in ("lost", "ok")
    assert sandbox.run("print(1)", "", 60).verdict in ("lost", "ok")
    assert [sandbox.run("print(1)", "", 60).verdict for _ in range(4)] == ["ok"] * 4


def test_without_isolation_limits_still_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    plain = Sandbox("none", 1)
    try:
        assert plain.run("print(input())", "x", 60).output == "x\n"
        assert plain.run("while True: pass", "", 0.3).verdict == "timeout"
        assert plain.run("open('left', 'w')", "", 60).verdict == "ok"
        assert plain.run("import os; print(os.listdir())", "", 60).output == "['program.py']\n"
        assert plain.check("f = abs", "", ["assert f(-1) == 1"], ["f"], 5)[0].verdict == "ok"
        assert list(tmp_path.iterdir())
    finally:
        plain.close()
    assert not list(tmp_path.iterdir())


def test_isolation_that_cannot_be_had_is_an_error(monkeypatch, tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create namespace' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("marft_jax.extras.code.sandbox.jail.bubblewrap", lambda: str(broken))
    with pytest.raises(Unusable, match="No permissions"):
        Sandbox("bubblewrap", 1)


VALUES = [
    None, True, 0, -(10**40), 1.5, float("inf"), "é\ud800", [1, [2]], (1, (2,)), {1, 2}, {1: (2,)},
    frozenset({1}), b"\0", bytearray(b"x"), 2j, range(3), {(1, 2): {"int": "0x1"}}, [[]] * 2,
    collections.deque([1, [2]]), collections.Counter("aab"), fractions.Fraction(10**30, 7),
    decimal.Decimal("1.50"), datetime.date(2020, 2, 29), datetime.datetime(2020, 1, 1, 2, 3),
    datetime.timedelta(1, 2, 3), {1: 2}.keys(), {1: 2}.items(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_travel_with_their_types(value):
    back = values.load(json.loads(json.dumps(values.dump(value))))
    assert back == value and type(back) is type(value)


def test_what_is_no_plain_value_does_not_travel():
    for value in (len, object(), int, lambda: 0, [ValueError()], json):
        with pytest.raises(TypeError, match="expected a plain value, got a"):
            values.dump(value)
