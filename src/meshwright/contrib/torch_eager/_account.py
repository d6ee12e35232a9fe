"""Account one step of a PyTorch module: the record, its tables, and the two ways to ask for it.

A module is given as an object, or by the name of a function that makes it. The step runs on fake tensors:
they have shapes, and nothing is computed. `str` of an `Account` and the terminal show the same tables of text
cells. torch is not imported with this module.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.compiler import USERS_FAILURES, find_function, needs
from meshwright.errors import InputError, nearest_name
from meshwright.extras import how_to_install
from meshwright.shown import OneLine
from meshwright.units import aligned, format_bytes, format_count, format_rate

if TYPE_CHECKING:
    import torch

SCHEMA = 1
SOURCE = "torch eager, one device, not compiled"
MOST_MODULES = 10

Table = tuple[tuple[str, ...], list[tuple[str, ...]], frozenset[str]]  # header, rows, columns of numbers
KEYS = ("module", "inputs", "optimizer", "loss", "autocast", "parallelize")
CONTRACT = (
    "return (module, *inputs), or a dict with 'module' and perhaps 'inputs', 'optimizer', 'loss', "
    "'autocast', 'parallelize'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """FLOPs of one step: matrix products, convolutions, attention, recurrent layers; a multiply-add is two.

    recomputed: the part of `backward` that repeats the forward pass: recomputed checkpointed blocks, and the
        scores that fused attention does not keep.
    by_operation, by_format: all passes together; the format is that of the first operand.
    """

    forward: int
    backward: int
    recomputed: int
    optimizer: int
    by_operation: dict[str, int]
    by_format: dict[str, int]

    @property
    def model(self) -> int:
        """Forward and backward FLOPs without recomputation: the model FLOPs of `weigh`, which MFU uses."""
        return self.forward + self.backward - self.recomputed

    @property
    def total(self) -> int:
        """All FLOPs that the step executes."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCount:
    """Bytes on one device, exactly those of the storages, without an allocator's rounding.

    gradients_bytes: gradients of parameters, and of inputs that require one, after the backward pass.
    inputs_bytes: the inputs, and tensors that the module or the loss takes from elsewhere.
    saved_activation_bytes: storages that autograd keeps for the backward pass, at the end of the forward
        pass. Each counts once. Parameters, buffers and inputs are excluded; autocast's copies of weights are
        included.
    peak_bytes: the most that is alive at one instant of a step after the first: the optimizer state exists
        from the start, the gradients do not.
    temporary_peak_bytes: the part of the peak that is none of the above at that instant.
    peak_phase: forward | backward | optimizer, the phase of the peak.
    at_peak: the peak by category; adds up to `peak_bytes`.
    by_format: category -> number format -> bytes, after the backward pass; saved activations after the
        forward pass.
    """

    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    inputs_bytes: int
    saved_activation_bytes: int
    temporary_peak_bytes: int
    peak_bytes: int
    peak_phase: str
    at_peak: dict[str, int]
    by_format: dict[str, dict[str, int]]

    @property
    def hand_sum_bytes(self) -> int:
        """Parameters, saved activations, gradients and optimizer state: the usual hand-computed sum."""
        states = self.parameters_bytes + self.gradients_bytes + self.optimizer_state_bytes
        return states + self.saved_activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCount:
    """One module with its children; `path` is as in `named_modules`, "" for the module itself.

    `backward_flops` include `recomputed_flops`. Work outside all modules, such as a loss function, is in no
    row. `saved_activation_bytes`: each storage belongs to the module that first kept it.
    """

    path: str
    kind: str
    num_parameters: int
    forward_flops: int
    backward_flops: int
    recomputed_flops: int
    saved_activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Account(OneLine):
    """The cost of one training step of a PyTorch module on one device.

    unknown: operations that may do arithmetic and have no rule, with their operands' shapes -> calls; their
        FLOPs are in no sum.
    conventions: the assumptions for this module, in sentences.
    """

    name: str
    num_parameters: int
    flops: FlopCount
    memory: MemoryCount
    by_module: tuple[ModuleCount, ...]
    unknown: dict[str, int]
    conventions: tuple[str, ...]
    torch_version: str
    source: str = SOURCE

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; `schema` rises when a key changes its meaning."""
        fields = {"schema": SCHEMA, **dataclasses.asdict(self)}
        fields["flops"] |= {"model": self.flops.model, "total": self.flops.total}
        fields["memory"]["hand_sum_bytes"] = self.memory.hand_sum_bytes
        return fields

    def __str__(self) -> str:
        parameters = f"{format_count(self.num_parameters)} parameters"
        parts = [f"{self.name}, {parameters}, torch {self.torch_version}: {self.source}"]
        tables = (memory_table(self.memory), flop_table(self.flops), module_table(self), unknown_table(self))
        for header, rows, right in tables:
            if rows:
                parts.append(aligned(header, rows, right=right))
        return "\n\n".join((*parts, "\n".join(self.conventions)))


def memory_table(memory: MemoryCount) -> Table:
    """Return bytes by category, the hand sum, and the peak."""
    held = {
        "parameters": memory.parameters_bytes,
        "buffers": memory.buffers_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_state_bytes,
        "inputs": memory.inputs_bytes,
        "saved activations": memory.saved_activation_bytes,
    }
    rows = [
        (name, format_bytes(size), f"{size:,}", ", ".join(sorted(memory.by_format.get(name, ()))))
        for name, size in held.items()
    ]
    for name, size, words in (
        ("hand sum", memory.hand_sum_bytes, "parameters, gradients, optimizer state, saved activations"),
        ("temporaries at the peak", memory.temporary_peak_bytes, "none of the above, at that instant"),
        ("peak", memory.peak_bytes, f"in the {memory.peak_phase} pass"),
    ):
        rows.append((name, format_bytes(size), f"{size:,}", words))
    return ("memory", "", "bytes", "of"), rows, frozenset(("", "bytes"))


def flop_table(flops: FlopCount) -> Table:
    """Return FLOPs by pass."""
    passes = {
        "forward": (flops.forward, ""),
        "backward": (flops.backward, ""),
        "recomputed": (flops.recomputed, "part of backward"),
        "optimizer": (flops.optimizer, ""),
        "model": (flops.model, "forward and backward, without recomputation"),
    }
    rows = [
        (name, format_rate(count, "FLOP"), f"{count:,}", words) for name, (count, words) in passes.items()
    ]
    return ("pass", "", "FLOPs", "of"), rows, frozenset(("", "FLOPs"))


def module_table(account: Account, top: int = MOST_MODULES) -> Table:
    """Return the `top` most expensive modules, without those that have no FLOPs and no saved activations."""
    costs = {
        m.path: (m.forward_flops + m.backward_flops, m.saved_activation_bytes) for m in account.by_module
    }
    costly = [m for m in account.by_module if any(costs[m.path])]
    costly.sort(key=lambda m: costs[m.path], reverse=True)
    numbers = ("parameters", "forward", "backward", "saved")
    rows = [
        (
            m.path or "(all)",
            m.kind,
            format_count(m.num_parameters),
            format_rate(m.forward_flops, "FLOP"),
            format_rate(m.backward_flops, "FLOP"),
            format_bytes(m.saved_activation_bytes),
        )
        for m in costly[:top]
    ]
    return ("module", "kind", *numbers), rows, frozenset(numbers)


def unknown_table(account: Account) -> Table:
    """Return the operations without a rule, with their operands and calls."""
    rows = [(name, f"{times:,}") for name, times in account.unknown.items()]
    return ("no rule, in no sum", "calls"), rows, frozenset(("calls",))


def account_torch(
    module: torch.nn.Module,
    /,
    *inputs: Any,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    **keyword_inputs: Any,
) -> Account:
    """Count the FLOPs and memory of one eager training step on one device, without computing anything.

    Args:
        module: real, on the meta device, or with fake tensors; it is not changed.
        inputs: the arguments of its `forward`; tensors may be real, meta or fake.
        optimizer: a class of `torch.optim`, or any function from a list of parameters to an optimizer.
        loss: a function from the module's output to a scalar tensor. By default the output if it is a scalar,
            or else its `loss`, or else the sum of its tensors.
        autocast: the format for `torch.autocast` around forward pass and loss.
        keyword_inputs: further inputs by name.

    Raises:
        InputError: PyTorch is not installed, the module cannot run on fake tensors, or fails on its inputs.

    Example:
        >>> import torch
        >>> account = account_torch(torch.nn.Linear(100, 10), torch.empty(32, 100))
        >>> account.flops.forward == 2 * 32 * 100 * 10
        True
    """
    require_torch()
    from ._eager_step import account_step

    return account_step(module, inputs, keyword_inputs, optimizer, loss, autocast)


def is_torch_module(given: object) -> bool:
    """Return True for a PyTorch module; always False if PyTorch was never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def require_torch() -> None:
    """Raise `InputError` if PyTorch cannot be imported."""
    try:
        import torch  # noqa: F401
    except ImportError as missing:
        raise InputError("PyTorch is not installed", hint=how_to_install("torch")) from missing


def account_function(name: str, *, search_path: tuple[str, ...] = ()) -> Account:
    """Account the module that the function `name`, "package.module:function", returns, on one device.

    Its contract is that of `parts_of_function`; a plan that it returns is not used.

    Args:
        name: the function.
        search_path: folders that are searched first for the function's module.

    Raises:
        InputError: the function does not exist, fails or returns something else, or `account_torch` raises
            it.
    """
    parts = parts_of_function(name, search_path)
    del parts["parallelize"]
    inputs, keyword_inputs = parts.pop("inputs"), parts.pop("keyword_inputs")
    if clash := [key for key in keyword_inputs if key in KEYS]:
        raise InputError(
            f"{name}: an input is named {clash[0]!r}, which is also an argument of the account",
            hint="give the inputs as a tuple",
        )
    return account_torch(parts.pop("module"), *inputs, **parts, **keyword_inputs)


def parts_of_function(
    name: str, search_path: tuple[str, ...], knobs: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what the function `name` returns: "module", "inputs" and "keyword_inputs", and the others.

    It is called with PyTorch's meta device as the default, so that a module of any size takes no memory.
    (Fake tensors would do too, but `module.to(dtype)` fails on them in PyTorch 2.13.) It returns
    (module, *inputs), or a mapping with "module" and optionally "inputs" (a tuple, or a dict by name),
    "optimizer", "loss" and "autocast", as `account_torch` takes them, and "parallelize".

    Args:
        name: "package.module:function".
        search_path: folders that are searched first for the function's module.
        knobs: its arguments by name, as text.

    Raises:
        InputError: the function does not exist, fails, has no such argument, or returns something else.
    """
    require_torch()
    import torch

    from ._fakes import LIBRARIES, failed_place

    if ":" not in name:
        hint = f"write it as package.module:function: {name}:make"
        raise InputError(f"{name!r} does not name a function", hint=hint)
    function = find_function(name, search_path, libraries=LIBRARIES)
    arguments = knob_values(name, function, knobs or {})
    try:
        with torch.device("meta"):
            returned = function(**arguments)
    except ModuleNotFoundError as missing:
        raise needs(name, missing) from missing
    except USERS_FAILURES as failed:
        raise InputError(
            f"{name}() failed {failed_place(failed)}: {type(failed).__name__}: {failed}",
            hint=_failure_hint(failed),
        ) from failed
    parts = {**dict.fromkeys(KEYS), **_parts(name, returned)}
    inputs = () if parts["inputs"] is None else parts["inputs"]
    is_named = isinstance(inputs, Mapping)
    parts["keyword_inputs"] = dict(inputs) if is_named else {}
    parts["inputs"] = () if is_named else tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return parts


def knob_values(name: str, function: Callable[..., Any], knobs: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of a function from text, by the type of each parameter's default.

    Raises:
        InputError: the function has no such parameter, or the text is no value of that type.
    """
    if not knobs:
        return {}
    parameters = inspect.signature(function).parameters
    values: dict[str, Any] = {}
    for knob, text in knobs.items():
        if knob not in parameters:
            raise InputError(f"{name} has no argument {knob!r}", hint=nearest_name(knob, list(parameters)))
        kind: Any = type(parameters[knob].default)
        if kind is bool:
            if text.lower() not in ("true", "false"):
                raise InputError(f"{name}: {knob}={text!r} is neither true nor false", hint=f"{knob}=true")
            values[knob] = text.lower() == "true"
            continue
        try:
            values[knob] = kind(text) if kind in (int, float) else text
        except ValueError as wrong:
            raise InputError(
                f"{name}: {knob}={text!r} is no {kind.__name__}", hint=f"{knob}={parameters[knob].default}"
            ) from wrong
    return values


def _failure_hint(failed: BaseException) -> str:
    import torch

    if "cuda" in str(failed).lower() and not torch.cuda.is_available():
        return "there is no CUDA device here: leave the device out"
    return "it is called without arguments, and its tensors have shapes but no values"


def _parts(name: str, returned: Any) -> dict[str, Any]:
    """Return the results of the function by name, always with "module"."""
    if isinstance(returned, tuple) and returned:
        return {"module": returned[0], "inputs": returned[1:]}
    if not isinstance(returned, Mapping) or "module" not in returned:
        kind = f"a {type(returned).__name__}"
        if isinstance(returned, Mapping):
            kind = f"a mapping of {', '.join(map(str, returned))}"
        raise InputError(f"{name} returned {kind}, with no module", hint=CONTRACT)
    for key in returned:
        if key not in KEYS:
            raise InputError(f"{name} returned a part named {key!r}", hint=nearest_name(str(key), KEYS))
    return dict(returned)
