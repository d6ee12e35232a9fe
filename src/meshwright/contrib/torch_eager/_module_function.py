"""Call a user's function that returns a PyTorch module with the parts of its training step.

torch is not imported with this module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.contrib.jax_steps import USERS_FAILURES, find_function, needs
from meshwright.errors import InputError, nearest_name
from meshwright.extras import how_to_install

KEYS = ("module", "inputs", "optimizer", "loss", "autocast", "parallelize")
CONTRACT = (
    "return (module, *inputs), or a dict with 'module' and perhaps 'inputs', 'optimizer', 'loss', "
    "'autocast', 'parallelize'"
)


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


def parts_of_function(
    name: str, search_path: tuple[str, ...], knobs: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what the function `name` returns: "module", "inputs" and "keyword_inputs", and the others.

    It is called with PyTorch's meta device as the default, so that a module of any size takes no memory.
    (Fake tensors would do too, but `module.to(dtype)` fails on them in PyTorch 2.13.) It returns
    (module, *inputs), or a mapping with "module" and optionally "inputs" (a tuple, or a dict by name),
    "optimizer", "loss" and "autocast", as `mw.torch_step` takes them, and "parallelize".

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
    if isinstance(function, torch.nn.Module):
        what = f"{name} is a {type(function).__name__}, a module, and no function that makes one"
        raise InputError(what, hint=f"name a function: {CONTRACT}")
    arguments = knob_values(name, function, knobs or {})
    try:
        with torch.device("meta"):
            returned = function(**arguments)
    except ModuleNotFoundError as missing:
        raise needs(name, missing) from missing
    except InputError:
        raise
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
    if "out of meta tensor" in str(failed):
        return (
            "it is called on the meta device, so that a module of any size takes no memory: leave out what "
            "moves the module to another device, such as `.to(device)` and accelerate's `prepare`"
        )
    return "it is called without arguments, and its tensors have shapes but no values"


def _parts(name: str, returned: Any) -> dict[str, Any]:
    """Return the results of the function by name, always with "module"."""
    if isinstance(returned, tuple) and returned:
        return {"module": returned[0], "inputs": returned[1:]}
    if not isinstance(returned, Mapping) or "module" not in returned:
        if is_torch_module(returned):
            raise InputError(
                f"{name} gives a module, {type(returned).__name__}, and none of its inputs",
                hint=f"let a function make it, and {CONTRACT}",
            )
        kind = f"a {type(returned).__name__}"
        if isinstance(returned, Mapping):
            kind = f"a mapping of {', '.join(map(str, returned))}"
        raise InputError(f"{name} returned {kind}, with no module", hint=CONTRACT)
    for key in returned:
        if key not in KEYS:
            raise InputError(f"{name} returned a part named {key!r}", hint=nearest_name(str(key), KEYS))
    return dict(returned)
