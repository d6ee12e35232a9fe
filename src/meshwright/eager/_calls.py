"""One call of a PyTorch operation, its arguments by the names of the schema. No torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError
from meshwright.formats import format_of_dtype

OTHERS = {
    "complex32": "complex fp16",
    "complex64": "complex fp32",
    "complex128": "complex fp64",
    "float4_e2m1fn_x2": "fp4-e2m1",
}


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with its arguments and what it returned."""

    name: str  # "aten.mm"
    arguments: dict[str, Any]
    result: Any

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def shape(self, argument: str) -> tuple[int, ...]:
        """The shape of a tensor argument."""
        return tuple(int(size) for size in self.arguments[argument].shape)

    def tensors(self) -> list[Any]:
        """The tensors among the arguments, those in lists included, in the schema's order."""
        found: list[Any] = []
        for value in self.arguments.values():
            found += [
                item for item in (value if isinstance(value, list | tuple) else (value,)) if _is_tensor(item)
            ]
        return found

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(tensor_text, self.tensors()))})"


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Call:
    """The call, with defaults filled in from the schema of `func`, an OpOverload."""
    schema = func._schema
    named: dict[str, Any] = {}
    for place, argument in enumerate(schema.arguments):
        if place < len(args) and not argument.kwarg_only:
            named[argument.name] = args[place]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value
    return Call(operation_name(func), named, result)


def operation_name(func: Any) -> str:
    """An operation without its overload: "aten.mm", "aten._grouped_mm", "mylib.scan"."""
    return func._schema.name.replace("::", ".")


def format_name(dtype: Any) -> str:
    """Our name of a torch dtype: "bf16"; torch's own where we have none."""
    name = str(dtype).removeprefix("torch.")
    if name in OTHERS:
        return OTHERS[name]
    try:
        return format_of_dtype(name).name
    except InputError:
        return name


def tensor_text(tensor: Any) -> str:
    """A tensor's format and shape: "bf16[8, 1024]"."""
    return f"{format_name(tensor.dtype)}[{', '.join(str(size) for size in tensor.shape)}]"


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "dtype")
