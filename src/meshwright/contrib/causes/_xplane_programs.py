"""Read the compiled programs that an XPlane file holds, and tell what each of their instructions does.

The profiler of jax puts each program that ran into the plane "/host:metadata", as XLA's own protocol buffer.
`ProfileData` does not show it, so its few fields are read here by their numbers in
tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from meshwright.contrib.calibration import class_of_kernel
from meshwright.hlo import FREE, Computation, Instruction, Program, ProgramPhases, module_of, parse_program
from meshwright.ledger import MultiplyAdds, calls_the_host, instruction_work

from ._recorded import COMPUTE_KINDS, UNKNOWN

HLO = "jaxlib._hlo"  # where jaxlib 0.10 and 0.12 keep XLA's own reader of modules
METADATA = b"/host:metadata"
PLANE, PLANE_NAME, EVENT_METADATA = 1, 2, 4  # of XSpace and XPlane
VALUE = 2  # of an entry of a map
NAME, STATS = 2, 5  # of XEventMetadata
BYTES = 6  # of XStat
MODULE = 1  # of HloProto
CONTAINERS = ("while", "conditional", "call", "async-start", "async-done", "async-update")
HOST_SPACE = 5  # of memory, as XLA numbers it
BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8-e4m3": 8, "fp8-e5m2": 8}

Fields = Iterator[tuple[int, bytes | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Hold what one instruction does, in the words of `Work`. `is_work`: it is neither a container
    of others nor free."""

    kind: str
    is_work: bool
    source: str | None
    scope: str | None
    phase: str | None
    recomputed: bool
    format_name: str | None
    shape: str
    flops: float | None
    num_bytes: float
    group: str | None


def program_texts(space: bytes) -> dict[str, str]:
    """Return the text of each program in an XPlane file, by its name with its number: "jit_step(4)".

    A program whose buffer this jaxlib cannot read is left out.
    """
    found: dict[str, str] = {}
    for number, plane in _fields(space):
        if number != PLANE or not isinstance(plane, bytes) or METADATA not in plane[:200]:
            continue
        for number, entry in _fields(plane):
            if number == EVENT_METADATA and isinstance(entry, bytes):
                found.update(_program_in(entry))
    return found


def _program_in(entry: bytes) -> Iterator[tuple[str, str]]:
    metadata = next((value for number, value in _fields(entry) if number == VALUE), b"")
    name = ""
    for number, value in _fields(metadata if isinstance(metadata, bytes) else b""):
        if not isinstance(value, bytes):
            continue
        if number == NAME:
            name = value.decode("utf-8", "replace")
        elif number == STATS:
            for inner, proto in _fields(value):
                if inner == BYTES and isinstance(proto, bytes):
                    module = next((part for field, part in _fields(proto) if field == MODULE), b"")
                    loaded = import_module(HLO).HloModule.from_serialized_hlo_module_proto(module)
                    if loaded is not None:
                        yield name, loaded.to_string()


def _fields(message: bytes) -> Fields:
    """Yield the number and the value of each field of a protocol buffer.

    Raises:
        ValueError: the buffer ends inside a field.
    """
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield tag >> 3, value
            continue
        if kind == 2:
            length, place = _varint(message, place)
        else:
            length = {1: 8, 5: 4}.get(kind, len(message))
        if place + length > len(message):
            raise ValueError(f"a field of kind {kind} with {length} bytes at byte {place} of {len(message)}")
        yield tag >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return value, place
    raise ValueError(f"a number that does not end at byte {place}")


def facts_of(program: Program) -> dict[str, Facts]:
    """Return what each scheduled instruction of a program does, by its name."""
    phases = ProgramPhases(program)
    inside = {
        name
        for _, instruction in program.instructions()
        if instruction.opcode in ("fusion", "custom-call")
        for name in instruction.all_called
    }
    return {
        instruction.name: _facts(program, computation, instruction, phases)
        for computation, instruction in program.instructions()
        if computation.name not in inside
    }


def _facts(program: Program, home: Computation, instruction: Instruction, phases: ProgramPhases) -> Facts:
    products = instruction_work(program, home, instruction) if instruction.opcode not in CONTAINERS else ()
    phase = phases.of(home, instruction)
    widest = max(products, key=lambda each: each.flops, default=None)
    operands = home.operand_arrays(instruction)
    first = max(operands, key=lambda array: array.num_elements, default=None)
    return Facts(
        kind=kind_of(instruction, products),
        is_work=instruction.opcode not in FREE and instruction.opcode not in CONTAINERS,
        source=program.source_line(instruction) or None,
        scope=module_of(instruction.op_name) or None,
        phase=phase if phase in ("forward", "backward", "optimizer") else None,
        recomputed=phase == "recompute",
        format_name=widest.format if widest is not None else None if first is None else first.dtype,
        shape=", ".join(map(str, instruction.arrays)),
        flops=sum(each.flops for each in products) or None,
        num_bytes=float(instruction.num_bytes),
        group=instruction.attributes.get("replica_groups"),
    )


def kind_of(instruction: Instruction, products: tuple[MultiplyAdds, ...]) -> str:
    """Return the kind of work of an instruction, one of `WORK_KINDS`."""
    if instruction.collective:
        return instruction.collective.removeprefix("ragged-")
    if calls_the_host(instruction) or instruction.opcode in ("infeed", "outfeed"):
        return "callback"
    if products:
        kind = max(products, key=lambda each: each.flops).kind
        return kind if kind in COMPUTE_KINDS else "matmul"
    if instruction.opcode.startswith("copy") and any(
        a.memory_space == HOST_SPACE for a in instruction.arrays
    ):
        return "copy-to-host"
    if instruction.opcode == "custom-call":
        return class_of_kernel(instruction.custom_call_target) or UNKNOWN
    return "memory-bound"


def parsed(text: str) -> Program | None:
    """Return a program by its text; None if this version does not understand it."""
    try:
        return parse_program(text)
    except ValueError:
        return None
