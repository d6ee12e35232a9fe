"""Write an exported module as JSON, and read it back from a process that a user's code may have changed.

Names, shapes, formats and plain numbers are JSON's own. What JSON lacks is an object of one kind: a reference
to a value, a number that is not finite, a complex number, an array as its raw bytes. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshwright.errors import InputError
from meshwright.json_records import read_record

from ._aten_rules import has_rule
from ._module_program import REPLACE, ArraySpec, GraphValue, ModuleProgram, Operation, reads_of

GETITEM = "getitem"  # takes one result of several, and has no rule
HINT = "let the function, and what it calls, write and delete only files of its own"
WHAT = "an exported module"
FORMATS = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFunction:
    """Holds a function's module as a program, its optimizer's name and options, and whether it has a plan."""

    program: ModuleProgram
    optimizer: tuple[str, dict[str, Any]]
    has_plan: bool

    def to_json(self) -> str:
        """Return the text that `from_json` reads.

        Raises:
            InputError: an operation has an argument of a kind that no rule takes.
        """
        name, options = self.optimizer
        # Counterparts of optimizers read plain options alone, and those of other classes have none.
        kept = {option: value for option, value in options.items() if _is_plain(value)}
        bare = dataclasses.asdict(dataclasses.replace(self.program, operations=(), constants={}))
        operations = [
            {
                **dataclasses.asdict(dataclasses.replace(operation, args=(), kwargs={})),
                "args": _written(operation.args),
                "kwargs": {key: _written(value) for key, value in operation.kwargs.items()},
            }
            for operation in self.program.operations
        ]
        constants = {key: _written(value) for key, value in self.program.constants.items()}
        fields = {
            "program": {**bare, "operations": operations, "constants": constants},
            "optimizer": (name, {option: _written(value) for option, value in kept.items()}),
            "has_plan": self.has_plan,
        }
        return json.dumps(fields, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> ExportedFunction:
        """Read the text of `to_json`.

        Raises:
            InputError: it is damaged, or it is no program that Meshwright could have exported.
        """
        found = read_record(ExportedFunction, text, name=WHAT, hint=HINT)
        program = found.program
        operations = tuple(
            dataclasses.replace(
                operation,
                args=tuple(_read(value) for value in operation.args),
                kwargs={key: _read(value) for key, value in operation.kwargs.items()},
            )
            for operation in program.operations
        )
        constants = {key: _read(value) for key, value in program.constants.items()}
        program = dataclasses.replace(program, operations=operations, constants=constants)
        _check(program)
        name, options = found.optimizer
        read = {option: _read(value) for option, value in options.items()}
        return dataclasses.replace(found, program=program, optimizer=(name, read))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _written(value: Any) -> Any:
    """Return a value as JSON."""
    if isinstance(value, GraphValue):
        return {"value": value.name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_written(value.real), _written(value.imag)]}
    if isinstance(value, list | tuple):
        return [_written(each) for each in value]
    if isinstance(value, Mapping):
        return {"mapping": {str(name): _written(each) for name, each in value.items()}}
    if isinstance(value, np.ndarray) and value.dtype.name in FORMATS:
        raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": raw, "dtype": value.dtype.name, "shape": list(value.shape)}
    raise InputError(f"an operation takes a {type(value).__name__}, which no rule takes", hint=REPLACE)


def _read(value: Any) -> Any:
    """Return the value that `_written` wrote."""
    if isinstance(value, list | tuple):
        return [_read(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"value": str(name), **rest} if not rest:
            return GraphValue(name)
        case {"float": "inf" | "-inf" | "nan" as text, **rest} if not rest:
            return float(text)
        case {"complex": [real, imaginary], **rest} if not rest:
            parts = _read(real), _read(imaginary)
            if all(isinstance(part, float) for part in parts):
                return complex(*parts)
        case {"mapping": dict() as inner, **rest} if not rest:
            return {name: _read(each) for name, each in inner.items()}
        case {"array": str(raw), "dtype": str(dtype), "shape": [*sizes], **rest} if not rest:
            return _array(raw, dtype, sizes)
        case _:
            pass
    raise _refused(f"{{{', '.join(map(repr, value))}}} is no value")


def _array(raw: str, dtype: str, sizes: list[Any]) -> np.ndarray[Any, Any]:
    """Return the array of raw bytes; its memory is its own.

    Raises:
        InputError: the format is unknown, or the bytes are not those of the shape.
    """
    _check_array(ArraySpec(shape=tuple(sizes), dtype=dtype), "a constant")
    kind = jnp.dtype(dtype)
    try:
        content = base64.b64decode(raw, validate=True)
    except ValueError as wrong:
        raise _refused(f"a constant's bytes are not base64: {wrong}") from wrong
    if len(content) != kind.itemsize * math.prod(sizes):
        raise _refused(f"a constant of {dtype}{sizes} has {len(content)} bytes")
    return np.frombuffer(content, kind).reshape(sizes).copy()


def _check_array(array: ArraySpec, what: str) -> None:
    if array.dtype not in FORMATS:
        raise _refused(f"{what} has the format {array.dtype!r}")
    if not all(type(size) is int and size >= 0 for size in array.shape):
        raise _refused(f"{what} has the shape {list(array.shape)}")


def _check(program: ModuleProgram) -> None:
    """Raise if a program reads what nothing makes, or runs what has no rule."""
    made = {*program.constants, *_placeholders(program)}
    for operation in program.operations:
        _check_operation(operation, made)
        made.add(operation.result)
    for name in (program.result, *program.updates.values()):
        if name not in made:
            raise _refused(f"the value {name!r} is read, and nothing makes it")
    for dtype in program.stored.values():
        _check_array(ArraySpec(shape=(), dtype=dtype), "a parameter")
    for what, names, known in (
        ("stored", program.stored, program.parameters),
        ("frozen", program.frozen, program.parameters),
        ("updates", program.updates, program.buffers),
    ):
        if strange := [name for name in names if name not in known]:
            raise _refused(f"{what} names {strange[0]!r}, which is not there")


def _placeholders(program: ModuleProgram) -> set[str]:
    """Return the names of the arguments that operations read, which are parameters, buffers and inputs."""
    known: dict[str, dict[str, ArraySpec]] = {
        "parameters": program.parameters,
        "buffers": program.buffers,
        "inputs": program.inputs,
    }
    for kind, arrays in known.items():
        for name, array in arrays.items():
            _check_array(array, f"{name} of {kind}")
    for placeholder, (kind, name) in program.sources.items():
        if name not in known.get(kind, {}):
            raise _refused(f"{placeholder} is {name!r} of {kind!r}, which is not there")
    return set(program.sources)


def _check_operation(operation: Operation, made: set[str]) -> None:
    if operation.name != GETITEM and not has_rule(operation.name, operation.overload):
        raise _refused(f"the operation {operation.name!r} has no rule")
    for name in reads_of(operation):
        if name not in made:
            raise _refused(f"{operation.name} reads {name!r}, which nothing before it makes")
    if operation.name == GETITEM and not _is_item(operation.args):
        raise _refused("an operation takes no result of another one")
    for array in operation.arrays:
        if array is not None:
            _check_array(array, f"the result {operation.result!r}")
    if not operation.is_tuple and len(operation.arrays) != 1:
        raise _refused(f"the result {operation.result!r} is {len(operation.arrays)} arrays")


def _is_item(args: tuple[Any, ...]) -> bool:
    return len(args) == 2 and isinstance(args[0], GraphValue) and type(args[1]) is int


def _refused(why: str) -> InputError:
    return InputError(f"this is not {WHAT}: {why}", hint=HINT)
