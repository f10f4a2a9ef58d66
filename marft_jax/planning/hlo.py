"""The collectives of a compiled program, from its text.

Every collective is counted as often as it runs: those in the body of a loop once per pass, as far
as the compiler, or the loop's condition, tells how many there are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Collective(NamedTuple):
    """One collective operation.

    Attributes:
        kind: such as ``all-reduce``.
        payload: bytes that a chip has of the array that is reduced, gathered or handed on.
        group: chips that take part together.
        across: whether any group has chips of several hosts.
        times: how often it runs in one call of the program, at most.
    """

    kind: str
    payload: int
    group: int
    across: bool
    times: int

    @property
    def sent(self) -> float:
        """Bytes that a chip sends in one run, in a ring."""
        share = (self.group - 1) / max(self.group, 1)
        if self.kind == "all-reduce":
            return 2 * share * self.payload
        return self.payload if self.kind == "collective-permute" else share * self.payload


class Moved(NamedTuple):
    """The collectives of one kind in one call of a program.

    Attributes:
        payload: bytes that a chip has of the arrays that are reduced, gathered or handed on.
        sent: bytes that it sends for them.
        runs: how many there are.
    """

    payload: float = 0
    sent: float = 0
    runs: float = 0


Kind = tuple[str, bool]
"""Such as ``all-reduce``, and whether it has chips of several hosts."""


class Traffic(NamedTuple):
    """The collectives of a program.

    Attributes:
        kinds: what each kind moves.
        endless: loops whose number of passes is not known; what is in them counts once.
    """

    kinds: Mapping[Kind, Moved] = MappingProxyType({})
    endless: int = 0

    def moved(self, across: bool) -> Moved:
        """Inside hosts, or across them."""
        chosen = [moved for (_, far), moved in self.kinds.items() if far == across]
        return Moved(*map(sum, zip(*chosen, strict=True))) if chosen else Moved()


def traffic(text: str, hosts: Sequence[int]) -> Traffic:
    """What a program's collectives move.

    Args:
        text: of the compiled program (``compiled.as_text()``).
        hosts: the host of each device, in the order of the program's devices.

    Raises:
        ValueError: a group of devices that is written in an unknown way.
    """
    blocks, entry = _blocks(text)
    times: dict[str, int] = dict.fromkeys(blocks, 0)
    times[entry], endless = 1, 0
    for name in reversed(_callees_first(blocks, entry)):
        for line in blocks[name]:
            passes = _passes(line, blocks)
            endless += passes is None
            for callee in _calls(line):
                times[callee] += times[name] * (passes or 1)
    found = (
        collective
        for name, lines in blocks.items()
        if times[name]
        for line in lines
        if (collective := _collective(line, times[name], hosts))
    )
    return _summed(found, endless)


def _summed(found: Iterable[Collective], endless: int) -> Traffic:
    kinds: dict[Kind, Moved] = {}
    for one in found:
        old = kinds.get((one.kind, one.across), Moved())
        kinds[one.kind, one.across] = Moved(
            old.payload + one.payload * one.times,
            old.sent + one.sent * one.times,
            old.runs + one.times,
        )
    return Traffic(kinds, endless)


def _blocks(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation that call another or are collectives; the entry's name."""
    blocks: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _HEAD.match(line)
            if head:
                name = head[2]
                blocks[name] = []
                entry = name if head[1] else entry
        elif name:
            blocks[name].append(line)
    return blocks, entry


def _calls(line: str) -> list[str]:
    called = _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        called += [branch.strip(" %") for branch in branches.split(",")]
    return called if "-done(" not in line and "async-update(" not in line else []


def _callees_first(blocks: Mapping[str, list[str]], entry: str) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for line in blocks[name]:
                for callee in _calls(line):
                    visit(callee)
            order.append(name)

    visit(entry)
    return order


def _passes(line: str, blocks: Mapping[str, list[str]]) -> int | None:
    """How often a line's computations run: 1 unless it is a loop, None for one without an end."""
    condition = re.search(r" while\(.*condition=%?([\w.\-]+)", line)
    if not condition:
        return 1
    told = _TRIPS.search(line)
    return int(told[1]) if told else _bound(blocks[condition[1]], blocks)


def _bound(condition: Sequence[str], blocks: Mapping[str, list[str]]) -> int | None:
    """n of a condition ``i < n``, the least of several; i counts from 0, as in JAX's loops."""
    lines = [*condition, *(line for c in condition for name in _calls(c) for line in blocks[name])]
    constants = {
        found[1]: int(found[2])
        for line in lines
        if (found := re.search(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", line))
    }
    if any("direction=LT" in line for line in lines):
        compared = [line for line in lines if "direction=LT" in line]
        named = [n for name, n in constants.items() for c in compared if f"%{name})" in c]
        bounds = named or list(constants.values())
        return min(bounds, default=None)
    return None


def _collective(line: str, times: int, hosts: Sequence[int]) -> Collective | None:
    found = _COLLECTIVE.search(line)
    if not found:
        return None
    shape, kind, started = found.groups()
    groups = _groups(line, len(hosts))
    sizes = [_bytes(*array) for array in _ARRAY.findall(shape)]
    payload = sum(sizes)
    if started and kind in ("all-gather", "collective-permute", "reduce-scatter"):
        payload = max(sizes)  # of (operand, result, ...)
    elif kind == "reduce-scatter":
        payload *= len(groups[0])
    across = any(len({hosts[device] for device in group}) > 1 for group in groups)
    return Collective(kind, payload, len(groups[0]), across, times)


def _bytes(kind: str, shape: str) -> int:
    bits = _BITS.get(kind) or (int(found[0]) if (found := re.findall(r"\d+", kind)) else 0)
    return math.ceil(math.prod(int(n) for n in shape.split(",") if n) * bits / 8)


def _groups(line: str, devices: int) -> list[list[int]]:
    """The devices that exchange data with each other."""
    if pairs := re.search(r"source_target_pairs=\{(.*?\})\}", line):
        return _listed(pairs[1])
    if listed := re.search(r"replica_groups=\{(\{.*?\})?\}", line):
        return _listed(listed[1]) if listed[1] else [list(range(devices))]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=(\S*\d[\])])", line):
        return _ordered(iota[2]).reshape(_numbers(iota[1])).tolist()
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? ?\{([^}]*)\}", line
    )
    if named:
        return _along(*named.groups(""))
    raise ValueError(f"devices of a collective that cannot be read: {line.strip()[:400]}")


def _listed(text: str) -> list[list[int]]:
    return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _ordered(text: str) -> np.ndarray:
    """Devices in the order ``[4,2]T(1,0)``: counted row by row, then read with axes exchanged."""
    shape, order = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups("")  # pyright: ignore
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order)) if order else ids


def _along(mesh: str, devices: str, axes: str) -> list[list[int]]:
    """Groups along some axes of a named mesh: ``'a'=2,'b'=4`` and ``'b'``, or ``'b':(1)2``."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    wanted = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    shape, moved = [], []
    for axis, size in sizes.items():
        parts = [(int(pre or 1), int(part or size)) for name, pre, part in wanted if name == axis]
        if len(parts) > 1:
            raise ValueError(f"devices of a collective that cannot be read: mesh[{mesh}] {axes}")
        pre, part = parts[0] if parts else (size, 1)
        shape += [pre, part, size // (pre * part)]
        moved += [len(shape) - 2] * bool(parts)
    ids = _ordered(devices) if devices else np.arange(math.prod(shape))
    ids = np.moveaxis(ids.reshape(shape), moved, range(-len(moved), 0))
    return ids.reshape(-1, math.prod(shape[i] for i in moved)).tolist()
