"""What fails while a module runs on fake tensors, in words. Imports torch: imported only by what accounts one."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils import _pytree as pytree

from meshwright.errors import InputError

from ._calls import operation_name, tensor_text

LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def checked(step: Any) -> None:
    """Refuse what is no module, no optimizer or no tensor."""
    if isinstance(step.module, type):
        raise InputError(
            f"{step.module.__name__} is a class, not a module", hint=f"make one: {step.module.__name__}(...)"
        )
    if not isinstance(step.module, torch.nn.Module):
        raise InputError(
            f"a {type(step.module).__name__} is no torch.nn.Module", hint="give a module, then its inputs"
        )


@contextlib.contextmanager
def run_by_user(stack: Any, watch: Any, inputs: Any) -> Iterator[None]:
    """Turn what the user's code raises into an `InputError`; a mistake of ours keeps its traceback."""
    try:
        yield
    except InputError:
        raise
    except Exception as failed:
        if watch.own_mistake is not None:
            raise
        raise _told(failed, stack, watch, inputs) from failed


def _told(failed: Exception, stack: Any, watch: Any, inputs: Any) -> InputError:
    place = _place(failed, stack)
    if isinstance(failed, DynamicOutputShapeException | DataDependentOutputException):
        return InputError(
            f"{place}: what {operation_name(failed.func)} gives depends on the data, and there are none",
            hint="account the module with that part replaced by one whose shapes are fixed",
        )
    shapes = ", ".join(tensor_text(t) for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor))
    return InputError(
        f"{place}: {type(failed).__name__}: {failed}", hint=f"the inputs were {shapes or 'none'}"
    )


def _place(failed: Exception, stack: Any) -> str:
    """The innermost module and the innermost line that is not PyTorch's own."""
    path, line = None, ""
    for frame, number in traceback.walk_tb(failed.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in stack.paths:
            path = stack.paths[id(owner)]
            kind = type(owner).__name__
        if not frame.f_code.co_filename.startswith((*LIBRARIES, "<")):
            line = f"{frame.f_code.co_filename}:{number}"
    where = "the step" if path is None else f"{path or 'the module'} ({kind})"
    return f"{where} failed at {line}" if line else f"{where} failed"
