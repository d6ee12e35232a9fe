"""What fails while a module runs on fake tensors, in words. Imports torch: imported only while accounting."""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from meshwright.errors import InputError

from ._calls import operation_name

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def check_parts(module: Any, inputs: Any, optimizer: Any, loss: Any, autocast: Any) -> None:
    """Refuse what is no module, no tensor, no optimizer's class, no function, no format.

    Raises:
        InputError: which part is wrong, and what it should be.
    """
    _check_module(module)
    for path, leaf in pytree.tree_leaves_with_path(inputs):
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not isinstance(leaf, torch.Tensor):
            kind = f"{type(leaf).__module__.partition('.')[0]}'s {type(leaf).__name__}"
            raise InputError(
                f"an input is {kind}, not a tensor ({pytree.keystr(path)})",
                hint="torch.from_numpy(numpy.asarray(...)) makes one",
            )
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise InputError(
            f"the optimizer is a {kind} that holds real parameters already; the account runs a copy",
            hint=f"give the class, torch.optim.{kind}, or functools.partial(torch.optim.{kind}, lr=...)",
        )
    for name, part in (("optimizer", optimizer), ("loss", loss)):
        if part is not None and not callable(part):
            raise InputError(
                f"the {name} is a {type(part).__name__}, not callable",
                hint=f"give a class or function as {name}",
            )
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise InputError(
            f"autocast={autocast!r} is no floating-point format", hint="give torch.bfloat16 or torch.float16"
        )


def _check_module(module: Any) -> None:
    if inspect.isclass(module):
        raise InputError(
            f"{module.__name__} is a class, not a module", hint=f"make one: {module.__name__}(...)"
        )
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"a {type(module).__name__} is no torch.nn.Module", hint="give a module, then its inputs"
        )
    kind = type(module).__name__
    if kind in WRAPPERS:
        raise InputError(
            f"the module is wrapped in {kind}, and this account is of one device", hint="give its .module"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            f"{kind} is compiled by TorchScript, which takes no fake tensors",
            hint="give the module it was made from",
        )
    if hasattr(module, "_orig_mod"):
        raise InputError(
            "the module is compiled by torch.compile, and this account is of eager runs",
            hint="give its ._orig_mod",
        )


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """PyTorch logs a traceback when a fake operation fails; the error that is raised says it all."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


def in_words(failed: BaseException, what: str, paths: dict[int, str], hint: str) -> InputError:
    """The failure of `what` ("the forward pass"): module and line; `hint` unless the failure has its own."""
    place = f"{what} failed{_module_place(failed, paths)} {failed_place(failed)}"
    if isinstance(failed, DynamicOutputShapeException | DataDependentOutputException):
        name = operation_name(failed.func)
        gives = "the shape of what" if isinstance(failed, DynamicOutputShapeException) else "the number that"
        return InputError(
            f"{place}: {gives} {name} gives depends on the data, and here there are none",
            hint="account the module with that part replaced: no shape and no branch may depend on values",
        )
    if isinstance(failed, UnsupportedOperatorException):
        name = operation_name(failed.func)
        return InputError(
            f"{place}: {name} does not say what shape it gives",
            hint=f"register it: @torch.library.register_fake({name.replace('.', '::', 1)!r})",
        )
    return InputError(f"{place}: {type(failed).__name__}: {failed}", hint=hint)


def failed_place(failed: BaseException) -> str:
    """The innermost line that is neither PyTorch's nor ours."""
    frames = traceback.extract_tb(failed.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    return f"at {outside[-1].filename}:{outside[-1].lineno}" if outside else "inside PyTorch"


def _module_place(failed: BaseException, paths: dict[int, str]) -> str:
    """The innermost module whose method was running."""
    found = ""
    for frame, _ in traceback.walk_tb(failed.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in paths:
            found = f" in {paths[id(owner)] or 'the module itself'} ({type(owner).__name__})"
    return found
