"""Parse the text of an optimised, scheduled XLA program into records.

`parse_program` reads the file `*after_optimizations.txt` that `xla_dump_to` makes XLA write (XLA of jaxlib
0.10 to 0.12; cuda, cpu and tpu). Instructions stay in schedule order. `parse_shape` reads a shape: an array
with its layout, or a tuple of shapes. Text that is not understood raises an error, because a skipped line
would be uncounted work. The grammar is that of XLA's own printer
(https://openxla.org/xla/hlo_dumps and xla/hlo/ir/hlo_instruction.cc), which has no specification.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

DTYPE_BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s1": 1, "s2": 2, "s4": 4, "s8": 8, "s16": 16, "s32": 32, "s64": 64,
    "u1": 1, "u2": 2, "u4": 4, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8,
    "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128,
}  # fmt: skip
COMMENT = re.compile(r"/\*.*?\*/")
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{.*\})?$")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """The shape of one array on one device: element type, and dimensions with the outermost first."""

    dtype: str
    dims: tuple[int, ...]
    memory_space: int  # 0 is the device's main memory; 5 the host's on NVIDIA

    @property
    def num_elements(self) -> int:
        """Product of the dimensions; 1 for a scalar."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, without the padding of a tiled layout."""
        return -(-self.num_elements * DTYPE_BITS[self.dtype] // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape = Array | tuple["Shape", ...]


def leaves_of(shape: Shape) -> tuple[Array, ...]:
    """Return the arrays of a shape, with tuples flattened."""
    if isinstance(shape, Array):
        return (shape,)
    return tuple(leaf for part in shape for leaf in leaves_of(part))


# Nearly all texts have their brackets in pairs, and few levels of them. Then one expression reads at once
# what `_tokens` reads piece by piece in five times as long.
_LEVELS = 6
_INSIDE = r'[^"(){}\[\],]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_nested = r"[({\[](?:,|" + _INSIDE + ")*+[)}\\]]"
for _ in range(_LEVELS - 1):
    _nested = rf"[({{\[](?:,|{_INSIDE}|{_nested})*+[)}}\]]"
_PART = re.compile(rf"(?:{_INSIDE}|{_nested})++")
_CLOSED = re.compile(_nested)


def split_text(text: str) -> list[str]:
    """Split `text` at the commas outside brackets and strings, and leave out empty parts."""
    parts: list[str] = _PART.findall(text)
    if ",".join(parts) != text:
        parts = _split_by_tokens(text)
    return [stripped for part in parts if (stripped := part.strip())]


def _split_by_tokens(text: str) -> list[str]:
    parts, start = list[str](), 0
    for token, depth in _tokens(text):
        if token[0] == "," and not depth:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def _tokens(text: str, start: int = 0) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the brackets, commas and strings of `text` from `start` on, each with the depth after it."""
    depth = 0
    for token in TOKEN.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        yield token, depth


@functools.lru_cache(maxsize=100_000)
def parse_shape(text: str) -> Shape:
    """Parse a shape such as "bf16[2,4]{1,0:T(8,128)S(1)}", or a tuple of shapes.

    Raises:
        ValueError: the text is not a shape, or names an unknown element type.

    >>> parse_shape("bf16[2,4]{1,0}").num_bytes
    16
    """
    text = (COMMENT.sub("", text) if "/*" in text else text).strip()
    if text.startswith("("):
        return tuple(parse_shape(part) for part in split_text(text[1:-1]))
    match = _ARRAY.match(text)
    if not match or match[1] not in DTYPE_BITS:
        raise ValueError(f"shape {text!r}")
    dims = tuple(int(d.removeprefix("<=")) for d in match[2].split(",") if d)
    space = _MEMORY_SPACE.search(match[3] or "")
    return Array(dtype=match[1], dims=dims, memory_space=int(space[1]) if space else 0)


# Opcodes by what they do. The other modules and packages take them from here.
COLLECTIVES = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute"),
)
_COLLECTIVE_OF = {f"{kind}{part}": kind for kind in COLLECTIVES for part in ("", "-start", "-done")}
OTHER_EXCHANGES = ("send", "collective-broadcast")
"""Opcodes that exchange data between devices and have no rule for their bytes."""
RUNNING = ("fusion", "call", "async-start", "custom-call")
"""Opcodes that execute the computations they name as they stand."""
FREE = frozenset((
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "add-dependency",
    "partition-id", "replica-id", "opt-barrier", "domain",
))  # fmt: skip
"""Opcodes that launch no kernel: names, views and constants."""
MOVING = frozenset((
    "bitcast", "copy", "convert", "reshape", "transpose", "opt-barrier", "copy-start", "copy-done",
    "async-done", "all-gather-done",
))  # fmt: skip
"""Opcodes that hand on all elements of their first operand, perhaps in another format or place."""

# Attributes that name computations. `select` and `scatter` belong to select-and-scatter.
CALLING = frozenset((
    "calls", "body", "condition", "to_apply", "branch_computations", "true_computation",
    "false_computation", "called_computations", "select", "scatter", "comparator",
))  # fmt: skip

_NAME = r"[\w.\-]+"
_COMPUTATION = re.compile(rf"(ENTRY )?%?({_NAME}) (?:\(.*\) -> .* )?\{{$")
_END = re.compile(r'\}(, execution_thread="[^"]*")?$')
_INSTRUCTION = re.compile(rf"\s+(ROOT )?%({_NAME}) = ")
_OPCODE = re.compile(r" ?([a-z][a-z0-9\-]*)\(")
_OPERAND = re.compile(rf"(?:.* )?%({_NAME}?)((?:#\d+)*)$")
_NAMES = re.compile(rf"%{_NAME}(?:, %{_NAME})*$")  # operands without indices, as nearly all are
_CALLED = re.compile(rf"%({_NAME})")
_OP_NAME = re.compile(r'op_name="([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_SOURCE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?:.*?source_line=(\d+))?')
# What a Pallas kernel says of itself is printed on lines of its own, within an instruction's line.
_BROKEN_LINE = re.compile(r"(?<=kernel_metadata=)\{\n(.*)\n\}")
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")
_TABLE_ROW = re.compile(r"(\d+) (.*)$")
Frame = tuple[str, str, int]  # file, function, line
Rename = Callable[[str, list[Frame]], str]
MOST_PARENTS = 100
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A use of another instruction's value; `index` selects inside its tuple (`%param#2` is (2,))."""

    name: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instruction:
    """One instruction of the schedule.

    `literal`: the text between the parentheses of a constant or parameter, which have no operands.
    `attributes`: each attribute's text as printed.
    `called`: the names of the computations in each calling attribute.
    `op_name`: the path that JAX gave to the operation, or an argument's path; "" without one.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[Operand, ...]
    literal: str
    attributes: dict[str, str]
    called: dict[str, tuple[str, ...]]
    op_name: str

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of the result, with tuples flattened."""
        return leaves_of(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def has_path(self) -> bool:
        """True if JAX named the instruction.

        An argument's path and a name that XLA makes itself ("multiply.3") contain no slash.
        """
        return "/" in self.op_name

    @property
    def all_called(self) -> tuple[str, ...]:
        """Names of all computations that the instruction calls, in the order printed."""
        return tuple(name for names in self.called.values() for name in names)

    @property
    def collective(self) -> str:
        """Kind of the collective that the instruction is, starts or ends; "" for any other instruction."""
        return _COLLECTIVE_OF.get(self.opcode, "")

    @property
    def is_synchronous(self) -> bool:
        """True if the compiler decided that the collective started here does not run beside computation."""
        return bool(self.backend_config.get("collective_backend_config", {}).get("is_sync", False))

    @property
    def backend_config(self) -> dict[str, Any]:
        """Configuration that the backend attached as JSON; empty where none is attached.

        Raises:
            ValueError: the text is not a JSON object (a foreign call may use its own dialect).
        """
        text = self.attributes.get("backend_config", "{}")
        if text.startswith('"'):
            text = _unquoted(text[1:-1]) or "{}"
        loaded = json.loads(text)
        if not isinstance(loaded, dict):
            raise ValueError(f"%{self.name}: backend_config is not a JSON object: {text[:200]}")
        return cast("dict[str, Any]", loaded)

    @property
    def custom_call_target(self) -> str:
        """Target of a custom call; "" for any other instruction."""
        return _unquoted(self.attributes.get("custom_call_target", '""')[1:-1])

    @property
    def trip_count(self) -> int | None:
        """Trip count of a `while`, if the compiler knows it; else None."""
        count = self.backend_config.get("known_trip_count") if self.opcode == "while" else None
        return int(count["n"]) if count else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Computation:
    """Instructions in schedule order; the value of `root` is the result."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def places(self) -> dict[str, int]:
        """The place of each instruction in the schedule, by its name."""
        return {instruction.name: place for place, instruction in enumerate(self.instructions)}

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameters in the order of their numbers."""
        parameters = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(parameters, key=lambda i: int(i.literal)))

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use a value, once for each use, by the name of the one that makes it."""
        users: dict[str, list[Instruction]] = {instruction.name: [] for instruction in self.instructions}
        for instruction in self.instructions:
            for operand in instruction.operands:
                users[operand.name].append(instruction)
        return users

    def done_of(self, start: Instruction) -> Instruction:
        """Return the `-done` that awaits what `start` started.

        Raises:
            ValueError: nothing in this computation awaits it.
        """
        for user in self.users[start.name]:
            if user.opcode.endswith("-done"):
                return user
        raise ValueError(f"%{start.name} is started and never awaited in %{self.name}")

    def operand_shape(self, operand: Operand) -> Shape:
        """Return the shape of the value that `operand` uses."""
        shape = self.by_name[operand.name].shape
        for index in operand.index:
            assert not isinstance(shape, Array), f"{operand} indexes an array"
            shape = shape[index]
        return shape

    def operand_arrays(self, instruction: Instruction) -> tuple[Array, ...]:
        """Return the arrays of an instruction's operands, with tuples flattened."""
        return tuple(a for operand in instruction.operands for a in leaves_of(self.operand_shape(operand)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A whole module: its computations by name, and source lines ("model.py:25") by stack frame."""

    computations: dict[str, Computation]
    entry: Computation
    lines_by_frame: dict[int, str] = field(repr=False)

    def source_line(self, instruction: Instruction) -> str:
        """Return the innermost frame ("model.py:25"), or "" where the compiler does not know it."""
        metadata = instruction.attributes.get("metadata", "")
        if source := _SOURCE.search(metadata):
            return _line(source[1], source[2] or "0")
        match = _FRAME_ID.search(metadata)
        return self.lines_by_frame[int(match[1])] if match and int(match[1]) else ""

    def called_by(self, instruction: Instruction) -> tuple[Computation, ...]:
        """Return the computations that an instruction calls, in the order printed."""
        return tuple(self.computations[name] for name in instruction.all_called)

    def inside(self, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
        """Yield the instructions of the computations that an instruction calls, with their computations."""
        for computation in self.called_by(instruction):
            for inner in computation.instructions:
                yield computation, inner

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yield every instruction once, with the computation that contains it."""
        for computation in self.computations.values():
            for instruction in computation.instructions:
                yield computation, instruction


def parse_program(text: str, rename: Rename | None = None) -> Program:
    """Parse the text of a module.

    Args:
        rename: from an operation's path, and its frames of the source (innermost first), to another path.

    Raises:
        ValueError: a line is not understood, or the module is not scheduled. The message names the line.
    """
    whole = _BROKEN_LINE.sub(r"{\1}", text) if "kernel_metadata={\n" in text else text
    lines = iter(enumerate(whole.splitlines(), 1))
    header = next((line for _, line in lines if line.strip()), "")
    if not header.startswith("HloModule ") or "is_scheduled=true" not in header:
        raise ValueError(f"not a scheduled HLO module: {header[:200]!r}")
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    table: dict[int, str] | None = None
    for number, line in lines:
        if not line.strip():
            table = None
        elif line in tables:
            table = tables[line]
        elif table is not None and (row := _TABLE_ROW.match(line)):
            table[int(row[1])] = row[2]
        elif match := _COMPUTATION.match(line):
            computation = _computation(match[2], lines)
            if rename is not None:
                computation = _renamed(computation, rename, functools.partial(_frames_of, tables))
            computations[match[2]] = computation
            entry = computation if match[1] else entry
        else:
            raise ValueError(f"line {number} is not understood: {line[:200]}")
    if entry is None:
        raise ValueError("the module has no ENTRY computation")
    _check_references(computations)
    return Program(computations=computations, entry=entry, lines_by_frame=_lines_by_frame(tables))


def _renamed(
    computation: Computation, rename: Rename, frames_of: Callable[[int], list[Frame]]
) -> Computation:
    def instruction(old: Instruction) -> Instruction:
        match = _FRAME_ID.search(old.attributes.get("metadata", ""))
        if match is None or not int(match[1]):
            return old
        return replace(old, op_name=rename(old.op_name, frames_of(int(match[1]))))

    made = {old.name: instruction(old) for old in computation.instructions}
    return replace(computation, instructions=tuple(made.values()), root=made[computation.root.name])


def _frames_of(tables: Mapping[str, Mapping[int, str]], frame: int) -> list[Frame]:
    """Return the file, function and line of a stack frame and of those that called it, innermost first."""
    frames: list[Frame] = []
    # XLA prints the caller's number plus one. The first frame has no caller, so it shows what is added.
    beyond = _numbers(tables["StackFrames"][1]).get("parent_frame_id", 0)
    while frame > 0 and len(frames) < MOST_PARENTS:
        row = _numbers(tables["StackFrames"][frame])
        at = _numbers(tables["FileLocations"][row["file_location_id"]])
        file, function = (
            _unquoted(tables[table][at[key]].strip('"'))
            for table, key in (("FileNames", "file_name_id"), ("FunctionNames", "function_name_id"))
        )
        frames.append((file, function, at["line"]))
        frame = row.get("parent_frame_id", 0) - beyond
    return frames


def _check_references(computations: dict[str, Computation]) -> None:
    for computation in computations.values():
        for instruction in computation.instructions:
            missing = [name for name in instruction.all_called if name not in computations]
            missing += [o.name for o in instruction.operands if o.name not in computation.by_name]
            if missing:
                raise ValueError(f"%{instruction.name} names {missing}, which the module does not have")


def _computation(name: str, lines: Iterator[tuple[int, str]]) -> Computation:
    instructions, roots = list[Instruction](), list[Instruction]()
    for number, line in lines:
        if _END.match(line):
            break
        try:
            instructions.append(_instruction(line))
        except (ValueError, KeyError, IndexError) as wrong:
            raise ValueError(f"line {number} is not understood ({wrong}): {line[:200]}") from wrong
        if line.lstrip().startswith("ROOT "):
            roots.append(instructions[-1])
    else:
        raise ValueError(f"computation %{name} does not end")
    if len(roots) != 1:
        raise ValueError(f"computation %{name} has {len(roots)} roots")
    return Computation(name=name, instructions=tuple(instructions), root=roots[0])


def _instruction(line: str) -> Instruction:
    start = _INSTRUCTION.match(line)
    if not start:
        raise ValueError("no '%name = '")
    at = start.end()
    end = _closing(line, at) if line[at] == "(" else line.index(" ", at)
    shape = parse_shape(line[at:end])
    opcode = _OPCODE.match(line, end)
    if not opcode:
        raise ValueError("no opcode")
    closing = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : closing - 1]
    plain = opcode[1] in ("constant", "parameter")
    rest = line[closing:].removeprefix(", ")
    attributes = dict(map(_attribute, split_text(rest)))
    if "device_ids" in attributes:  # the comma belongs to one value: mesh[..], device_ids=(..) {..}
        attributes["replica_groups"] += f", device_ids={attributes.pop('device_ids')}"
    op_name = _OP_NAME.search(attributes.get("metadata", ""))
    called: dict[str, tuple[str, ...]] = {}
    if "%" in rest:  # few instructions name a computation
        called = {k: tuple(_CALLED.findall(v)) for k, v in attributes.items() if _names_computations(k, v)}
    return Instruction(
        name=start[2],
        opcode=opcode[1],
        shape=shape,
        operands=() if plain else _operands(inside),
        literal=inside if plain else "",
        attributes=attributes,
        called=called,
        op_name=_unquoted(op_name[1]) if op_name else "",
    )


def _closing(text: str, at: int) -> int:
    """Return the index just past the parenthesis that closes the one at `at`, skipping strings."""
    if closed := _CLOSED.match(text, at):
        return closed.end()
    for token, depth in _tokens(text, at):
        if not depth:
            return token.end()
    raise ValueError("unbalanced parentheses")


def _attribute(part: str) -> tuple[str, str]:
    key, equals, value = part.partition("=")
    if not equals:
        raise ValueError(f"attribute {part!r} has no value")
    return key, value


def _names_computations(key: str, value: str) -> bool:
    if key in CALLING and _CALLED.search(value):
        return True
    if value.startswith(("%", "{%")) and key != "control-predecessors":
        raise ValueError(f"attribute {key!r} names something unknown")
    return False


def _operands(text: str) -> tuple[Operand, ...]:
    if _NAMES.match(text):
        return tuple([Operand(name=name) for name in text[1:].split(", %")])
    operands: list[Operand] = []
    for part in split_text(COMMENT.sub("", text) if "/*" in text else text):
        match = _OPERAND.match(part)
        if not match:
            raise ValueError(f"operand {part!r}")
        operands.append(Operand(name=match[1], index=tuple(int(k) for k in match[2].split("#")[1:])))
    return tuple(operands)


def _unquoted(text: str) -> str:
    """Undo C escapes: XLA prints `state['w']` as `state[\\'w\\']`."""
    if "\\" not in text:
        return text
    plain = {"n": "\n", "t": "\t", "r": "\r"}
    return re.sub(r"\\(.)", lambda m: plain.get(m[1], m[1]), text)


def _line(file: str, number: int | str) -> str:
    return f"{_unquoted(file).rsplit('/', 1)[-1]}:{number}"


def _numbers(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}


def _lines_by_frame(tables: dict[str, dict[int, str]]) -> dict[int, str]:
    lines: dict[int, str] = {}
    for frame, row in tables["StackFrames"].items():
        location = _numbers(tables["FileLocations"][_numbers(row)["file_location_id"]])
        lines[frame] = _line(tables["FileNames"][location["file_name_id"]].strip('"'), location["line"])
    return lines
