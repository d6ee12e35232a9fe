"""Weigh a PyTorch module for a fleet that need not exist, as PyTorch runs it.

Imports: `torch_account`, which runs the module on fake tensors. Used by: `_weigh`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import Layout
from ..errors import InputError
from ..files import MOST_SOURCE_BYTES, read_text
from ..hardware import Fleet
from ..results import Phase, TorchWeighing
from ..torch_account import MeshAccount, account_named, require_torch
from ._torch_script import imports_torch_alone

if TYPE_CHECKING:
    from ._weigh import RunFacts

DEFAULT_LAYOUT = "fsdp=-1"


def weigh_module(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fleet: Fleet,
    layout: str | None,
    counts: RunFacts,
    on_event: Callable[[Phase], None],
    **parts: Any,
) -> TorchWeighing:
    """Weigh a module in this process. `parts`: parallelize, optimizer, loss and autocast."""
    require_torch()
    from ..torch_account import account_on_mesh

    mesh = _mesh(fleet, layout)
    account = account_on_mesh(
        module,
        tuple(args),
        dict(kwargs),
        name=type(getattr(module, "_orig_mod", module)).__name__,  # of a module that torch.compile wraps
        fleet=fleet,
        layout=mesh,
        on_phase=lambda name: on_event(Phase(name=name)),
        **parts,
    )
    return _made(account, fleet, mesh, counts)


def weigh_torch_function(
    name: str,
    fleet: Fleet,
    layout: str | None,
    knobs: Mapping[str, str],
    counts: RunFacts,
    on_event: Callable[[Phase], None],
) -> TorchWeighing:
    """Weigh the module that a function returns, "package.module:function", in a process of its own."""
    mesh = _mesh(fleet, layout)
    account = account_named(
        name, fleet=fleet, layout=mesh, knobs=knobs, on_phase=lambda name: on_event(Phase(name=name))
    )
    return _made(account, fleet, mesh, counts)


def is_torch_function(name: str) -> bool:
    """Return whether the file of a function imports PyTorch, or a library of its models, and not JAX.

    The file is read and not run: a function of PyTorch is to be called on the meta device.
    """
    module_name, _, _ = name.rpartition(":")
    try:
        text = _source(module_name)
    except (OSError, ValueError):
        return False
    return imports_torch_alone(text)


def _source(module_name: str) -> str:
    """Return the text of a module's file, which is looked up first in the working directory; "" if none."""
    parts = module_name.removesuffix(".py").replace("/", ".").split(".")
    if module_name.endswith(".py"):
        return read_text(module_name, MOST_SOURCE_BYTES)
    for file in (Path(*parts).with_suffix(".py"), Path(*parts, "__init__.py")):
        if file.is_file():
            return read_text(file, MOST_SOURCE_BYTES)
    if importlib.util.find_spec(parts[0]) is None:
        return ""
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        return ""
    origin = None if spec is None else spec.origin
    return read_text(origin, MOST_SOURCE_BYTES) if origin and os.path.isfile(origin) else ""


def _mesh(fleet: Fleet, layout: str | None) -> Layout:
    if fleet.chip.platform == "tpu":
        raise InputError(
            f"a PyTorch module is weighed as PyTorch runs it on GPUs, and {fleet.chip.name} is a TPU",
            hint="name a fleet of GPUs, 8xH100; `meshwright fleets` lists them",
        )
    return Layout.parse(layout or DEFAULT_LAYOUT, free_names=True).resolve(fleet.num_devices)


def _made(account: MeshAccount, fleet: Fleet, mesh: Layout, counts: RunFacts) -> TorchWeighing:
    prediction, tokens_per_step = account.prediction, counts["tokens_per_step"]
    if prediction is not None and tokens_per_step is not None:
        rate = tokens_per_step / prediction.step_seconds.expected / fleet.num_devices
        told = dataclasses.replace(prediction, tokens_per_second_per_device=rate)
        account = dataclasses.replace(account, prediction=told)
    return TorchWeighing(fleet=fleet, layout=mesh, account=account, **counts)
