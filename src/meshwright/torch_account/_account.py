"""Account one step of a PyTorch module, given as a module or by the name of a function that makes it.

The step runs on fake tensors: they have shapes, and nothing is computed. torch is not imported with this
module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.compiler import USERS_FAILURES, find_function, needs
from meshwright.errors import InputError, nearest_name

from ._records import Account

if TYPE_CHECKING:
    import torch


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
    """
    require_torch()
    from ._step import Step, account_step

    return account_step(Step(module, inputs, keyword_inputs, optimizer, loss, autocast))


def is_torch_module(given: object) -> bool:
    """Return True for a PyTorch module; always False if PyTorch was never imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.nn.Module)


def require_torch() -> None:
    """Raise if PyTorch cannot be imported.

    Raises:
        InputError: it is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError as missing:
        raise InputError("PyTorch is not installed", hint="pip install 'meshwright[torch]'") from missing


KEYS = ("module", "inputs", "optimizer", "loss", "autocast")
CONTRACT = (
    "return (module, *inputs), or a dict with 'module' and perhaps 'inputs', 'optimizer', 'loss', 'autocast'"
)


def account_function(name: str, *, search_path: tuple[str, ...] = ()) -> Account:
    """Account the module that the function `name`, "package.module:function", returns.

    The function takes no arguments. It is called with PyTorch's meta device as the default, so that a module
    of any size takes no memory. (Fake tensors would do too, but `module.to(dtype)` fails on them in PyTorch
    2.13.) It returns (module, *inputs), or a mapping with "module" and optionally "inputs" (a tuple, or a
    dict by name), "optimizer", "loss" and "autocast", as `account_torch` takes them.

    Args:
        name: the function.
        search_path: folders that are searched first for the function's module.

    Raises:
        InputError: the function does not exist, fails or returns something else, or `account_torch` raises
            it.
    """
    require_torch()
    import torch

    from ._fakes import LIBRARIES, failed_place

    if ":" not in name:
        raise InputError(
            f"{name!r} names no function", hint=f"write it as package.module:function: {name}:make"
        )
    function = find_function(name, search_path, libraries=LIBRARIES)
    try:
        with torch.device("meta"):
            returned = function()
    except ModuleNotFoundError as missing:
        raise needs(name, missing) from missing
    except USERS_FAILURES as failed:
        raise InputError(
            f"{name}() failed {failed_place(failed)}: {type(failed).__name__}: {failed}", hint=_hint(failed)
        ) from failed
    parts = _parts(name, returned)
    inputs = parts.pop("inputs")
    positional, by_name = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    clash = [key for key in by_name if key in KEYS]
    if clash:
        raise InputError(
            f"{name}: an input is named {clash[0]!r}, which is what a part of the account is called",
            hint="give the inputs as a tuple",
        )
    return account_torch(parts.pop("module"), *positional, **parts, **by_name)


def _hint(failed: BaseException) -> str:
    import torch

    if "cuda" in str(failed).lower() and not torch.cuda.is_available():
        return "there is no CUDA device here: leave the device out"
    return "it is called without arguments, and its tensors have shapes but no values"


def _parts(name: str, returned: Any) -> dict[str, Any]:
    """Return the results of the function by name; "module" and "inputs" always exist."""
    if isinstance(returned, tuple) and returned:
        return {"module": returned[0], "inputs": returned[1:]}
    if not isinstance(returned, Mapping) or "module" not in returned:
        what = (
            f"a mapping of {', '.join(map(str, returned))}"
            if isinstance(returned, Mapping)
            else "a " + type(returned).__name__
        )
        raise InputError(f"{name} returned {what}, with no module", hint=CONTRACT)
    for key in returned:
        if key not in KEYS:
            raise InputError(f"{name} returned a part named {key!r}", hint=nearest_name(str(key), KEYS))
    inputs = returned.get("inputs", ())
    kept = (
        inputs
        if isinstance(inputs, Mapping | tuple)
        else tuple(inputs)
        if isinstance(inputs, list)
        else (inputs,)
    )
    return {**returned, "inputs": kept}
