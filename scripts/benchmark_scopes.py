"""Where the time of a work goes: seconds of each named scope of its programs, from a profile."""

from __future__ import annotations

import collections
import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import jax
from jax.extend.backend import get_backend
from jax.profiler import ProfileData

PASSES = "forward", "again", "backward"
Times = dict[str, dict[str, float]]
"""Seconds of all threads or streams, by scope and pass. ``again``: what the backward pass computes
a second time."""

_OPERATION = re.compile(r"^ *(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$", re.M)
_PATH, _OPERAND = re.compile(r'op_name="([^"]*)"'), re.compile(r"[(] ?%([\w.\-]+)")


@contextlib.contextmanager
def known() -> Iterator[set[str]]:
    """Collects the names of the scopes of all that is traced meanwhile."""
    names, enter = set[str](), jax.named_scope

    def named(name: str) -> contextlib.AbstractContextManager[None]:
        names.add(name)
        return enter(name)

    with mock.patch.object(jax, "named_scope", named):
        yield names


def times(run: Callable[[], object], names: set[str]) -> Times:
    """Profiles a run whose programs are compiled already.

    Args:
        names: of scopes, see ``known``.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        [file] = Path(folder).rglob("*.xplane.pb")
        operations = list(_operations(ProfileData.from_file(str(file))))
    paths = _paths({program for program, _, _ in operations})
    found = collections.defaultdict[str, dict[str, float]](dict)
    for program, operation, seconds in operations:
        path = paths.get((program, operation), "")
        scope, which = _scope(program, path, names), _pass(path)
        found[scope][which] = found[scope].get(which, 0) + seconds
    return dict(found)


def _scope(program: str, path: str, names: set[str]) -> str:
    """The scopes of a path as ``jit(f)/transpose(jvp(policy))/layer_3/mlp/dot_general``; layers
    together."""
    own = [name.rstrip("_0123456789") for name in re.split(r"[/()]", path) if name in names]
    return "/".join([program.removeprefix("jit_"), *dict.fromkeys(own)])


def _pass(path: str) -> str:
    if "rematted_computation" in path:
        return "again"
    return "backward" if "transpose(jvp" in path else "forward"


def _paths(programs: set[str]) -> dict[tuple[str, str], str]:
    """The scopes of each operation of these programs. An operation that the compiler made has
    those of its first operand."""
    found: dict[tuple[str, str], str] = {}
    for executable in get_backend().live_executables():
        for module in (x for x in executable.hlo_modules() if x.name in programs):
            for operation in _OPERATION.finditer(module.to_string()):
                name, rest = operation["name"], operation["rest"]
                path, operand = _PATH.search(rest), _OPERAND.search(rest)
                of_operand = found.get((module.name, operand[1]), "") if operand else ""
                found[module.name, name] = path[1] if path else of_operand
    return found


def _operations(profile: ProfileData) -> Iterator[tuple[str, str, float]]:
    """(program, operation, seconds without those of operations within it)."""
    for line in (line for plane in profile.planes for line in plane.lines):
        about = [(event, dict(event.stats)) for event in line.events]
        events = [(event, own) for event, own in about if "hlo_op" in own]
        events.sort(key=lambda both: (both[0].start_ns, -both[0].duration_ns))
        alone, around = [event.duration_ns for event, _ in events], list[int]()
        for i, (event, _) in enumerate(events):
            while around and events[around[-1]][0].end_ns <= event.start_ns:
                around.pop()
            if around:
                alone[around[-1]] -= event.duration_ns
            around.append(i)
        for (_, own), ns in zip(events, alone, strict=True):
            yield str(own["hlo_module"]), str(own["hlo_op"]), ns / 1e9
