from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from tests.contrib.torch_eager.steps import counted  # noqa: E402

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Through(nn.Module):
    """A linear layer of 8 x 8 on 4 rows, 512 FLOPs each pass but the input's gradient, then a function."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self.layer(x))


def through(function):
    return counted(Through(function), torch.randn(4, 8))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)),
        nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Dropout(0.1)),
        Through(lambda x: torch.einsum("ij,kj->ik", x, x)),
        Through(lambda x: torch.baddbmm(x, x[None].expand(3, 4, 8), x.T[None, :, :1].expand(3, 8, 8))),
    ],
)
def test_products_count_what_pytorchs_own_counter_says(module, counted_by_torch):
    x = torch.randn(4, 8)
    account = counted(module, x)
    assert account.both == counted_by_torch(module, x)
    assert not account.unknown


def test_a_residual_convolutional_net_counts_what_pytorchs_own_counter_says(counted_by_torch):
    class Residual(nn.Module):
        def __init__(self, inside, beside):
            super().__init__()
            self.inside, self.beside = inside, beside

        def forward(self, x):
            return torch.relu(self.inside(x) + self.beside(x))

    inside = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
    net = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=2, padding=3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        Residual(inside, nn.Conv2d(8, 16, 1, stride=2)), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    images = torch.randn(2, 3, 32, 32)
    assert counted(net, images).both == counted_by_torch(net, images)


def test_an_encoder_layer_with_attention_in_parts_counts_what_pytorchs_own_counter_says(counted_by_torch):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.1)
    x = torch.randn(2, 5, 16)
    assert counted(layer, x).both == counted_by_torch(layer, x)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_a_grouped_convolution_costs_its_share_in_the_backward_pass_too(dims, groups, counted_by_torch):
    module = CONVOLUTIONS[dims - 1](8, 16, 3, groups=groups)
    x = torch.randn(2, 8, *[9] * dims)
    by_hand = (
        2 * 2 * 16 * (8 // groups) * 3**dims * 7**dims
    )  # two, batch, outputs, inputs of a group, window, places
    assert counted(module, x).both == (by_hand, by_hand)  # the images ask for no gradient
    theirs = counted_by_torch(module, x)
    assert theirs[0] == by_hand
    assert theirs[1] == by_hand * groups  # which forgets the groups


@pytest.mark.parametrize("groups", [1, 4])
def test_a_transposed_convolution_costs_its_window_for_each_input_place(groups, counted_by_torch):
    for dims, kind in enumerate(TRANSPOSED, start=1):
        module, x = kind(8, 16, 3, groups=groups, stride=2), torch.randn(2, 8, *[5] * dims)
        by_hand = 2 * 2 * 8 * (16 // groups) * 3**dims * 5**dims
        assert counted(module, x).both == (by_hand, by_hand)
        assert counted_by_torch(module, x)[0] == by_hand


def test_products_with_padding_count_as_in_pytorchs_own_counter(counted_by_torch):
    module, x = nn.Conv1d(1, 1, 3, padding=1), torch.randn(1, 1, 5)
    assert counted(module, x).both == counted_by_torch(module, x) == (2 * 5 * 3, 2 * 5 * 3)


def test_a_multiply_add_of_complex_numbers_is_eight():
    account = through(lambda x: torch.view_as_real(torch.complex(x, x) @ torch.complex(x, x).T))
    assert account.forward == 512 + 8 * 4 * 4 * 8
    assert not account.unknown


@pytest.mark.parametrize("groups", [1, 3])
def test_the_same_convolution_in_jax_is_weighed_the_same(groups):
    import jax
    import jax.numpy as jnp

    from meshwright.worker import count_traced

    def loss(image, kernel):
        out = jax.lax.conv_general_dilated(
            image, kernel, (2, 2), ((1, 1), (2, 2)), rhs_dilation=(2, 1), feature_group_count=groups
        )
        return jnp.sum(out**2)

    arrays = jnp.zeros((2, 3, 9, 11)), jnp.zeros((6, 3 // groups, 3, 5))
    weighed = count_traced(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*arrays).jaxpr, "cuda").by_phase
    module = nn.Conv2d(3, 6, (3, 5), stride=2, padding=(1, 2), dilation=(2, 1), groups=groups)
    image = torch.randn(2, 3, 9, 11, requires_grad=True)
    account = counted(module, image, loss=lambda output: output.square().sum())
    assert account.both == (weighed["forward"], weighed["backward"])


def test_the_gradient_of_an_input_that_nobody_wants_costs_nothing():
    x = torch.randn(2, 8, 9)
    forward, backward = counted(nn.Conv1d(8, 16, 3), x).both
    wanted = counted(nn.Conv1d(8, 16, 3), x.requires_grad_()).both
    assert (forward, backward) == (10752, 10752)
    assert wanted == (10752, 21504)


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_cost_their_matrices_at_each_position(kind, gates):
    layer = kind(8, 16, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 5, 8, requires_grad=True)
    account = counted(layer, x, loss=lambda output: output[0].sum())
    first, second = gates * 16 * (8 + 16), gates * 16 * (32 + 16)
    positions = 3 * 5 * 2  # both directions
    assert account.forward == 2 * positions * (first + second)
    # Twice as much, but that the state before the first position is a constant, whose gradient nobody wants.
    starts = 2 * 3 * 2 * 2 * gates * 16 * 16
    assert account.backward == 2 * account.forward - starts
    assert not account.unknown


class Direct(nn.Module):
    """One operation, called as it is, so that those which a machine would not choose are seen too."""

    def __init__(self, operation, **keywords):
        super().__init__()
        self.operation, self.keywords = operation, keywords

    def forward(self, *inputs):
        return self.operation(*inputs, **self.keywords)


def flops_of(operation, *inputs, **keywords):
    account = counted(Direct(operation, **keywords), *inputs)
    assert not account.unknown
    assert len(account.by_operation) == 1
    return account.forward


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_products_of_vectors_and_sums_of_products():
    aten = torch.ops.aten
    assert flops_of(aten.mv, meta(3, 5), meta(5)) == 2 * 3 * 5
    assert flops_of(aten.addmv, meta(3), meta(3, 5), meta(5)) == 2 * 3 * 5
    assert flops_of(aten.dot, meta(7), meta(7)) == 2 * 7
    assert flops_of(aten.addr, meta(3, 5), meta(3), meta(5)) == 2 * 3 * 5
    assert flops_of(aten.addbmm, meta(3, 5), meta(2, 3, 4), meta(2, 4, 5)) == 2 * 2 * 3 * 4 * 5
    assert (
        flops_of(aten._int_mm, meta(32, 8, dtype=torch.int8), meta(8, 16, dtype=torch.int8))
        == 2 * 32 * 8 * 16
    )


def test_products_in_one_call_add_up():
    pairs = [meta(3, 5), meta(2, 4)], [meta(5, 7), meta(4, 6)]

    class Products(nn.Module):
        def forward(self, left, right):
            return torch.ops.aten._foreach_mm(left, right)

    assert counted(Products(), *pairs).forward == 2 * 3 * 5 * 7 + 2 * 2 * 4 * 6


def test_scaled_products_of_narrow_formats():
    narrow = torch.float8_e4m3fn
    left, right = meta(32, 64, dtype=narrow), meta(16, 64, dtype=narrow).t()
    module = Direct(torch.ops.aten._scaled_mm, out_dtype=torch.bfloat16)
    account = counted(module, left, right, meta(()), meta(()))
    assert account.forward == 2 * 32 * 64 * 16
    assert account.by_format == {"fp8-e4m3": 2 * 32 * 64 * 16}


def test_a_grouped_product_costs_each_row_one_matrix():
    half = torch.bfloat16
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    rows, matrices = meta(64, 32, dtype=half), meta(4, 32, 16, dtype=half)
    account = counted(Direct(torch.ops.aten._grouped_mm), rows, matrices, ends)
    assert account.forward == 2 * 64 * 32 * 16
    # Its gradient for the matrices: the groups divide what is summed over.
    account = counted(
        Direct(torch.ops.aten._grouped_mm), meta(32, 64, dtype=half), meta(64, 16, dtype=half), ends
    )
    assert account.forward == 2 * 64 * 32 * 16


def test_cudnns_recurrent_layers_cost_their_matrices_at_each_position():
    weights = [meta(64, 8), meta(64, 16), meta(64), meta(64)]  # an LSTM of 8 inputs and 16 hidden, four gates

    class Runs(nn.Module):
        def forward(self, x, state, *weights):
            mode = (2, 16, 0, 1, False, 0.0, True, False, [], None)  # LSTM, hidden, no projection, one layer
            return torch.ops.aten._cudnn_rnn(x, list(weights), 4, None, state, state, *mode)

    account = counted(Runs(), meta(5, 3, 8), meta(1, 3, 16), *weights)
    assert account.forward == 2 * 5 * 3 * (64 * 8 + 64 * 16)
    assert any("Memory that cuDNN keeps" in words for words in account.assumptions)


def test_pytorchs_fused_inference_kernels_cost_what_their_parts_do():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    in_parts = counted(layer, x)
    with torch.no_grad():
        fused = counted(layer, x)
        attention = counted(layer.self_attn, x, x, x)
    assert list(fused.by_operation) == ["aten._transformer_encoder_layer_fwd"]
    assert fused.forward == in_parts.forward
    assert list(attention.by_operation) == ["aten._native_multi_head_attention"]
    assert attention.forward == in_parts.modules["self_attn"].flops_by_phase["forward"]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.fft.rfft(x).abs(), "_fft_r2c"),
        (lambda x: torch.linalg.qr(x)[0], "linalg_qr"),
        (lambda x: torch.linalg.inv(x.T @ x), "linalg_inv_ex"),
        (lambda x: torch.cdist(x, x + 1), "_cdist_forward"),
    ],
)
def test_what_has_no_rule_is_listed_with_its_operands_and_never_zero_in_silence(function, name):
    unknown = through(function).unknown
    assert any(key.startswith(f"aten.{name}(") and "fp32[" in key for key in unknown), unknown


def test_functions_without_products_count_nothing_and_are_not_unknown():
    for function in (
        lambda x: x.softmax(-1).cumsum(0),
        lambda x: x.topk(2)[0] + x.sort()[0][:, :2],
        lambda x: F.gumbel_softmax(F.glu(x)),
        lambda x: torch.outer(x[0], x[1]),
        lambda x: F.interpolate(x[None], scale_factor=2),
        lambda x: x.std() + x.norm() + x.var(0).sum() + x.logsumexp(0).cumprod(0),
        lambda x: F.pad(x, (1, 1)).unfold(1, 3, 1),
        lambda x: torch.cat([x, x.flip(0).roll(1, 0)]),
        lambda x: x.gather(0, x.argsort(0)).tril().index_select(0, torch.tensor([0, 1])),
        lambda x: x.clone().scatter_add(0, torch.zeros(4, 8, dtype=torch.long), x),
        lambda x: F.huber_loss(x.log_softmax(-1), x) + F.group_norm(x, 2),
    ):
        account = through(function)
        assert account.both == (512, 512)
        assert not account.unknown


def overload(name: str):
    packet = getattr(torch.ops.aten, name)
    return getattr(packet, packet.overloads()[0])


def test_only_what_may_multiply_matrices_is_neither_silent_nor_ruled():
    from meshwright.contrib.torch_eager import kind_of

    names = (
        "add",
        "gelu",
        "relu_",
        "softplus",
        "where",
        "transpose_",
        "embedding",
        "native_layer_norm",
        "sum",
    )
    assert {kind_of(overload(name)) for name in names} == {"silent"}
    names = ("linalg_qr", "_fft_r2c", "_cdist_forward", "_trilinear", "_linalg_svd", "cholesky", "geqrf")
    assert {kind_of(overload(name)) for name in names} == {"unknown"}
