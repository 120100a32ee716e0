"""Facts of a compiled program, read from its scheduled HLO text.

Instructions of the entry run in the order of the text. A SparseCore call is a triple start (loads
the code), update (hands over operands: here the work starts), done; some versions have no update.
What stands between start of work and done on the TensorCore is overlapped with it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torchrec_tpu.sparsecore.aot.program import ITEM_BYTES
from torchrec_tpu.sparsecore.errors import CompileError
from torchrec_tpu.sparsecore.layout import round_up

_SPARSECORE: Final = 'async_execution_thread="sparsecore"'
_EMBEDDING: Final = "OFFLOAD_EMBEDDING"
_NO_ESTIMATE: Final = 1 << 62  # some instructions carry the largest int64 instead of cycles

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLEES = re.compile(r"(?:calls|to_apply|body|condition|called_computations)=\{?%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="(\w+)"')  # the call as a whole has no such name
_RAGGED: Final = "ragged-all-to-all"
_COLLECTIVE = re.compile(
    r"^(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute)"
    r"(-start)?$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCoreCall:
    """One SparseCore program in the schedule. All stacks of a direction go into one.

    Attributes:
        name: of the instruction.
        offload: what for: "OFFLOAD_EMBEDDING", or a collective.
        sub_kernels: kind -> number, e.g. "SparseGather": one a stack and lookup.
        program_bytes: its code.
        stack_bytes: high watermark of its stack, which lies in HBM: all cores of a device.
        gather_bytes: capacity of the rows that one core reads for others.
        exchange_row_bytes: capacity of the rows that one core receives.
        exchange_id_bytes: capacity of the ids that one core receives.
        tc_cycles: estimated cycles of the TensorCore's work meanwhile.
        dots: matrix products among it.
    """

    name: str
    offload: str
    sub_kernels: Mapping[str, int]
    program_bytes: int
    stack_bytes: int
    gather_bytes: int
    exchange_row_bytes: int
    exchange_id_bytes: int
    tc_cycles: int
    dots: int

    @property
    def num_sub_kernels(self) -> int:
        """All of them."""
        return sum(self.sub_kernels.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One exchange between devices that the TensorCore takes part in.

    Attributes:
        kind: "all-reduce", ...
        num_bytes: of its result, on one device.
        num_groups: groups of devices that exchange among themselves.
        group_size: devices of one.
        is_under_sparsecore: whether SparseCore work runs meanwhile.
    """

    kind: str
    num_bytes: int
    num_groups: int
    group_size: int
    is_under_sparsecore: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """An exchange of runs of any length between all devices: of pooled tables.

    Attributes:
        dtype: of its words.
        sent_bytes: what one device has room to send.
        received_bytes: what it has room to receive.
        is_on_sparsecore: whether SparseCores run it.
    """

    dtype: str
    sent_bytes: int
    received_bytes: int
    is_on_sparsecore: bool

    @property
    def capacity_bytes(self) -> int:
        """What a device can exchange: all send or all receive no more, on average."""
        return min(self.sent_bytes, self.received_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy of one array inside HBM."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One device's program, in order.

    Attributes:
        num_replicas: devices that run it.
        num_partitions: as XLA counts; 1 in programs of one device each.
        num_instructions: of the entry.
        calls: SparseCore calls in order.
        collectives: on the TensorCore, in order; without the ragged.
        ragged: exchanges of pooled tables, on either core, in order.
        copies: of arrays, in order.
        parameter_bytes: HBM of each argument, with the padding of its layout.
        tc_cycles: estimated cycles of the TensorCore. Collectives count none.
        tc_cycles_under_sparsecore: those while embedding work runs on SparseCores.
        dots: matrix products.
        dots_under_sparsecore: those while embedding work runs on SparseCores.
    """

    num_replicas: int
    num_partitions: int
    num_instructions: int
    calls: tuple[SparseCoreCall, ...]
    collectives: tuple[Collective, ...]
    ragged: tuple[Ragged, ...]
    copies: tuple[Copy, ...]
    parameter_bytes: tuple[int, ...]
    tc_cycles: int
    tc_cycles_under_sparsecore: int
    dots: int
    dots_under_sparsecore: int

    @property
    def embedding_calls(self) -> tuple[SparseCoreCall, ...]:
        """Calls that look up or update tables, not collectives."""
        return tuple(call for call in self.calls if call.offload == _EMBEDDING)

    @property
    def num_sub_kernels(self) -> int:
        """Of the embedding calls."""
        return sum(call.num_sub_kernels for call in self.embedding_calls)

    @property
    def tc_share_under_sparsecore(self) -> float:
        """Share of the TensorCore's cycles that embedding work covers, 0..1."""
        return self.tc_cycles_under_sparsecore / self.tc_cycles if self.tc_cycles else 0.0

    def copies_of(self, arrays: Collection[tuple[str, int]]) -> tuple[Copy, ...]:
        """Copies of arrays with one of these (dtype, elements), whatever their shape is called."""
        return tuple(copy for copy in self.copies if (copy.dtype, math.prod(copy.shape)) in arrays)


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    type: str  # with layout
    opcode: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> str:
        return self.rest.split("), ", 1)[0]

    @property
    def callees(self) -> list[str]:
        names = _CALLEES.findall(self.rest)
        for branches in _BRANCHES.findall(self.rest):
            names += [name.strip().lstrip("%") for name in branches.split(",")]
        return names


class _Module:
    """Computations by name."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry: list[_Instruction] = []
        current: list[_Instruction] | None = None
        for line in text.splitlines():
            if current is not None and (match := _INSTRUCTION.match(line)):
                current.append(_split(*match.groups()))
            elif match := _HEADER.match(line):
                current = self.computations[match[2]] = []
                if match[1]:
                    self.entry = current

    def reachable(self, names: Collection[str]) -> Iterator[_Instruction]:
        """Instructions of computations and of all that they call, each once."""
        seen: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.computations:
                continue
            seen.add(name)
            for instruction in self.computations[name]:
                yield instruction
                waiting += instruction.callees

    def cycles(self, instruction: _Instruction) -> int:
        """Estimate for the TensorCore; a loop's body counts once, for trips are not known."""
        if _is_for_sparsecore(instruction):
            return 0
        if match := _CYCLES.search(instruction.rest):
            cycles = int(match[1])
            return cycles if cycles < _NO_ESTIMATE else 0
        if instruction.opcode in ("call", "while", "conditional"):
            return sum(
                self.cycles(inner)
                for name in instruction.callees
                for inner in self.computations.get(name, ())
            )
        return 0

    def dots(self, instruction: _Instruction) -> int:
        """Matrix products in an instruction of the entry; the TPU calls them convolutions."""
        if _is_for_sparsecore(instruction):
            return 0
        return (instruction.opcode in ("dot", "convolution")) + sum(
            inner.opcode in ("dot", "convolution") for inner in self.reachable(instruction.callees)
        )


def parse(text: str) -> Schedule:
    """Reads a scheduled program.

    Raises:
        CompileError: the text is no scheduled HLO module.
    """
    header = text[: text.find("\n")]
    module = _Module(text)
    entry = module.entry
    if "is_scheduled=true" not in header or not entry:
        raise CompileError(
            f"this is no scheduled HLO module; it begins with {text[:80]!r}. Parse the text of a "
            "Compiled, or XLA's dump file *.after_codegen.txt"
        )
    cycles = [module.cycles(instruction) for instruction in entry]
    dots = [module.dots(instruction) for instruction in entry]
    calls = []
    is_covered = [False] * len(entry)
    for start, instruction in enumerate(entry):
        if not (instruction.opcode.endswith("-start") and _SPARSECORE in instruction.rest):
            continue
        begin, end = _span(entry, start)
        call = _call(module, instruction, sum(cycles[begin:end]), sum(dots[begin:end]))
        calls.append(call)
        if call.offload == _EMBEDDING:
            is_covered[begin:end] = [True] * (end - begin)
    num_replicas = _number(header, r"replica_count=(\d+)", 1)
    num_partitions = _number(header, r"num_partitions=(\d+)", 1)
    return Schedule(
        num_replicas=num_replicas,
        num_partitions=num_partitions,
        num_instructions=len(entry),
        calls=tuple(calls),
        collectives=tuple(
            _collective(match[1], inner, num_replicas * num_partitions, covered)
            for instruction, covered in zip(entry, is_covered, strict=True)
            if not _is_for_sparsecore(instruction)
            for inner in (instruction, *module.reachable(instruction.callees))
            if (match := _COLLECTIVE.match(inner.opcode)) and match[1] != _RAGGED
        ),
        ragged=tuple(_ragged(module)),
        copies=tuple(
            Copy(name=instruction.name, dtype=dtype, shape=shape)
            for instruction in entry
            if instruction.opcode in ("copy", "copy-start")
            for dtype, shape, _ in _arrays(instruction.type)[:1]
        ),
        parameter_bytes=_parameter_bytes(entry),
        tc_cycles=sum(cycles),
        tc_cycles_under_sparsecore=sum(
            c for c, covered in zip(cycles, is_covered, strict=True) if covered
        ),
        dots=sum(dots),
        dots_under_sparsecore=sum(
            d for d, covered in zip(dots, is_covered, strict=True) if covered
        ),
    )


def _split(name: str, text: str) -> _Instruction:
    """'TYPE opcode(operands), attributes'; a type may hold spaces, braces and parentheses."""
    depth = 0
    for index, character in enumerate(text):
        if character in "({":
            depth += 1
        elif character in ")}":
            depth -= 1
        elif character == " " and depth == 0:
            opcode, _, rest = text[index + 1 :].partition("(")
            return _Instruction(name, text[:index], opcode, rest)
    return _Instruction(name, text, "", "")


def _is_for_sparsecore(instruction: _Instruction) -> bool:
    return _SPARSECORE in instruction.rest


def _span(entry: list[_Instruction], start: int) -> tuple[int, int]:
    """Range of instructions strictly between the start of a call's work and its end."""
    begin, name = start, entry[start].name
    for index in range(start + 1, len(entry)):
        opcode = entry[index].opcode
        if not opcode.endswith(("-update", "-done")):
            continue
        if not re.search(rf"%?(?<![\w.\-]){re.escape(name)}(?![\w.\-])", entry[index].operands):
            continue
        if opcode.endswith("-done"):
            return begin + 1, index
        begin, name = index, entry[index].name
    raise CompileError(f"SparseCore call {entry[start].name} never ends")


def _call(module: _Module, start: _Instruction, tc_cycles: int, dots: int) -> SparseCoreCall:
    kinds: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for instruction in module.reachable(start.callees):
        if instruction.opcode.endswith(("-done", "-update")):
            continue
        if match := _TARGET.search(instruction.rest):
            kinds[match[1]] += 1
            arrays = _arrays(instruction.type)
            if match[1] == "SparseGather":
                num_bytes["gather"] += sum(_unpadded_bytes(d, s) for d, s, _ in arrays)
            elif match[1] == "AllToAllDynamic":
                dtype, shape, _ = arrays[0]
                num_bytes["rows" if len(shape) > 1 else "ids"] += _unpadded_bytes(dtype, shape)
        elif match := _COLLECTIVE.match(instruction.opcode):
            kinds[match[1]] += 1
    return SparseCoreCall(
        name=start.name,
        offload=_word(start.rest, r'"offload":"(\w+)"'),
        sub_kernels=dict(sorted(kinds.items())),
        program_bytes=_number(start.rest, r'"program_size":"(\d+)"', 0),
        stack_bytes=_number(start.rest, r'"stack_size_high_watermark":"(\d+)"', 0),
        gather_bytes=num_bytes["gather"],
        exchange_row_bytes=num_bytes["rows"],
        exchange_id_bytes=num_bytes["ids"],
        tc_cycles=tc_cycles,
        dots=dots,
    )


def _collective(
    kind: str, instruction: _Instruction, num_devices: int, is_under_sparsecore: bool
) -> Collective:
    arrays = _arrays(instruction.type)
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]", instruction.rest):
        num_groups, group_size = int(match[1]), int(match[2])
    elif match := re.search(r"replica_groups=\{(\{.*?\})\}", instruction.rest):
        groups = match[1].split("},")
        num_groups, group_size = len(groups), groups[0].count(",") + 1
    else:
        num_groups, group_size = 1, num_devices
    return Collective(
        kind=kind,
        num_bytes=sum(_unpadded_bytes(dtype, shape) for dtype, shape, _ in arrays),
        num_groups=num_groups,
        group_size=group_size,
        is_under_sparsecore=is_under_sparsecore,
    )


def _ragged(module: _Module) -> Iterator[Ragged]:
    """In the order of the entry."""
    types = {
        instruction.name: instruction.type
        for computation in module.computations.values()
        for instruction in computation
    }
    for instruction in module.entry:
        if instruction.opcode.endswith(("-update", "-done")):
            continue
        for inner in (instruction, *module.reachable(instruction.callees)):
            if inner.opcode != _RAGGED:
                continue
            operand = re.match(r"%?([\w.\-]+)", inner.operands)
            assert operand is not None, inner
            (dtype, received, _), *_ = _arrays(inner.type)
            (_, sent, _), *_ = _arrays(types[operand[1]])
            yield Ragged(
                dtype=dtype,
                sent_bytes=_unpadded_bytes(dtype, sent),
                received_bytes=_unpadded_bytes(dtype, received),
                is_on_sparsecore=_is_for_sparsecore(instruction),
            )


def _parameter_bytes(entry: list[_Instruction]) -> tuple[int, ...]:
    of_index: dict[int, int] = {}
    for instruction in entry:
        if instruction.opcode == "parameter":
            index = int(instruction.rest.partition(")")[0])
            of_index[index] = sum(
                _padded_bytes(dtype, shape, layout)
                for dtype, shape, layout in _arrays(instruction.type)
            )
    return tuple(of_index[index] for index in sorted(of_index))


# ------------------------------------------------------------------------------------------ shapes


def _arrays(type_: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(dtype, shape, layout) of each array of a type; bounded dimensions count with their bound."""
    return [
        (dtype, tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in _SHAPE.findall(type_)
        if dtype in ITEM_BYTES
    ]


def _unpadded_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def _padded_bytes(dtype: str, shape: tuple[int, ...], layout: str) -> int:
    """Bytes of an array whose minor dimensions are padded to its tile, and all of it to its L.

    >>> _padded_bytes("f32", (100, 13), "1,0:T(8,128)")
    53248
    >>> _padded_bytes("f32", (9, 8), "1,0:T(8)L(64)")
    512
    """
    order, _, tiling = layout.partition(":")
    minor_first = [shape[int(n)] for n in order.split(",") if n]
    if match := re.search(r"T\(([\d,]+)\)", tiling):
        tile = [int(n) for n in match[1].split(",")][::-1]
        minor_first += [1] * (len(tile) - len(minor_first))
        for index, side in enumerate(tile):
            minor_first[index] = round_up(minor_first[index], side)
    return round_up(math.prod(minor_first), _number(tiling, r"L\((\d+)\)", 1)) * ITEM_BYTES[dtype]


def _number(text: str, pattern: str, default: int) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else default


def _word(text: str, pattern: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
