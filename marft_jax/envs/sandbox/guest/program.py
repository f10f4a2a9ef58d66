"""The work of a child with a generated program: run it, call it, serve calls, or judge another one.

File 0 is the program's input, 1 its output, 2 its errors; 3 is a socket that carries lines, to a
program in another room where there is one; then the socket to our own is 4.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import gc
import importlib
import json
import os
import random
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from .peer import Peer, message_of
from .values import as_json

_LINES, _VERDICTS = 3, 4
_EXIT = os._exit  # whatever a program makes of the one in ``os``
_FILE = "program.py"  # in the folder where the program begins
_ALIASES = {"np": "numpy", "pd": "pandas", "sp": "scipy", "plt": "matplotlib.pyplot"}
_USUAL = ("math", "collections", "itertools", "functools", "heapq", "bisect", "operator", "string",
          "typing", "re", "random", "copy", "decimal", "fractions", "datetime")  # fmt: skip


def call(request: dict[str, Any]) -> None:
    """Calls one function of it, or a method of its class Solution; sends the result as JSON."""
    module = _execute(request["program"])
    holder = getattr(module, "Solution", None)
    name = request["name"]
    function = getattr(holder(), name) if hasattr(holder, name) else getattr(module, name)  # type: ignore[misc]
    result = json.dumps(function(*request["arguments"]), default=as_json)
    os.write(_LINES, result.encode() + b"\n")


def serve(request: dict[str, Any]) -> None:
    """Answers lines that ask for its names, call them, and look at what they gave."""
    module = _execute(request["program"])
    Peer(_LINES, careful=False).serve(module)


def judge(request: dict[str, Any]) -> None:
    """Runs tests of a program that lives elsewhere; sends for each why it failed, if it did.

    Only the names that are asked of the program are its own; the language's and those of modules
    are the judge's. Calls become lines on the socket, and results are plain values, so comparing
    them runs none of the program's code.
    """
    prelude, tests = request["prelude"], request["tests"]
    trees = [_parsed(code) for code in (prelude, *tests)]
    wanted, modules = _names(trees, request["names"])
    sys.modules["tests"] = types.ModuleType("tests")
    space = vars(sys.modules["tests"])
    theirs = Peer(_LINES, careful=True).names(wanted)
    space.update(_own(modules) | theirs)
    exec(compile(prelude, "<prelude>", "exec", dont_inherit=True), space)
    stubs = set(request["names"] or ()) & set(theirs)  # a prelude may begin what is asked for
    space.update({name: theirs[name] for name in stubs})
    for number, code in enumerate(tests):
        random.seed(0)
        try:
            exec(compile(code, f"<test {number}>", "exec", dont_inherit=True), space)
            error = ""
        except BaseException as failure:
            error = message_of(failure) or type(failure).__name__
            error = error if isinstance(failure, AssertionError) else f"error: {error}"
        os.write(_VERDICTS, json.dumps({"error": error}).encode() + b"\n")


_MODES = {"run": lambda request: _execute(request["program"]), "call": call, "serve": serve,
          "judge": judge}  # fmt: skip


def play(request: dict[str, Any]) -> NoReturn:
    """Does what is asked, and ends this process as an interpreter ends after its script."""
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
        status = status or 120  # the interpreter's own word for output that cannot be written
        _status_of(error)
    finally:
        _EXIT(status & 255)


def _finish() -> None:
    """Waits for threads, runs exit functions, drops what the program made, writes what is left.

    All that an interpreter does at its end, but for clearing the modules of the language, which
    takes longer than most programs.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush(strict=True)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush(strict=False)


def _flush(strict: bool) -> None:
    for file in (sys.stdout, sys.stderr):
        with contextlib.nullcontext() if strict else contextlib.suppress(Exception):
            if file is not None and not getattr(file, "closed", False):
                file.flush()


def _status_of(error: BaseException) -> int:
    """The exit status that an uncaught exception means; prints what went wrong."""
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


def _execute(sources: Sequence[str]) -> types.ModuleType:
    """Runs the first of the sources that compiles, as an interpreter runs its script."""
    path = os.path.abspath(_FILE)
    source, code = _compiled(sources, path)
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(file, source.encode("utf-8", "surrogatepass"))
    os.close(file)
    sys.argv, sys.path[0] = [_FILE], os.getcwd()
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins, __annotations__={}, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, vars(module))
    return module


def _compiled(sources: Sequence[str], path: str) -> tuple[str, types.CodeType]:
    for source in sources[:-1]:
        with contextlib.suppress(SyntaxError, ValueError):
            return source, compile(source, path, "exec", dont_inherit=True)
    return sources[-1], compile(sources[-1], path, "exec", dont_inherit=True)


def _parsed(code: str) -> ast.Module:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError):
        return ast.Module([], [])  # running it shows what is wrong


def _names(trees: Sequence[ast.Module], given: Sequence[str] | None) -> tuple[list[str], set[str]]:
    """Names that are asked of the program, and others that the tests use and do not define.

    Without given names those of the program are the undefined ones that a test calls or passes on,
    less those that the usual modules define (unless the test has no other). A name in lower case of
    which only attributes are used is a module.
    """
    defined = {name for tree in trees for name in _defined(tree)} | set(dir(builtins))
    used: set[str] = set()
    asked: set[str] = set(given or ())
    for tree in trees:
        nodes = list(ast.walk(tree))
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        names = [n for n in nodes if isinstance(n, ast.Name) and n.id not in defined]
        used |= {node.id for node in names}
        free = {n.id for n in names if id(n) not in inner or n.id != n.id.lower()}
        if given is None:
            asked |= {name for name in free if not _usual(name)} or free
    return sorted(asked), used - asked


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names of the functions, classes, parameters and imports of some code."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


def _own(names: set[str]) -> dict[str, Any]:
    """The judge's own modules of these names, and what the usual modules call so."""
    found = {name: _usual(name) for name in names if _usual(name)}
    for name in names:
        if name in {*sys.stdlib_module_names, *_ALIASES, *_ALIASES.values()}:
            with contextlib.suppress(ImportError):
                found[name] = importlib.import_module(_ALIASES.get(name, name))
    return found


def _usual(name: str) -> Any:
    modules = (importlib.import_module(module) for module in _USUAL)
    public = (getattr(m, name, None) for m in modules if name in getattr(m, "__all__", dir(m)))
    return next((value for value in public if value is not None), None)
