"""Toolbox of an agent, and its calls in an episode.

The calls of one answer run side by side. Whatever a tool does, a call is answered: with a text, or
with one line that begins with ``error: ``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, NamedTuple, cast

from marft_jax.errors import BadInput, described, one_line, place
from marft_jax.formats import foreign
from marft_jax.plugins import extras_of, load_extra, load_function, text_of
from marft_jax.tools.calculator import calculator
from marft_jax.tools.calls import with_ids
from marft_jax.tools.forms import Message, ToolCall
from marft_jax.tools.tool import (
    Call,
    Options,
    Source,
    Tool,
    ToolError,
    function_source,
    parse_options,
)
from marft_jax.types import AnsweredCall

LOGGER = logging.getLogger("marft_jax")

Entry = str | Mapping[str, Any]
"""Entry of ``tools`` in a team file: a name, or one name with its options."""

_MOST = 16  # calls of one answer


class Toolbox(NamedTuple):
    """Tools that an agent may call, by their sources."""

    sources: tuple[Source, ...] = ()

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(tool for source in self.sources for tool in source.tools)

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools as chat templates show them."""
        return [tool.definition for tool in self.tools]

    def find(self, name: str) -> tuple[Source, Tool]:
        """Finds a tool and its source.

        Raises:
            ToolError: there is no such tool.
        """
        known = {tool.name: (source, tool) for source in self.sources for tool in source.tools}
        if name not in known:
            raise ToolError(f"expected one of the tools {', '.join(known)}, got {name!r:.60}")
        return known[name]

    def cost(self, name: str) -> float:
        """Returns the cost of a call; of an unknown tool the lowest cost of these tools."""
        costs = {tool.name: tool.options.cost for tool in self.tools}
        return costs.get(name, min(costs.values(), default=0.0))


def check_entry(entry: Any) -> Entry:
    """Checks the form of an entry; raises ``ValueError``."""
    match entry:
        case str():
            return entry
        case dict() if len(entry) == 1:
            [(name, options)] = entry.items()
            if isinstance(name, str) and isinstance(options, dict | None):
                return entry
    raise ValueError("a name, or a name with its options, such as {calculator: {cost: 0.01}}")


def name_of(entry: Entry) -> str:
    """Returns the name in an entry."""
    return entry if isinstance(entry, str) else next(iter(entry))


def load_toolboxes(agents: Mapping[str, Sequence[Entry]], where: str) -> tuple[Toolbox, ...]:
    """Makes the toolbox of each agent. Agents with equal entries share their source.

    Args:
        agents: the entries of each agent, by its name.
        where: where they stand, for messages.

    Raises:
        BadInput: a tool is unknown or cannot be opened, an option does not fit, or two tools of an
            agent have the same name.
    """
    sources, boxes = dict[str, Source](), list[Toolbox]()
    for agent, entries in agents.items():
        at = f"{where}: {agent}: tools"
        for entry in entries:
            sources[repr(entry)] = sources.get(repr(entry)) or _load(entry, at)
        box = Toolbox(tuple(sources[repr(entry)] for entry in entries))
        names = [tool.name for tool in box.tools]
        if len(set(names)) < len(names):
            raise BadInput(f"{at}: expected tools of distinct names, got {', '.join(names)}")
        boxes.append(box)
    return tuple(boxes)


def _load(entry: Entry, where: str) -> Source:
    name = name_of(entry)
    options, at = {} if isinstance(entry, str) else entry[name] or {}, f"{where}: {name}"
    if name in _OF_EXTRAS:
        return load_extra(f"tool.{name}")(options, at)
    # of these names only the calculator's comes here; the others are for the message
    function = load_function(name, where, dict.fromkeys(("calculator", *_OF_EXTRAS), calculator))
    return function_source(function, parse_options(Options, options, at), at)


_OF_EXTRAS = extras_of("tool")


class EpisodeTools:
    """Tools of one episode; a source is opened when the episode first calls it.

    Args:
        threads: where calls run.
    """

    def __init__(self, threads: Executor) -> None:
        self._threads, self._lock, self._stack = threads, threading.Lock(), contextlib.ExitStack()
        self._open: dict[int, Call] = {}
        self._missed: dict[int, list[ToolCall]] = {}

    def answer(self, box: Toolbox, calls: Sequence[ToolCall]) -> tuple[AnsweredCall, ...]:
        """Answers the calls of a turn. Calls of a source that keeps state run in their order."""
        last = dict[int, Future[_End]]()
        started = [self._start(box, call, last) for call in calls[:_MOST]]
        why = f"error: expected at most {_MOST} calls in one answer"
        refused = [AnsweredCall(*c, why, "wrong", cost=box.cost(c.name)) for c in calls[_MOST:]]
        return (*[settle() for settle in started], *refused)

    def repeat(self, box: Toolbox, answered: Sequence[AnsweredCall]) -> None:
        """Notes recorded calls of a turn. A source that keeps state is given them before the next
        call, so that its state is as it was; their new answers are not used."""
        for call in answered:
            with contextlib.suppress(ToolError):
                source, _ = box.find(call.name)
                if source.keeps_state:
                    self._missed.setdefault(id(source), []).append(ToolCall(*call[:2]))

    def close(self) -> None:
        """Closes what the episode has opened."""
        with self._lock:
            self._stack.close()

    def _start(
        self, box: Toolbox, call: ToolCall, last: dict[int, Future[_End]]
    ) -> Callable[[], AnsweredCall]:
        """Starts a call; returns what waits for its answer.

        Args:
            last: the last call of each source in this answer.
        """
        try:
            source, tool = box.find(call.name)
        except ToolError as error:
            wrong = AnsweredCall(*call, f"error: {error}", "wrong", cost=box.cost(call.name))
            return lambda: wrong
        run, key = self._opened(source), id(source)
        calls = [*self._missed.pop(key, ()), call]
        before = last.get(key) if source.keeps_state else None
        last[key] = end = self._threads.submit(_run, run, calls, tool.options, before)
        started, limit = time.monotonic(), tool.options.seconds * len(calls)

        def settle() -> AnsweredCall:
            since = started if before is None else time.monotonic()
            try:
                outcome = end.result(max(0.0, since + limit - time.monotonic()))
            except TimeoutError:
                outcome = f"error: no answer after {limit:g} s", "failed", limit
            return AnsweredCall(*call, *outcome, tool.options.cost)

        return settle

    def _opened(self, source: Source) -> Call:
        with self._lock:
            if id(source) not in self._open:
                self._open[id(source)] = self._stack.enter_context(source.open())
            return self._open[id(source)]


_End = tuple[str, str, float]
"""Answer of a call, its verdict, and its seconds."""


def _run(
    run: Call, calls: Sequence[ToolCall], options: Options, before: Future[_End] | None
) -> _End:
    """Makes the calls in turn, and returns the end of the last one."""
    if before is not None:
        wait([before], options.seconds)
    end: _End = "", "", 0.0
    for name, arguments in calls:
        started = time.monotonic()
        try:
            answer, verdict = _text(run(name, _arguments(arguments)), options), "ok"
        except ToolError as error:
            answer, verdict = f"error: {one_line(str(error))}", "wrong"
        except BaseException as error:  # sys.exit too: a tool ends neither an episode nor the run
            _report(f"tool {name}: {described(error)}{place(error)}")
            answer, verdict = f"error: {described(error)}", "failed"
        end = answer, verdict, time.monotonic() - started
    return end


def _arguments(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(arguments := foreign.loads(text), dict):
            return cast(dict[str, Any], arguments)
    raise ToolError(f"expected a JSON object, got {text!r:.60}")


def _text(answer: Any, options: Options) -> str:
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    if len(text) > options.characters:
        text = f"{text[: options.characters]} ... (cut off at {options.characters} characters)"
    return text_of("answer", text)


@functools.lru_cache(maxsize=256)
def _report(line: str) -> None:
    """Logs a line once."""
    LOGGER.warning("%s (reported once)", line)


def messages_of(answered: Sequence[AnsweredCall]) -> list[Message]:
    """Writes the answers of a turn's calls as messages of the role ``tool``."""
    calls = [ToolCall(call.name, call.arguments) for call in answered]
    return [
        {"role": "tool", "tool_call_id": made["id"], "name": call.name, "content": call.answer}
        for made, call in zip(with_ids(calls, "calls"), answered, strict=True)
    ]
