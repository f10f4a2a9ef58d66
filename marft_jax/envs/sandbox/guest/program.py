"""What a child does with a generated program: run it, call it, serve calls, or judge another one.

File 0 is the program's input, 1 its output, 2 its errors; 3 is a socket that carries lines.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import json
import os
import random
import sys
import threading
import traceback
import types
from typing import Any

from . import values

_LINES = 3  # the socket


def run(request: dict[str, Any]) -> None:
    """Runs it as a script; what it printed is the result."""
    _execute(request["program"])


def call(request: dict[str, Any]) -> None:
    """Calls one function of it, or a method of its class Solution; says the result as JSON."""
    module = _execute(request["program"])
    holder = getattr(module, "Solution", None)
    name = request["name"]
    function = getattr(holder(), name) if hasattr(holder, name) else getattr(module, name)  # type: ignore[misc]
    _say(json.dumps(function(*request["arguments"])))


def serve(request: dict[str, Any]) -> None:
    """Answers lines that ask for its names, call them, and look at what they gave."""
    module = _execute(request["program"])
    objects: list[Any] = [module]

    def name(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    _say(json.dumps({"ready": True}))
    for line in os.fdopen(os.dup(_LINES)):
        question = json.loads(line)
        try:
            target = objects[question["of"]]
            if question["ask"] == "names":
                found = {n: getattr(target, n) for n in question["names"] if hasattr(target, n)}
                kinds = [[n, isinstance(v, types.ModuleType)] for n, v in found.items()]
                answer = {"names": kinds}
            else:
                get = lambda number: objects[number]  # noqa: E731
                inputs = values.loads(json.dumps(question["inputs"]), get)
                answer = {"value": json.loads(values.dumps(_do(target, question, inputs), name))}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": _message(error)}
        _say(json.dumps(answer))


def judge(request: dict[str, Any]) -> None:
    """Runs tests of a program that lives elsewhere; says for each whether it passed, and why not.

    Every name that a test uses and does not define stands for the program's; calls of it become
    lines on the socket. The results are plain values, so comparing them runs none of the program's
    code.
    """
    replies = os.fdopen(os.dup(_LINES))

    def ask(**question: Any) -> Any:
        _say(json.dumps({"of": 0, **question}))
        reply = json.loads(replies.readline())
        if "error" in reply:
            raise _error(reply["error"], str(reply["message"]))
        return reply

    def resolve(number: int) -> Any:
        return Remote(number, ask, resolve)

    prelude, tests, entry = request["prelude"], request["tests"], request["entry"]
    used = {
        node.id
        for code in (prelude, *tests)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Name)
    }
    names = sorted(({entry} if entry else used) - set(dir(builtins)))
    space: dict[str, Any] = {"__name__": "tests"}
    program = Remote(0, ask, resolve)
    for name, is_module in ask(ask="names", names=names)["names"]:
        space[name] = __import__(name) if is_module else getattr(program, name)
    theirs = space.get(entry)
    exec(compile(prelude, "<prelude>", "exec"), space)
    if entry and theirs is not None:
        space[entry] = theirs
    for number, code in enumerate(tests):
        random.seed(0)
        try:
            exec(compile(code, f"<test {number}>", "exec"), space)
            error = ""
        except BaseException as failure:
            error = _message(failure) or type(failure).__name__
            error = error if isinstance(failure, AssertionError) else f"error: {error}"
        _say(json.dumps({"test": number, "error": error}))


class Remote:
    """An object that lives with the program: it can be called and its attributes read and set."""

    def __init__(self, number: int, ask: Any, resolve: Any) -> None:
        self.__dict__.update(_number=number, _ask=ask, _resolve=resolve)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._does("call", [list(positional), named])

    def __getattr__(self, name: str) -> Any:
        return self._does("get", [name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._does("set", [name, value])

    def __bool__(self) -> bool:
        raise TypeError("the program gave an object, not a plain value")

    def _does(self, what: str, inputs: list[Any]) -> Any:
        sent = json.loads(values.dumps(inputs, lambda value: value.__dict__["_number"]))
        reply = self._ask(ask=what, of=self._number, inputs=sent)
        return values.loads(json.dumps(reply["value"]), self._resolve)


MODES = {"run": run, "call": call, "serve": serve, "judge": judge}


def finish() -> None:
    """What the interpreter does at its end: threads, exit functions, unwritten output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()


def status_of(error: BaseException) -> int:
    """The exit status that an uncaught exception means; prints what went wrong."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    traceback.print_exception(error, limit=-3)
    return 1


def _execute(sources: list[str]) -> types.ModuleType:
    """Runs the first of the sources that compiles, as the main module."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(_compiled(sources), module.__dict__)
    return module


def _compiled(sources: list[str]) -> types.CodeType:
    for source in sources[:-1]:
        try:
            return compile(source, "<program>", "exec")
        except (SyntaxError, ValueError):
            pass
    return compile(sources[-1], "<program>", "exec")


def _do(target: Any, question: dict[str, Any], inputs: list[Any]) -> Any:
    if question["ask"] == "call":
        return target(*inputs[0], **inputs[1])
    if question["ask"] == "set":
        return setattr(target, *inputs)
    return getattr(target, *inputs)


def _say(line: str) -> None:
    rest = memoryview(line.encode() + b"\n")
    while rest:
        rest = rest[os.write(_LINES, rest) :]


def _message(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except Exception:
        return ""


def _error(kind: str, message: str) -> Exception:
    """The exception of that name where the language has it; its message is all it can say."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            return known(message)
        except TypeError:
            pass
    return RuntimeError(f"{kind}: {message}")
