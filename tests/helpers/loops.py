"""What each pass of a compiled program's loops reads, writes, copies and runs, from its text.

An instruction reads its operands from memory and writes its result to it. A fusion is one
instruction: of an operand it reads what it takes as a slice, of a result it writes what it updates
in place. Views (bitcasts, tuples) move nothing, nor does what lies in a TPU's fast memory. Of a
choice that branch counts which moves least, of a loop within all passes. A GPU's text does not say
what its second-level cache holds: with ``cache`` given, results of a pass stay in it that fill no
more than a quarter.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import hlo

_INSTRUCTION = re.compile(r" +(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([\d,]*)([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_RESULT = {"copy-start": 0, "custom-call": 0, "all-gather-start": 1, "slice-start": 1}
"""Which part of the tuple that these write is their result; others are operands or scratch."""
_FREE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "partition-id",
    "replica-id", "opt-barrier", "async-update", "custom-call-done",
}  # fmt: skip
_PARTS = {"dynamic-slice", "slice", "gather"}
_INTO = {"dynamic-update-slice": 1, "scatter": 2}
"""Of what writes a part of its first operand: the operand that is written."""
_MOVES = _FREE | _PARTS | {"copy", "transpose", "reshape", "concatenate", "pad"}


class Instruction(NamedTuple):
    """A line of a computation.

    Attributes:
        shape: as written, with layout and memory space; of a tuple, of all its parts.
        inside: what stands between the brackets.
        rest: what follows them.
    """

    name: str
    shape: str
    kind: str
    inside: str
    rest: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.inside)

    @property
    def is_free(self) -> bool:
        return self.kind in _FREE or self.kind.endswith("-done")


class Loop(NamedTuple):
    """A pass of a loop.

    Attributes:
        name: of its body.
        passes: how often it runs, if that is known.
        read, written: bytes of main memory.
        copies: what is only moved, such as ``bf16[1,8960,1536]``, and its bytes in main memory.
        kernels: how many of each kind run: kinds of instructions, and targets of library calls.
        collectives: what it exchanges.
    """

    name: str
    passes: int | None
    read: float
    written: float
    copies: Mapping[str, float]
    kernels: Mapping[str, int]
    collectives: hlo.Traffic

    @property
    def moved(self) -> float:
        """Bytes of main memory, read and written."""
        return self.read + self.written


Block = Mapping[str, Instruction]
"""The instructions of a computation by name."""


class Program:
    """The computations of a compiled program (``compiled.as_text()``), and what a cache holds."""

    def __init__(self, text: str, cache: float = 0):
        self.lines, self.entry = hlo.blocks(text)
        self.held = cache / 4
        self._blocks: dict[str, Block] = {}

    def block(self, name: str) -> Block:
        if name not in self._blocks:
            found = [one for line in self.lines[name] if (one := _parse(line))]
            self._blocks[name] = {one.name: one for one in found}
        return self._blocks[name]

    def called(self, one: Instruction) -> list[str]:
        """The computations that an instruction runs."""
        return [name for name in hlo.calls(one.rest) if name in self.lines]

    def passes(self, one: Instruction) -> int | None:
        return hlo.passes(f" {one.kind}({one.inside}){one.rest}", self.lines)

    def run(self, name: str, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """What runs, and how often: fusions are one, what they call is not listed."""
        for one in self.block(name).values():
            yield one, times
            if one.kind in ("while", "conditional", "call", "async-start"):
                for callee in self.called(one):
                    yield from self.run(callee, times * (self.passes(one) or 1))


def loops(text: str, hosts: Sequence[int], cache: float = 0) -> list[Loop]:
    """The loops of a program; one within another follows it.

    Args:
        text: of the compiled program.
        hosts: the host of each device, in the order of the program's devices.
        cache: bytes of a GPU's second-level cache.
    """
    program = Program(text, cache)
    whiles = [one for one, _ in program.run(program.entry) if one.kind == "while"]
    return [_loop(program, one, hosts) for one in whiles]


def arrays(text: str) -> set[str]:
    """Arrays that the instructions of a program write, such as ``bf16[4,16,128]``."""
    program = Program(text)
    shapes = (one.shape for one, _ in program.run(program.entry))
    return {f"{kind}[{dims}]" for shape in shapes for kind, dims, *_ in _ARRAY.findall(shape)}


def _parse(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    shape, after = _until_balanced(line[head.end() :], " ")
    kind, _, after = after.partition("(")
    inside, rest = _until_balanced(after, ")")
    return Instruction(head[2], shape, kind.strip(), inside, rest, bool(head[1]))


def _until_balanced(text: str, end: str) -> tuple[str, str]:
    """The text up to the first ``end`` outside of brackets, and what follows it."""
    depth = 0
    for i, letter in enumerate(text):
        if letter == end and depth == 0:
            return text[:i], text[i + 1 :]
        depth += (letter in "({") - (letter in ")}")
    return text, ""


def _loop(program: Program, one: Instruction, hosts: Sequence[int]) -> Loop:
    [body] = re.findall(r"body=%?([\w.\-]+)", one.rest)
    kernels, copies = Counter[str](), dict[str, float]()
    for each, times in program.run(body):
        if each.is_free or each.kind in ("while", "conditional", "call"):
            continue
        target = _TARGET.search(each.rest)
        kernels[target[1] if target else each.kind] += times
        if _only_moves(program, each):
            copies |= {f"{kind}[{dims}]": n for kind, dims, n in _sizes(each.shape) if n}
    exchanged = hlo.traffic_of(program.lines, body, hosts)
    return Loop(body, program.passes(one), *_moved(program, body), copies, kernels, exchanged)


def _moved(program: Program, name: str) -> tuple[float, float]:
    """Bytes (read, written) in a run of a computation."""
    block, read, written = program.block(name), 0.0, 0.0
    for one in block.values():
        if one.kind in ("while", "conditional", "call", "async-start"):
            called = [_moved(program, callee) for callee in program.called(one)]
            called = called[-1:] if one.kind == "while" else called  # the condition comes first
            some, times = min(called, key=sum, default=(0.0, 0.0)), program.passes(one) or 1
        else:
            some, times = (_read(program, block, one), _written(program, block, one)), 1
        read, written = read + times * some[0], written + times * some[1]
    return read, written


def _read(program: Program, block: Block, one: Instruction) -> float:
    if one.is_free:
        return 0.0
    read = 0.0
    for i, name in enumerate(one.operands):
        whole = _size(block[name].shape)
        if whole and not (whole <= program.held and _is_result(block, name)):
            read += min(whole, _read_of(program, one, i, whole))
    return read


def _is_result(block: Block, name: str) -> bool:
    """True for what an instruction of the computation has computed."""
    one = block[name]
    while one.kind in ("bitcast", "get-tuple-element"):
        one = block[one.operands[0]]
    return not one.is_free


def _read_of(program: Program, one: Instruction, operand: int, whole: float) -> float:
    """Bytes that an instruction reads of an operand that has ``whole``."""
    if operand == 0 and one.kind in _PARTS:
        return _size(one.shape, anywhere=True)
    if one.kind == "slice-start":
        return _sizes(one.shape, anywhere=True)[1][2]
    if operand == 0 and one.kind in _INTO:
        return 0.0
    if one.kind != "fusion":
        return whole
    inner = program.block(program.called(one)[0])
    [name] = [x.name for x in inner.values() if x.kind == "parameter" and x.inside == str(operand)]
    return _read_within(program, inner, name, whole)


def _read_within(program: Program, inner: Block, name: str, whole: float) -> float:
    """Bytes that a fusion's instructions read of a value of theirs."""
    read = 0.0
    for user in inner.values():
        for i in [i for i, operand in enumerate(user.operands) if operand == name]:
            if _is_view(program, user):
                read += _read_within(program, inner, user.name, whole)
            else:
                read += _read_of(program, user, i, whole)
    return read


def _is_view(program: Program, one: Instruction) -> bool:
    if one.kind != "fusion":
        return one.kind == "bitcast"
    return all(x.is_free for x in program.block(program.called(one)[0]).values())


def _written(program: Program, block: Block, one: Instruction) -> float:
    if one.is_free:
        return 0.0
    sizes = [n if n > program.held else 0.0 for _, _, n in _sizes(one.shape)]
    if one.kind in _RESULT:
        return sizes[_RESULT[one.kind]]
    if one.kind != "fusion":
        return _into(block, one, sum(sizes))
    inner = program.block(program.called(one)[0])
    [root] = [x for x in inner.values() if x.is_root]
    if root.kind != "tuple":
        return _into(inner, root, sum(sizes))
    parts = zip(root.operands, sizes, strict=True)
    return sum(_into(inner, inner[name], n) for name, n in parts)


def _into(inner: Block, one: Instruction, whole: float) -> float:
    """Bytes that an instruction writes of a result that has ``whole``: less if it is in place."""
    while one.kind == "bitcast" and one.operands[0] in inner:
        one = inner[one.operands[0]]
    if one.kind not in _INTO:
        return whole
    update = inner.get(one.operands[_INTO[one.kind]])
    return min(whole, _size(update.shape, anywhere=True)) if update else whole


def _only_moves(program: Program, one: Instruction) -> bool:
    """True for copies, and for fusions of which all that is large is moved only."""
    if one.kind != "fusion":
        return one.kind in _MOVES - _FREE
    inner, large = program.block(program.called(one)[0]).values(), _size(one.shape, True) / 4
    work = [x for x in inner if not x.is_free and _size(x.shape, True) >= large]
    return bool(work) and all(x.kind in _MOVES for x in work)


def _size(shape: str, anywhere: bool = False) -> float:
    return sum(n for _, _, n in _sizes(shape, anywhere))


def _sizes(shape: str, anywhere: bool = False) -> list[tuple[str, str, float]]:
    """(type, dimensions, bytes in main memory) of each array of a shape, padded to its tiles."""
    found = []
    for kind, dims, order, layout in _ARRAY.findall(shape):
        size = list(map(int, filter(None, dims.split(","))))
        tile = _TILE.search(layout)
        minor = list(map(int, filter(None, order.split(","))))
        for axis, n in zip(minor, reversed(tile[1].split(",") if tile else []), strict=False):
            size[axis] = -(-size[axis] // int(n)) * int(n)
        held = anywhere or "S(" not in layout
        found.append((kind, dims, held * math.prod(size) * hlo.bits(kind) / 8))
    return found
