"""Two interpreters that use each other's objects: questions and answers as lines of JSON.

One asks, the other answers, and may itself ask before it does (a function that was given to it).
What does not travel as a copy stays at home; the other side holds a ``Remote`` that stands for it.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import operator
import os
import socket
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from .values import Heap, first_items

_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv",
           "floordiv", "mod", "pow", "and", "or", "xor")  # fmt: skip
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "len": len, "iter": iter, "next": next, "str": str, "repr": repr, "bool": bool,
    "isinstance": isinstance, "getitem": operator.getitem, "setitem": operator.setitem,
    "delitem": operator.delitem, "neg": operator.neg, "abs": abs,
    "enter": lambda it: it.__enter__(), "exit": lambda it, *how: it.__exit__(*how),
    "get": getattr, "set": setattr, "call": lambda it, given, named: it(*given, **named),
    **{name: getattr(operator, f"__{name}__") for name in _BINARY},
}  # fmt: skip
_OF_TESTS = ("get", "set", "len", "iter", "next", "str", "repr", "getitem", "setitem", "delitem",
             "enter", "exit")  # fmt: skip
_LONGEST = 8 << 20  # characters of a line
_PLACE = "(peer, number)"  # a name that no program spells


class Peer:
    """An end of a line between two interpreters.

    Args:
        line: number of a socket that carries lines.
        careful: the other side is not trusted: it may only call what it was given, go through
            iterators, and use objects whose classes are those of the module ``tests``, without
            their private attributes.
    """

    def __init__(self, line: int, careful: bool) -> None:
        self._line = socket.socket(fileno=os.dup(line))
        self._replies = self._line.makefile()
        self._careful = careful
        self._given: list[Any] = []  # our objects that the other side holds, by number
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[str, type[Exception]] = {}  # the other side's own kinds, by name

    def _send(self, **message: Any) -> None:
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._lost()

    def names(self, wanted: list[str]) -> dict[str, Any]:
        """Of these names of the other side's program those that there are; never any other."""
        found = self.ask("names", None, wanted)
        found = {name: found[name] for name in wanted if name in found}
        for name, value in found.items():
            if isinstance(value, tuple) and value[:1] == ("exception",):
                base = _exception(value[1:], {})
                found[name] = self._errors[name] = type(name, (base,), {"__module__": "tests"})
        return found

    def ask(self, what: str, number: int | None, *inputs: Any) -> Any:
        """Asks for something to be done with an object of the other side."""
        heap = Heap(self._name, self._resolve)
        self._send(ask=what, of=number, **heap.dump(inputs))
        while "ask" in (reply := self._next()):
            self._answer(reply)
        if "error" in reply:
            kind = _exception(reply["error"], self._errors)
            if issubclass(kind, StopIteration) and what != "next":
                kind = RuntimeError  # it would end a loop of the test before its time
            raise kind(str(reply["message"]))
        return heap.load(reply)

    def serve(self, module: types.ModuleType) -> None:
        """Answers questions until nobody asks any more."""
        self._module = module
        with contextlib.suppress(EOFError):
            while True:
                self._answer(self._next())

    def _next(self) -> dict[str, Any]:
        line = ""
        with contextlib.suppress(OSError):
            line = self._replies.readline(_LONGEST)
        if not line.endswith("\n"):
            self._lost()
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"expected an object, got {type(message).__name__}")
        return message

    def _lost(self) -> NoReturn:
        if self._careful:
            os._exit(1)  # no test may pass because its program has ended
        raise EOFError("nobody is there")

    def _answer(self, question: Mapping[str, Any]) -> None:
        heap = Heap(self._name, self._resolve)
        try:
            inputs = heap.load(question)
            what = question["ask"]
            if what == "names" and not self._careful:
                result: Any = self._named(inputs[0])
            else:
                target = self._given[question["of"]]
                self._allow(what, target, inputs)
                result = _OPERATIONS[what](target, *inputs)
            answer = heap.dump(result)
        except BaseException as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            answer = {"error": kinds, "message": message_of(error)}
        self._send(**answer)

    def _named(self, names: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in names:
            value = getattr(self._module, name, None)
            if isinstance(value, type) and issubclass(value, Exception):
                value = ("exception", *(kind.__name__ for kind in value.__mro__[1:]))
            if hasattr(self._module, name) and not isinstance(value, types.ModuleType):
                found[name] = value
        return found

    def _allow(self, what: str, target: Any, inputs: tuple[Any, ...]) -> None:
        if not self._careful or what in ("call", "bool"):
            return
        own = type(target).__module__ == "tests" and what in _OF_TESTS
        hidden = what in ("get", "set") and str(inputs[0]).startswith("_")
        lazy = isinstance(target, Iterator) and what in ("iter", "next")
        if hidden or not (own or lazy):
            raise PermissionError(f"{what} of what belongs to the tests")

    def _name(self, value: Any) -> dict[str, Any]:
        """Names one of our objects, or one of theirs back to them."""
        if isinstance(value, Remote):
            return {"own": object.__getattribute__(value, _PLACE)[1]}
        if self._careful:
            kind = type(value)
            if kind is types.BuiltinFunctionType and value.__module__ == "builtins":
                return {"builtin": value.__name__}
            shared = callable(value) or isinstance(value, Iterator) or kind.__module__ == "tests"
            if not shared:
                raise TypeError(f"a test cannot give a {kind.__name__} to a program")
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._given)
            self._given.append(value)
        return {"ref": number}

    def _resolve(self, tag: Mapping[str, Any]) -> Any:
        if "own" in tag and isinstance(tag["own"], int) and tag["own"] >= 0:
            return self._given[tag["own"]]
        if "builtin" in tag and not self._careful:
            return getattr(builtins, tag["builtin"])
        number = tag["ref"]
        if not isinstance(number, int):
            raise TypeError(f"expected a number, got {number!r}")
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number)
        return self._remotes[number]


class Remote:
    """An object of the other side. Nothing here but it and its like is compared by its own rules.

    With a value of this side it is never equal, and shares no operators: what a test expects does
    not reach the program, and the program does not decide whether it is met.
    """

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, _PLACE, (peer, number))

    def __call__(self, *positional: Any, **named: Any) -> Any:
        given = [_given(value) for value in positional]
        return _ask(self, "call", given, {name: _given(value) for name, value in named.items()})

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, _PLACE)[1])

    def __iter__(self) -> Any:
        return _ask(self, "iter")

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _ask(value, "isinstance", self) is True

    def __reduce_ex__(self, version: Any) -> Any:
        raise TypeError("an object of the program cannot be copied")


def _ask(remote: Remote, what: str, *inputs: Any) -> Any:
    peer, number = object.__getattribute__(remote, _PLACE)
    return peer.ask(what, number, *inputs)


def _given(value: Any) -> Any:
    """An argument as it travels: of an iterator its first items."""
    if isinstance(value, Remote) or not isinstance(value, Iterator):
        return value
    return first_items(value)


def _between(name: str) -> Callable[[Remote, Any], Any]:
    def method(self: Remote, other: Any) -> Any:
        return _ask(self, name, other) if isinstance(other, Remote) else NotImplemented

    return method


for _operation in ("len", "next", "str", "repr", "bool", "getitem", "setitem", "delitem", "neg",
                   "abs", "enter", "exit"):  # fmt: skip
    _ask_for = functools.partialmethod(
        lambda self, name, *more: _ask(self, name, *more), _operation
    )
    setattr(Remote, f"__{_operation}__", _ask_for)
for _operation in _BINARY:
    setattr(Remote, f"__{_operation}__", _between(_operation))


def message_of(error: BaseException) -> str:
    """The text of an exception; empty where it cannot be had."""
    try:
        return str(error)[:300]
    except Exception:
        return ""


def _exception(kinds: Any, own: Mapping[str, type[Exception]]) -> type[Exception]:
    """The first of these kinds of exception that is known here and made of a message alone."""
    for kind in kinds:
        found = own.get(kind) or getattr(builtins, str(kind), None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                found("")
            except TypeError:  # UnicodeDecodeError and its like want more
                continue
            return found
    return RuntimeError
