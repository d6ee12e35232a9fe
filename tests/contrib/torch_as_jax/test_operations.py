"""Layers and operations as JAX: each against PyTorch's own result and gradients."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.errors import InputError  # noqa: E402


class Calls(nn.Module):
    """A function of a trained array of some shape, weighed by fixed random numbers to one number."""

    def __init__(self, function, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x):
        made = self.function(self.w, x)
        weights = torch.arange(made.numel(), dtype=made.dtype).reshape(made.shape)
        return (made * torch.cos(weights)).sum()


NORMS = (0, 0.5, 1, 2, 3, math.inf, -math.inf)
CASES = {
    "clamp": (lambda w, x: (w + x).clamp(-0.5, 0.5), (4, 6), (4, 6)),
    "added and subtracted several times": (
        lambda w, x: (w * x).sub(w, alpha=2).add(x * w, alpha=3), (4, 6), (4, 6),
    ),
    "gelu, tanh": (lambda w, x: F.gelu(w * x, approximate="tanh"), (4, 6), (4, 6)),
    "activations": (lambda w, x: F.elu(w) + F.leaky_relu(x * w) + F.softplus(w) + F.hardswish(w), (9,), (9,)),
    "glu": (lambda w, x: F.glu(w * x, 1), (4, 6), (4, 6)),
    "in place": (lambda w, x: (w * 1).add_(x).mul_(2).masked_fill_(x > 0, 3.0), (4, 6), (4, 6)),
    "in place, in a view": (lambda w, x: _written(w, x), (4, 6), (4, 6)),
    "gather": (lambda w, x: w.gather(1, (x > 0).long()), (4, 6), (3, 2)),
    "scatter": (lambda w, x: torch.zeros(4, 6).scatter_add(1, (x > 0).long(), w), (3, 2), (3, 2)),
    "index": (lambda w, x: w[:, [2, 0], :][torch.arange(2), 1:], (3, 4, 5), (1,)),
    "index_put": (lambda w, x: _put(w, x), (4, 6), (2, 6)),
    "pad": (lambda w, x: F.pad(w * x, (1, 2, 0, -1)) [1:], (4, 6), (4, 6)),
    "pad, reflected": (lambda w, x: F.pad(w * x, (1, 2), mode="reflect"), (2, 4, 6), (2, 4, 6)),
    "sort and topk": (lambda w, x: (w * x).sort(1)[0].topk(2, 1)[0] , (4, 6), (4, 6)),
    "reductions": (
        lambda w, x: (w * x).max(1)[0] + w.std(1) + w.logsumexp(1) + w.norm(dim=1),
        (4, 6), (4, 6),
    ),
    "cumulative": (lambda w, x: (w * x).cumsum(0) + w.cumprod(1), (3, 4), (3, 4)),
    "einsum": (lambda w, x: torch.einsum("bij,bjk->bik", w, x), (2, 3, 4), (2, 4, 5)),
    "split": (lambda w, x: torch.cat([*w.split([1, 3], 1), *(x * w).chunk(3, 1)][::-1], 1), (2, 4), (2, 4)),
    "split, by rows": (lambda w, x: torch.cat((w * x).split([1, 2, 1])[::-1]), (4, 6), (4, 6)),
    "meshgrid of a number": (lambda w, x: torch.stack(torch.meshgrid(w, x, indexing="ij")), (4,), ()),
    "convolution": (
        lambda w, x: F.conv2d(x, w, stride=2, padding=1, dilation=2, groups=2),
        (4, 3, 3, 3), (2, 6, 9, 9),
    ),
    "convolution, same": (lambda w, x: F.conv1d(x, w, padding="same"), (4, 3, 4), (2, 3, 9)),
    "transposed convolution": (
        lambda w, x: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1, groups=2),
        (4, 3, 3, 3), (2, 4, 5, 5),
    ),
    "pools": (
        lambda w, x: F.max_pool2d(w * x, 3, 2, 1, ceil_mode=True).sum() + F.avg_pool2d(w * x, 3, 2, 1),
        (2, 3, 8, 8), (2, 3, 8, 8),
    ),
    "average pool without its padding": (
        lambda w, x: F.avg_pool2d(w * x, 3, 2, 1, count_include_pad=False), (2, 3, 8, 8), (2, 3, 8, 8)
    ),
    "maximum pool, dilated": (
        lambda w, x: F.max_pool2d(w * x, (3, 2), 2, 1, dilation=(1, 3)), (2, 3, 7, 9), (2, 3, 7, 9)
    ),
    "of a number": (lambda w, x: (w * x).min(0)[0] + w.sum(0) + w.argmax(0) + w.amax(0), (), ()),
    "adaptive pool": (lambda w, x: F.adaptive_avg_pool2d(w * x, (3, 2)), (2, 3, 7, 4), (2, 3, 7, 4)),
    "interpolation": (
        lambda w, x: F.interpolate(w * x, scale_factor=2, mode="bilinear"),
        (1, 2, 4, 4), (1, 2, 4, 4),
    ),
    "rotations by complex numbers": (lambda w, x: _turned(w * x), (2, 5, 3, 4), (2, 5, 3, 4)),
    "an angle and a length": (
        lambda w, x: torch.view_as_real(torch.polar(w.exp(), x) * torch.complex(x, w).conj()),
        (4, 3), (4, 3),
    ),
    "group norm": (lambda w, x: F.group_norm(x * w, 2), (2, 4, 3, 3), (2, 4, 3, 3)),
    "rms norm": (lambda w, x: F.rms_norm(x * w, (6,)), (4, 6), (4, 6)),
    "embedding with padding": (lambda w, x: F.embedding((x > 0).long(), w, padding_idx=0), (4, 6), (3, 2)),
    "cross entropy, smoothed, classes second": (
        lambda w, x: F.cross_entropy(w, (x > 0).long(), label_smoothing=0.1), (2, 5, 3), (2, 3)
    ),
    "cross entropy, ignored": (
        lambda w, x: F.cross_entropy(w, (x > 0).long(), ignore_index=1, reduction="sum"), (6, 5), (6,)
    ),
    "cross entropy, weighed": (
        lambda w, x: F.cross_entropy(w, (x > 0).long(), weight=torch.tensor([1.0, 3.0, 1.0])), (6, 3), (6,)
    ),
    "cross entropy of shares": (lambda w, x: F.cross_entropy(w, x.softmax(1)), (6, 5), (6, 5)),
    "losses": (
        lambda w, x: F.mse_loss(w, x) + F.l1_loss(w, x) + F.smooth_l1_loss(w, x)
        + F.binary_cross_entropy_with_logits(w, x.sigmoid()), (4, 6), (4, 6)
    ),
    "attention, causal": (
        lambda w, x: F.scaled_dot_product_attention(w, x, w, is_causal=True),
        (2, 3, 5, 4), (2, 3, 5, 4),
    ),
    "attention, fewer queries than keys": (
        lambda w, x: F.scaled_dot_product_attention(w[:, :, :3], x, w, is_causal=True),
        (2, 3, 5, 4), (2, 3, 5, 4),
    ),
    "attention, grouped": (
        lambda w, x: F.scaled_dot_product_attention(x, w, w, enable_gqa=True, scale=0.3),
        (2, 2, 5, 4), (2, 4, 5, 4),
    ),
    "attention, mask of numbers": (
        lambda w, x: F.scaled_dot_product_attention(x, x * w, x, attn_mask=w @ x.mT),
        (2, 2, 5, 4), (2, 2, 5, 4),
    ),
    "attention without heads": (lambda w, x: F.scaled_dot_product_attention(w, x, x), (2, 5, 4), (2, 5, 4)),
    "norms": (
        lambda w, x: torch.stack([torch.linalg.vector_norm(w * x, p, 1) for p in NORMS]), (4, 6), (4, 6)
    ),
    "no gradient": (lambda w, x: w * w.detach() + w * _constant(w, x), (4, 6), (4, 6)),
    "checkpointed": (
        lambda w, x: checkpoint(lambda y: (y * w).tanh(), x, use_reentrant=False),
        (4, 6), (4, 6),
    ),
    "checkpointed, reentrant": (
        lambda w, x: checkpoint(lambda y: (y * w).tanh(), x * w, use_reentrant=True), (4, 6), (4, 6)
    ),
}  # fmt: skip


def _turned(x):
    """Rotate pairs of a head's numbers, as Meta's Llama does."""
    angles = torch.outer(torch.arange(5.0), 1 / 10_000 ** torch.tensor([0.0, 0.5]))
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(2, 5, 3, 2, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3)


def _written(w, x):
    made = w * 1
    made[1:3, ::2] = x[1:3, ::2] * w[0, 0]
    made[0].mul_(2)
    return made


def _put(w, x):
    made = w * 1
    made[torch.tensor([2, 0])] = x * w[1]
    made.index_put_((torch.tensor([3, 3]),), x, accumulate=True)
    return made


@torch.no_grad()
def _constant(w, x):
    return (w * x).exp()


@pytest.mark.parametrize("case", CASES)
def test_an_operation_has_the_result_and_gradient_of_pytorch(case: str, compared):
    torch.manual_seed(0)
    function, shape, of_input = CASES[case]
    of_loss, of_gradients = compared(Calls(function, *shape), torch.randn(of_input))
    assert of_loss < 2e-5
    assert of_gradients < 1e-5


# Where a function has no slope, or two, PyTorch chooses one.
KINKS = {
    "norms of zeros": lambda w: torch.stack([torch.linalg.vector_norm(w.view(3, 3), p, 1) for p in NORMS]),
    "a norm in a quotient": lambda w: F.normalize(w.view(3, 3), eps=1.0),
    "a deviation of equals": lambda w: w[3:6].std() + w.std(),
    "absolute values": lambda w: w.abs() + F.l1_loss(w, torch.zeros(9)) + F.smooth_l1_loss(w, w.detach()),
    "limits": lambda w: F.hardtanh(w) + w.clamp(-1, 1) + F.relu6(3 * w) + F.hardswish(w) + F.hardsigmoid(w),
    "slopes": lambda w: F.leaky_relu(w) + F.elu(w) + F.celu(w, 2.0) + F.selu(w) + F.relu(w),
    "softplus on its threshold": lambda w: F.softplus(w, threshold=2),
    "equals": lambda w: torch.fmax(w, w.flip(0)) + torch.fmin(w, w.flip(0) * 1) + torch.maximum(w, w * 1),
    "an angle of nothing": lambda w: w + torch.atan2(0 * w.abs(), w.relu()),
}


@pytest.mark.parametrize("case", KINKS)
def test_a_gradient_at_a_kink_is_that_of_pytorch(case: str, compared):
    module = Calls(lambda w, x: KINKS[case](w * x), 9)
    with torch.no_grad():
        module.w.copy_(torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0]))
    of_loss, of_gradients = compared(module, torch.ones(9))
    assert of_loss < 1e-6
    assert of_gradients < 1e-6


def test_batch_norm_in_training_updates_its_running_means_as_pytorch_does(compared):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1))
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    with jax.enable_x64(True):
        of_loss, of_gradients = compared(module.double(), images, loss=lambda y: y.square().mean())
    assert of_loss < 1e-12
    assert of_gradients < 1e-12


def test_batch_norm_in_evaluation_uses_its_running_means(compared):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
    module[1].running_mean += 1
    assert max(compared(module, torch.randn(5, 6), loss=lambda y: y.square().mean())) < 1e-5


class Tied(nn.Module):
    """A table at both ends, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.head.weight = self.table.weight

    def forward(self, x):
        return F.cross_entropy(self.head(self.table(x)), x)


def test_a_tied_parameter_is_there_once_and_its_gradient_is_the_sum(compared):
    module = Tied()
    found = mw.module_as_jax(module, torch.zeros(6, dtype=torch.long))
    assert list(found.parameters) == ["table.weight", "head.bias"]
    assert max(compared(module, torch.arange(6))) < 1e-5


def test_dropout_keeps_the_share_and_the_sum_that_it_should():
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.25))
    found = mw.module_as_jax(
        module, torch.ones(10_000, 1), loss=lambda y: (y > 0).float().sum() + 0 * y.sum()
    )
    one = {"0.weight": jnp.ones((1, 1))}
    ones = {"args[0]": jnp.ones((10_000, 1))}
    assert found.is_random
    first, again, other = (float(found.loss(one, {}, ones, jax.random.key(k))[0]) for k in (0, 0, 1))
    assert first == again != other
    assert abs(first - 7500) < 5 * math.sqrt(10_000 * 0.25 * 0.75)  # five standard deviations
    mean = mw.module_as_jax(module, torch.ones(10_000, 1), loss=lambda y: y.mean())
    assert float(mean.loss(one, {}, ones, jax.random.key(0))[0]) == pytest.approx(1, abs=0.03)


def test_dropout_of_attention_draws_from_the_key():
    module = Calls(
        lambda w, x: F.scaled_dot_product_attention(w, x, torch.ones_like(x), dropout_p=0.5), 1, 1, 64, 4
    )
    found = mw.module_as_jax(module, torch.randn(1, 1, 64, 4), loss=lambda y: y)
    parameters, buffers = found.arrays_of(module)
    batch = {"args[0]": jnp.ones((1, 1, 64, 4))}
    values = [float(found.loss(parameters, buffers, batch, jax.random.key(k))[0]) for k in (0, 0, 1)]
    assert values[0] == values[1] != values[2]


def test_dropout_without_a_key_says_what_to_give():
    found = mw.module_as_jax(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.ones(2, 4))
    parameters = {name: jnp.ones(told.shape) for name, told in found.parameters.items()}
    with pytest.raises(InputError, match=r"aten.native_dropout in 1 draws random numbers") as error:
        found.loss(parameters, {}, {"args[0]": jnp.ones((2, 4))})
    assert "jax.random.key" in error.value.hint


def test_a_module_in_evaluation_mode_draws_nothing(compared):
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    assert not mw.module_as_jax(module, torch.ones(2, 4)).is_random
    assert max(compared(module, torch.randn(2, 4), loss=lambda y: y.square().sum())) < 1e-5


def test_a_checkpointed_block_runs_again_in_the_backward_pass():
    class Block(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.inner, self.again = (
                nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()),
                again,
            )

        def forward(self, x):
            made = checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
            return made.square().sum()

    def products(again: bool) -> int:
        found = mw.module_as_jax(Block(again), torch.ones(2, 4))
        shapes = found.parameters, found.buffers, found.inputs
        return str(jax.make_jaxpr(jax.grad(found.loss, has_aux=True))(*shapes)).count("dot_general")

    # Forward 2; backward 2 for the matrices, 1 for the inner input.
    assert products(False) == 5
    assert products(True) > products(False)


def test_parameters_are_used_in_the_format_that_is_asked_for():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    found = mw.module_as_jax(module, torch.ones(2, 4), compute=torch.bfloat16)
    assert {told.dtype for told in found.parameters.values()} == {jnp.dtype("bfloat16")}
    assert found.inputs["args[0]"].dtype == jnp.bfloat16
    parameters, buffers = found.arrays_of(module)
    value, _ = found.loss(parameters, buffers, {"args[0]": jnp.ones((2, 4), jnp.bfloat16)})
    with torch.no_grad():
        told = module.to(torch.bfloat16)(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum()
    assert float(value) == pytest.approx(float(told), abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_arrays_do_not_change_with_the_module(dtype):
    """Of many sizes: whether memory may be lent depends on where it begins."""
    module = nn.ModuleList(nn.Linear(2**power, 8, dtype=dtype) for power in range(10))
    found = mw.module_as_jax(nn.Sequential(nn.Linear(4, 4, dtype=dtype)), torch.ones(2, 4, dtype=dtype))
    for each in module:
        held = found.arrays_of(nn.Sequential(each))[0]
        before = {name: np.array(x) for name, x in held.items()}
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.add_(1)
        for name, x in held.items():
            np.testing.assert_array_equal(x, before[name])


def test_a_module_of_any_size_takes_no_memory():
    with torch.device("meta"):
        module = nn.Linear(1 << 20, 1 << 20)  # 4 TiB
        x = torch.zeros(8, 1 << 20)
    found = mw.module_as_jax(module, x, loss=lambda y: y.mean())
    assert found.parameters["weight"].shape == (1 << 20, 1 << 20)


def test_constants_of_the_module_keep_their_values(compared):
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]), persistent=False)

        def forward(self, x):
            return (self.layer(x) * self.scale * torch.tensor([0.5, 0.25, 4.0])).square().sum()

    assert max(compared(Scales(), torch.randn(2, 3))) < 1e-5


def test_users_strict_promotion_does_not_reach_into_the_module():
    module = nn.Linear(3, 3)
    found = mw.module_as_jax(module, torch.ones(2, 3), loss=lambda y: (y * y.long()).sum())
    parameters, buffers = found.arrays_of(module)
    with jax.numpy_dtype_promotion("strict"):
        value, _ = found.loss(parameters, buffers, {"args[0]": jnp.ones((2, 3))})
    assert np.isfinite(float(value))
