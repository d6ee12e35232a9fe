"""What cannot become a JAX program is refused in words, before anything is compiled."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.errors import InputError  # noqa: E402


class Inner(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def test_operations_without_a_rule_are_named_all_with_their_modules():
    first = Inner(lambda y: torch.linalg.qr(y)[0] + torch.fft.fft(y).real)
    module = nn.Sequential(first, Inner(lambda y: torch.linalg.qr(y)[0].sum()))
    with pytest.raises(InputError, match=r"no rule in JAX") as error:
        mw.module_as_jax(module, torch.ones(4, 4))
    text = str(error.value)
    assert "aten.linalg_qr in 0" in text
    assert "aten.linalg_qr in 1" in text
    assert "fft" in text
    assert "without as_jax()" in error.value.hint


def test_a_part_of_an_operation_without_a_rule_is_named():
    module = Inner(lambda y: nn.functional.avg_pool1d(y, 3, 2, ceil_mode=True).sum())
    found = mw.module_as_jax(module, torch.ones(4, 4))
    with pytest.raises(
        InputError, match=r"aten.avg_pool\dd in the module itself: an average pool whose size"
    ):
        found.loss(*(_zeros(each) for each in (found.parameters, found.buffers, found.inputs)))


def _zeros(shapes):
    import jax.numpy as jnp

    return {name: jnp.zeros(each.shape, each.dtype) for name, each in shapes.items()}


class Doubled(torch.autograd.Function):
    """Has a gradient that is not that of its forward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def _in_autocast(y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (y @ y).sum()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda y: y, None),
        (lambda y: Doubled.apply(y).sum(), "Doubled is a torch.autograd.Function"),
        (_in_autocast, "enters torch.autocast"),
        (lambda y: y.sum() if y.sum() > 0 else y.mean(), "depends on values"),
        (lambda y: y[y > 0].sum(), "depends? on"),
        (lambda y: y.detach().sum(), "depends on no trained parameter"),
        (lambda y: y.diagonal_scatter(y[0]).sum(), "PyTorch fails to decompose an operation"),
    ],
    ids=[
        *("a sum stands for a loss", "a backward pass", "autocast", "branch", "shape", "no gradient"),
        "decomposition",
    ],
)
def test_what_an_export_would_drop_or_cannot_hold_is_refused(function, words):
    if words is None:
        assert "the sum of the output" in mw.module_as_jax(Inner(function), torch.ones(4, 4)).program.notes[0]
        return
    with pytest.raises(InputError, match=words):
        mw.module_as_jax(Inner(function), torch.ones(4, 4))


def test_a_loss_that_is_no_number_is_refused():
    with pytest.raises(InputError, match=r"the loss is a tensor of shape \[4, 4\]"):
        mw.module_as_jax(nn.Linear(4, 4), torch.ones(4, 4), loss=lambda y: y * 2)


def test_a_missing_input_is_named():
    found = mw.module_as_jax(nn.Linear(4, 4), torch.ones(4, 4))
    with pytest.raises(InputError, match=r"parameters lack weight, bias"):
        found.loss({}, {}, {})


def test_a_checkpoint_with_a_policy_is_refused():
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    def function(y):
        return checkpoint(torch.tanh, y, use_reentrant=False, context_fn=contexts).sum()

    with pytest.raises(InputError, match="checkpoint with a policy"):
        mw.module_as_jax(Inner(function), torch.ones(4, 4))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layout": "tensor=8"}, "split over fsdp and data; the layout has tensor=8"),
        ({"optimizer": torch.optim.Rprop}, "optimizer Rprop has no counterpart"),
        ({"optimizer": torch.optim.Muon}, "optimizer Muon has no counterpart"),
        (
            {"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)},
            "optimizer Adam with amsgrad has no counterpart",
        ),
        ({"optimizer": lambda p: list(p)}, "makes a list, not an optimizer"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=-1)}, "Invalid learning rate: -1"),
        ({"optimizer": type("AdamW", (torch.optim.SGD,), {})}, "AdamW has no counterpart"),
        ({"parallelize": lambda m, mesh: m}, "takes no parallelize"),
        ({"autocast": torch.int8}, "is not a floating-point format"),
        ({"overrides": {"a": "1"}}, "takes no overrides"),
    ],
    ids=[
        *("axis", "optimizer", "for matrices", "option", "no optimizer", "failing", "another AdamW"),
        *("parallelize", "format", "overrides"),
    ],
)
def test_what_has_no_meaning_for_a_jax_program_is_refused(given, words):
    settings = {name: given[name] for name in ("layout", "overrides") if name in given}
    parts = {name: part for name, part in given.items() if name not in settings}
    step = mw.torch_step(nn.Linear(4, 4), torch.ones(4, 4), **parts)
    with pytest.raises(InputError, match=words):
        mw.weigh(step.as_jax(), on="8xCPU", **settings)
