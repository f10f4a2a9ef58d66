"""Counts the collectives of a compiled program, from its text.

A collective in a loop counts once per pass, if the compiler or the loop's condition tells the
number of passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128, "token": 0}
_KINDS = (
    "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    "|collective-broadcast"
)
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"= (.*?) ({_KINDS})(-start)?\(")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? ?\{([^}]*)\}")

Blocks = Mapping[str, Sequence[str]]
"""Lines of each computation."""
Kind = tuple[str, bool]
"""Name such as ``all-reduce``, and whether it involves chips of several hosts."""


class Moved(NamedTuple):
    """Collectives of one kind in one call of a program.

    Attributes:
        payload: bytes per chip of the arrays that are reduced, gathered or sent.
        sent: bytes that a chip sends, with a ring algorithm.
        runs: number of collectives.
    """

    payload: float = 0
    sent: float = 0
    runs: float = 0

    def plus(self, other: Moved, times: int = 1) -> Moved:
        return Moved(*(a + times * b for a, b in zip(self, other, strict=True)))


class Traffic(NamedTuple):
    """Collectives of a program.

    Attributes:
        kinds: totals by kind.
        endless: loops whose number of passes is unknown; their contents count once.
    """

    kinds: Mapping[Kind, Moved] = MappingProxyType({})
    endless: int = 0

    def moved(self, across: bool) -> Moved:
        """Sums up the collectives across hosts, or those inside hosts."""
        total = Moved()
        for (_, far), moved in self.kinds.items():
            total = total.plus(moved, times=far == across)
        return total


def traffic(text: str, hosts: Sequence[int]) -> Traffic:
    """Sums up the collectives of a program.

    Args:
        text: text of the compiled program (``compiled.as_text()``).
        hosts: host of each device, in the order of the program's devices.

    Raises:
        ValueError: a group of devices has an unknown form.
    """
    return traffic_of(*blocks(text), hosts)


def traffic_of(lines: Blocks, entry: str, hosts: Sequence[int]) -> Traffic:
    """Sums up the collectives of one computation, with those that it calls."""
    kinds: dict[Kind, Moved] = {}
    endless = 0
    for line, times in _executed(lines, entry, 1):
        if found := _collective(line, hosts):
            kind, moved = found
            kinds[kind] = kinds.get(kind, Moved()).plus(moved, times)
        endless += passes(line, lines) is None
    return Traffic(kinds, endless)


def blocks(text: str) -> tuple[Blocks, str]:
    """Splits a program into computations; returns their lines and the name of the entry."""
    blocks: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if line.startswith(" "):
            lines.append(line)
        elif head := _HEAD.match(line):
            lines = blocks[head[2]] = []
            entry = head[2] if head[1] else entry
    return blocks, entry


def _executed(blocks: Blocks, name: str, times: int) -> Iterator[tuple[str, int]]:
    """Yields each line that runs and how often, following calls."""
    for line in blocks[name]:
        yield line, times
        for callee in calls(line):
            yield from _executed(blocks, callee, times * (passes(line, blocks) or 1))


def calls(line: str) -> list[str]:
    """Lists the computations that a line calls."""
    if "-done(" in line or "async-update(" in line:  # counted where they start
        return []
    branches = [name.strip(" %") for all in _BRANCHES.findall(line) for name in all.split(",")]
    return _CALLED.findall(line) + branches


def passes(line: str, blocks: Blocks) -> int | None:
    """Returns how often a line runs what it calls; None for a loop of unknown length."""
    loop = _WHILE.search(line)
    if not loop:
        return 1
    known = _TRIPS.search(line)
    return int(known[1]) if known else _bound(blocks[loop[1]], blocks)


def _bound(condition: Sequence[str], blocks: Blocks) -> int | None:
    """Returns the smallest n of conditions ``i < n``; i counts from 0, as in JAX's loops."""
    lines = [*condition, *(line for c in condition for name in calls(c) for line in blocks[name])]
    compared = [line for line in lines if "direction=LT" in line]
    constants = [(c[1], int(c[2])) for line in lines if (c := _CONSTANT.search(line))]
    named = [n for name, n in constants if any(f"%{name})" in line for line in compared)]
    return min(named or [n for _, n in constants], default=None) if compared else None


def _collective(line: str, hosts: Sequence[int]) -> tuple[Kind, Moved] | None:
    found = _COLLECTIVE.search(line)
    if not found:
        return None
    shape, kind, started = found.groups()
    groups = _groups(line, len(hosts))
    chips, sizes = len(groups[0]), [_bytes(*array) for array in _ARRAY.findall(shape)]
    payload = sum(sizes)
    if started and kind in ("all-gather", "collective-permute", "reduce-scatter"):
        payload = max(sizes)  # of (operand, result, ...)
    elif kind == "reduce-scatter":
        payload *= chips
    share = {"all-reduce": 2 * (chips - 1) / chips, "collective-permute": 1}
    across = any(len({hosts[device] for device in group}) > 1 for group in groups)
    return (kind, across), Moved(payload, payload * share.get(kind, (chips - 1) / chips), 1)


def bits(kind: str) -> int:
    """Returns the bits of a number of that type."""
    return _BITS.get(kind) or int((re.findall(r"\d+", kind) or [0])[0])


def _bytes(kind: str, shape: str) -> int:
    return math.ceil(math.prod(_numbers(shape)) * bits(kind) / 8)


def _groups(line: str, devices: int) -> list[list[int]]:
    """Reads the groups of devices that exchange data."""
    if found := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})?\}", line):
        listed = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1] or "")]
        return listed or [list(range(devices))]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\S*\d[\])])", line):
        return _ordered(iota[2]).reshape(_numbers(iota[1])).tolist()
    if axes := _AXES.search(line):
        return _along(*axes.groups(""))
    raise ValueError(f"a group of devices that cannot be read: {line.strip()[:400]}")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _ordered(text: str) -> np.ndarray:
    """Reads an order such as ``[4,2]T(1,0)``: devices numbered by row, then transposed."""
    shape, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups("")  # pyright: ignore
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _along(mesh: str, devices: str, axes: str) -> list[list[int]]:
    """Lists groups along axes of a named mesh: ``'a'=2,'b'=4`` and ``'b'``, or ``'b':(1)2``."""
    parts = {
        name: (int(before or 1), int(size or 0))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    }
    if len(parts) < axes.count("'") // 2:
        raise ValueError(f"a group of devices that cannot be read: mesh[{mesh}] {axes}")
    shape, moved = [], []
    for axis, length in re.findall(r"'([^']+)'=(\d+)", mesh):
        before, size = parts.get(axis, (int(length), 1))
        size = size or int(length)
        moved += [len(shape) + 1] * (axis in parts)
        shape += [before, size, int(length) // (before * size)]
    ids = _ordered(devices) if devices else np.arange(math.prod(shape))
    ids = np.moveaxis(ids.reshape(shape), moved, range(-len(moved), 0))
    return ids.reshape(-1, math.prod(shape[i] for i in moved)).tolist()
