from __future__ import annotations

import pytest

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from meshwright.errors import InputError  # noqa: E402
from tests.contrib.torch_eager import steps  # noqa: E402
from tests.contrib.torch_eager.steps import counted  # noqa: E402

BATCH, HEADS, WIDTH = 2, 4, 8


class Attention(nn.Module):
    def __init__(self, **keywords):
        super().__init__()
        self.keywords = keywords

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, **self.keywords)


def tensors(queries: int, keys: int, *, heads: int = HEADS, width: int = WIDTH):
    shapes = ((BATCH, HEADS, queries, width), (BATCH, heads, keys, width), (BATCH, heads, keys, width))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (6, 3), (3, 6), (1, 1), (1, 9), (9, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_costs_two_products_forward_and_five_backward(
    queries, keys, causal, counted_by_torch
):
    module, inputs = Attention(is_causal=causal), tensors(queries, keys)
    mask = torch.ones(queries, keys).tril()  # as PyTorch documents is_causal
    pairs = int(mask.sum()) if causal else queries * keys
    product = 2 * BATCH * HEADS * pairs * WIDTH
    flops = counted(module, *inputs)
    assert (flops.forward, flops.backward, flops.recomputed) == (2 * product, 5 * product, product)
    assert flops.model == 6 * product
    assert counted_by_torch(module, *inputs) == (0, 0)  # which knows no attention on a CPU


def test_a_mask_that_is_a_tensor_counts_whole():
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    assert counted(Attention(attn_mask=mask), *tensors(6, 6)).forward == 4 * BATCH * HEADS * 36 * WIDTH


def test_every_query_head_counts_where_they_share_key_heads():
    account = counted(Attention(enable_gqa=True), *tensors(6, 6, heads=2))
    assert account.forward == 4 * BATCH * HEADS * 36 * WIDTH


def test_attention_in_parts_counts_what_pytorchs_own_counter_says(counted_by_torch):
    class Parts(nn.Module):
        def forward(self, query, key, value):
            return (query @ key.transpose(-1, -2)).softmax(-1) @ value

    inputs = tensors(6, 5)
    flops = counted(Parts(), *inputs)
    assert (flops.forward, flops.backward) == counted_by_torch(Parts(), *inputs)
    assert flops.recomputed == 0  # the scores were kept


class Direct(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def forward(self, *inputs):
        return self.operation(*inputs)


def kernel_flops(name: str, *arguments):
    from torch.utils.flop_counter import FlopCounterMode

    operation = getattr(torch.ops.aten, name)
    account = counted(Direct(operation), *arguments, loss=lambda _: torch.zeros(()))
    with FlopCounterMode(display=False) as theirs:
        operation(*arguments)
    return account, theirs.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_gpus_count_causal_attention_once_where_pytorchs_counter_doubles_it(causal):
    query, key, value = (
        torch.empty(BATCH, HEADS, 64, WIDTH, dtype=torch.bfloat16, device="meta") for _ in range(3)
    )
    pairs = 64 * 65 // 2 if causal else 64 * 64
    by_hand = 4 * BATCH * HEADS * pairs * WIDTH
    for name, arguments in (
        ("_scaled_dot_product_flash_attention", (0.0, causal)),
        ("_scaled_dot_product_efficient_attention", (None, True, 0.0, causal)),
        ("_scaled_dot_product_cudnn_attention", (None, True, 0.0, causal)),
    ):
        account, theirs = kernel_flops(name, query, key, value, *arguments)
        assert account.forward == by_hand, name
        assert account.by_format == {"bf16": by_hand}
        assert theirs == 4 * BATCH * HEADS * 64 * 64 * WIDTH  # whole, causal or not


def test_the_kernels_below_have_the_sequence_before_the_heads():
    query = torch.empty(BATCH, 64, HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    arguments = (query, query, query, None, None, 64, 64, 0.0, True, False)
    account, _ = kernel_flops("_flash_attention_forward", *arguments)
    assert account.forward == 4 * BATCH * HEADS * (64 * 65 // 2) * WIDTH
    arguments = (query, query, query, None, None, None, 64, 64, 0.0, 1, True)
    account, _ = kernel_flops("_efficient_attention_forward", *arguments)
    assert account.forward == 4 * BATCH * HEADS * (64 * 65 // 2) * WIDTH


def test_packed_sequences_are_unknown_for_their_lengths_are_data():
    query = torch.empty(128, HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    account, _ = kernel_flops(
        "_flash_attention_forward", query, query, query, ends, ends, 64, 64, 0.0, True, False
    )
    assert account.forward == 0
    assert [key.split("(")[0] for key in account.unknown] == ["aten._flash_attention_forward"]


def test_a_mask_from_the_bottom_right_is_unknown():
    query = torch.empty(BATCH, 64, HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    arguments = (query, query, query, None, None, None, 64, 64, 0.0, 2, True)
    account, _ = kernel_flops("_efficient_attention_forward", *arguments)
    assert (account.forward, len(account.unknown)) == (0, 1)


class Flex(nn.Module):
    def __init__(self, mask=None, compiled=False):
        super().__init__()
        self.project, self.mask, self.compiled = (
            nn.Linear(64, 64 + 2 * 32, dtype=torch.bfloat16),
            mask,
            compiled,
        )

    def forward(self, x):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        parts = self.project(x).split([64, 32, 32], -1)
        query, key, value = (part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in parts)
        length = x.shape[1]
        block_mask = self.mask and create_block_mask(self.mask, None, None, length, length, device=x.device)
        attend = torch.compile(flex_attention) if self.compiled else flex_attention
        return attend(query, key, value, block_mask=block_mask, enable_gqa=True)


def weighed(module, rows=2):
    x = torch.zeros(rows, 256, 64, dtype=torch.bfloat16)
    return steps.weighed(module, x, loss=lambda y: y.float().mean())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (None, 256 * 256),
        (lambda b, h, q, k: q >= k, 256 * 257 // 2),
        (lambda b, h, q, k: (q >= k) & (q - k < 16), 16 * 17 // 2 + 240 * 16),
        (lambda b, h, q, k: (h < 2) & (q >= k), 256 * 257 // 4),  # a mean over four heads
    ],
    ids=["whole", "causal", "window", "heads"],
)
def test_flex_attention_keeps_no_scores_and_counts_the_pairs_of_its_mask(mask, pairs, compiled):
    (rank,) = weighed(Flex(mask, compiled)).account.ranks
    projection, product = 2 * 2 * 256 * 64 * 128, 2 * 2 * 4 * pairs * 16
    flops = rank.flops_by_phase
    assert flops["forward"] == projection + 2 * product
    assert flops["backward"] + flops["recomputed"] == projection + 5 * product
    assert flops["recomputed"] == product
    projected, out, rows = 2 * 256 * 128 * 2, 2 * 256 * 64 * 2, 2 * 4 * 256 * 4
    assert rank.saved_activation_bytes == projected + out + rows


def test_a_mask_of_flex_attention_that_depends_on_data_counts_whole_and_says_so():
    documents = torch.zeros(256, dtype=torch.long, device="meta")
    whole = weighed(Flex(lambda b, h, q, k: documents[q] == documents[k]), rows=2**14)
    assert whole.account.ranks[0].flops_by_phase == weighed(Flex(), 2**14).account.ranks[0].flops_by_phase
    assert any("flex attention that depends on data" in words for words in whole.ledger.assumptions)
    step = whole.prediction.step_seconds
    assert step.low is None
    assert whole.prediction.interval_reasons[0].startswith("flex attention's mask depends on data")
    assert "at least" not in str(whole)


@pytest.mark.parametrize("by_module", [False, True])
def test_a_learned_bias_in_flex_attention_is_refused(by_module):
    from torch.nn.attention.flex_attention import flex_attention

    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            bias = self.bias
            score_mod = {
                False: lambda score, b, h, q, k: score + bias[h],
                True: lambda score, b, h, q, k: score + self.bias[h],
            }[by_module]
            return flex_attention(x, x, x, score_mod=score_mod)

    with pytest.raises(InputError, match="score_mod uses a tensor that requires a gradient") as raised:
        steps.weighed(Biased(), torch.zeros(1, 4, 32, 16))
    assert raised.value.hint.startswith("detach that tensor")


def test_flex_attention_of_one_cpu_is_told_to_name_gpus():
    with pytest.raises(InputError, match="flex attention has no gradients on a CPU") as raised:
        counted(Flex(), torch.zeros(2, 256, 64, dtype=torch.bfloat16))
    assert "on='1xH100'" in raised.value.hint
