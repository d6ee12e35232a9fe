"""`account_torch`: one step of a module on fake tensors, and what it would cost. No torch at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError

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
    """FLOPs and memory of one training step of `module` on one device, run eagerly. Nothing is computed.

    Args:
        module: real, or on the meta device, or with fake tensors; it is not changed.
        inputs: what its `forward` takes; tensors may be real, meta or fake.
        optimizer: a class of `torch.optim`, or any function from a list of parameters to an optimizer.
        loss: from the module's output to a scalar tensor; without it the output if that is a scalar, else its
            `loss`, else the sum of its tensors.
        autocast: the format for `torch.autocast` around forward pass and loss.
        keyword_inputs: further inputs by name.

    Raises:
        InputError: PyTorch is not installed, the module cannot run on fake tensors, or fails on its inputs.
    """
    require_torch()
    from ._step import Step, account_step

    return account_step(Step(module, inputs, keyword_inputs, optimizer, loss, autocast))


def require_torch() -> None:
    """See that PyTorch can be imported.

    Raises:
        InputError: it is not installed.
    """
    try:
        import torch  # noqa: F401
    except ImportError as missing:
        raise InputError("PyTorch is not installed", hint="pip install 'meshwright[torch]'") from missing
