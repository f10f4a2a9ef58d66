"""What a child does with a generated program: run it, call it, serve its functions, or test it.

Files 0, 1 and 2 are the program's input, output and errors. File 3 is a socket for lines: to the
worker, or to a program in another worker. In the second case file 4 is the socket to the worker.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import gc
import json
import os
import random
import socket
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from . import values

_LINES, _VERDICTS = 3, 4
_EXIT = os._exit  # a program may replace the one in ``os``
_FILE = "program.py"  # in the program's working directory
_LONGEST = 8 << 20  # longest line, in characters


def call(request: dict[str, Any]) -> None:
    """Calls a function of the program, or a method of its Solution; sends the result as JSON."""
    module = _imported(request["program"])
    function, given = _function(module, request["name"]), values.load(request["arguments"])
    result = function(**given) if isinstance(given, dict) else function(*given)
    os.write(_LINES, json.dumps(result, default=values.as_json).encode() + b"\n")


def _function(module: types.ModuleType, name: str) -> Any:
    holder = getattr(module, "Solution", None)
    return getattr(holder(), name) if hasattr(holder, name) else getattr(module, name)  # type: ignore[misc]


def serve(request: dict[str, Any]) -> None:
    """Answers calls of the program's functions that arrive as lines, until the other side ends."""
    module = _imported(request["program"])
    with contextlib.suppress(OSError), _lines() as line:
        for question in line:
            line.write(json.dumps(_answer(module, question)) + "\n")
            line.flush()


def _answer(module: types.ModuleType, question: str) -> dict[str, Any]:
    """Returns the result of a call with its arguments as the call left them, or its exception."""
    try:
        name, given, named = json.loads(question)
        given, named = values.load(given), values.load(named)
        result = _function(module, name)(*given, **named)
        return {"value": values.dump([result, [*given, *named.values()]])}
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"error": kinds, "message": _message_of(error)}


def judge(request: dict[str, Any]) -> None:
    """Runs tests of a program in another worker; sends for each test why it failed, or "".

    The given names are the program's functions. Calls become lines on the socket and results are
    plain values, so comparing them runs no code of the program.
    """
    module = sys.modules["tests"] = types.ModuleType("tests")
    space, line = vars(module), _lines()
    theirs = {name: functools.partial(_ask, line, name) for name in request["names"]}
    space.update(theirs)
    exec(compile(request["prelude"], "<prelude>", "exec", dont_inherit=True), space)
    space.update(theirs)  # a prelude may define the same names
    for number, code in enumerate(request["tests"]):
        random.seed(0)
        try:
            exec(compile(code, f"<test {number}>", "exec", dont_inherit=True), space)
            error = ""
        except BaseException as failure:
            error = _message_of(failure) or type(failure).__name__
            error = error if isinstance(failure, AssertionError) else f"error: {error}"
        os.write(_VERDICTS, json.dumps({"error": error}).encode() + b"\n")


def _ask(line: Any, name: str, /, *given: Any, **named: Any) -> Any:
    """Calls a function of the program; does not trust the reply."""
    request = json.dumps([name, values.dump(list(given)), values.dump(named)])
    reply = ""
    with contextlib.suppress(OSError):
        line.write(request + "\n")
        line.flush()
        reply = line.readline(_LONGEST)
    if not reply.endswith("\n"):
        _EXIT(1)  # a test must not pass because its program has ended
    answer = json.loads(reply)
    if "error" in answer:
        raise _exception(answer["error"])(str(answer["message"]))
    result, after = values.load(answer["value"])
    for argument, new in zip([*given, *named.values()], after, strict=True):
        values.replace(argument, new)
    return result


def _exception(kinds: Any) -> type[Exception]:
    """Finds the first of these built-in exceptions that takes a message alone."""
    for kind in kinds:
        error = getattr(builtins, str(kind), None)
        if isinstance(error, type) and issubclass(error, Exception):
            with contextlib.suppress(TypeError):  # such as UnicodeDecodeError
                error("")
                # StopIteration would end a loop of the test early
                return RuntimeError if issubclass(error, StopIteration) else error
    return RuntimeError


def _message_of(error: BaseException) -> str:
    """Returns the message of an exception; "" if ``str`` fails."""
    try:
        return str(error)[:300]
    except Exception:
        return ""


def _lines() -> Any:
    return socket.socket(fileno=os.dup(_LINES)).makefile("rw", encoding="utf-8")


def run(request: dict[str, Any]) -> None:
    """Runs the program as a script."""
    _execute(request["program"], types.ModuleType("__main__"))


_MODES = {"run": run, "call": call, "serve": serve, "judge": judge}


def play(request: dict[str, Any]) -> NoReturn:
    """Handles a request, then ends this process as an interpreter ends after its script."""
    status = 1
    try:
        try:
            _MODES[request["mode"]](request)
            status = 0
        except BaseException as error:
            _flush(strict=False)
            status = _status_of(error)
        _flush(strict=False)
        _finish()
    except BaseException as error:
        status = status or 120  # the interpreter's status where output cannot be written
        _status_of(error)
    finally:
        _EXIT(status & 255)


def _finish() -> None:
    """Waits for threads, runs exit functions, deletes the program's objects, flushes output.

    This is what an interpreter does at exit, without clearing the standard library's modules, which
    takes longer than most programs.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush(strict=True)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    for name in ("__main__", "program"):
        sys.modules.pop(name, None)
    gc.collect()
    _flush(strict=False)


def _flush(strict: bool) -> None:
    for file in (sys.stdout, sys.stderr):
        with contextlib.nullcontext() if strict else contextlib.suppress(Exception):
            if file is not None and not getattr(file, "closed", False):
                file.flush()


def _status_of(error: BaseException) -> int:
    """Returns the exit status for an uncaught exception, and prints the exception."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
            return code if abs(code) < 1 << 63 else -1
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__spec__") is not None:
        trace = trace.tb_next  # frames of this package
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 1


def _imported(sources: Sequence[str]) -> types.ModuleType:
    """Runs a program as an import does: behind ``if __name__ == "__main__"`` nothing runs.

    A program that ends early, because it reads its input or exits, keeps what it has defined.
    """
    module = types.ModuleType("program")
    try:
        _execute(sources, module)
    except BaseException:
        if not any(getattr(item, "__module__", "") == "program" for item in vars(module).values()):
            raise
    return module


def _execute(sources: Sequence[str], module: types.ModuleType) -> None:
    """Runs the first source that compiles, as an interpreter runs its script."""
    path = os.path.abspath(_FILE)
    source, code = _compiled(sources, path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(file, source.encode("utf-8", "surrogatepass"))
    os.close(file)
    sys.argv, sys.path[0] = [_FILE], os.getcwd()
    vars(module).update(__file__=path, __builtins__=builtins, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    exec(code, vars(module))


def _compiled(sources: Sequence[str], path: str) -> tuple[str, types.CodeType]:
    for source in sources[:-1]:
        with contextlib.suppress(SyntaxError, ValueError):
            return source, compile(source, path, "exec", dont_inherit=True)
    return sources[-1], compile(sources[-1], path, "exec", dont_inherit=True)
