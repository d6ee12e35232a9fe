"""On GPUs that are not there, a module keeps what their kernels keep."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from tests.contrib.torch_eager.steps import weighed  # noqa: E402

BATCH, HEADS, LENGTH, WIDTH = 2, 8, 256, 64


class Attends(nn.Module):
    """Attention alone, of three arrays that want gradients."""

    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, query, key, value, mask=None):
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.how)


def arrays(dtype, key_heads=HEADS):
    shapes = [(BATCH, heads, LENGTH, WIDTH) for heads in (HEADS, key_heads, key_heads)]
    return [torch.zeros(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]


def products_of(weighing):
    return weighing.account.ranks[0].flops_by_phase["forward"]


WHOLE = 2 * 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
HALF = 2 * 2 * BATCH * HEADS * WIDTH * (LENGTH * (LENGTH + 1) // 2)
SEEN = BATCH * HEADS * LENGTH * WIDTH * 2  # in a 16-bit format
ROWS = BATCH * HEADS * LENGTH * 4  # a number of fp32 for each row


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention_keeps_its_result_and_a_number_for_each_row(dropout, key_heads):
    module = Attends(dropout_p=dropout, is_causal=True, enable_gqa=key_heads != HEADS)
    weighing = weighed(module, *arrays(torch.bfloat16, key_heads))
    assert products_of(weighing) == HALF
    assert weighing.account.ranks[0].saved_activation_bytes - SEEN - ROWS in range(0, 33)  # and a seed
    on_cpu = weighed(module, *arrays(torch.bfloat16, key_heads), on="1xCPU")
    if dropout:  # the CPU writes all pairs
        assert on_cpu.account.ranks[0].saved_activation_bytes > BATCH * HEADS * LENGTH * LENGTH * 2


def test_a_mask_makes_it_whole_and_keeps_no_pairs_but_the_masks():
    mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="meta")
    weighing = weighed(Attends(), *arrays(torch.bfloat16), mask)
    assert products_of(weighing) == WHOLE
    as_numbers = LENGTH * LENGTH * 2
    saved = weighing.account.ranks[0].saved_activation_bytes
    assert saved - SEEN - ROWS - as_numbers in range(0, 33)


def test_fp32_takes_memory_efficient_attention_and_old_gpus_have_no_flash():
    for dtype, on in ((torch.float32, "1xH100"), (torch.float16, "1xT4")):
        weighing = weighed(Attends(is_causal=True), *arrays(dtype), on=on)
        assert products_of(weighing) == HALF
        seen = BATCH * HEADS * LENGTH * WIDTH * (4 if dtype == torch.float32 else 2)
        assert weighing.account.ranks[0].saved_activation_bytes - seen - ROWS in range(0, 33)


def test_heads_of_odd_width_in_fp32_take_products():
    inputs = [torch.zeros(2, 4, 32, 9, requires_grad=True) for _ in range(3)]
    weighing = weighed(Attends(), *inputs)
    assert weighing.account.ranks[0].saved_activation_bytes > 2 * 4 * 32 * 32 * 4  # all pairs
    assert products_of(weighing) == 2 * 2 * 2 * 4 * 32 * 32 * 9


def test_dropout_keeps_a_byte_for_each_element():
    x = torch.zeros(64, 128, dtype=torch.bfloat16, requires_grad=True)
    assert weighed(nn.Dropout(0.1), x).account.ranks[0].saved_activation_bytes == 64 * 128
    assert weighed(nn.Dropout(0.1), x, on="1xCPU").account.ranks[0].saved_activation_bytes == 64 * 128 * 2
    assert weighed(nn.Dropout(0.1).eval(), x).account.ranks[0].saved_activation_bytes == 0


def test_an_rms_norm_keeps_a_number_for_each_row_beside_its_input():
    x = torch.zeros(64, 128, dtype=torch.bfloat16, requires_grad=True)
    module = nn.RMSNorm(128, dtype=torch.bfloat16)
    assert weighed(module, x).account.ranks[0].saved_activation_bytes == 64 * 4
    assert weighed(module, x, on="1xCPU").account.ranks[0].saved_activation_bytes > 64 * 128 * 2


def test_optimizers_update_all_parameters_in_one_call_on_a_gpu():
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    matrix = 256 * 256 * 4

    def temporaries(on):
        x = torch.zeros(1, 256)
        weighing = weighed(module, x, on=on, optimizer=torch.optim.AdamW)
        return max(weighing.ledger.memory.timeline.by_category["optimizer_temporaries"])

    assert temporaries("1xCPU") <= 3 * matrix  # one matrix after the other
    assert 8 * matrix <= temporaries("1xH100") < 9 * matrix + 4096


def test_an_optimizer_may_be_capturable_by_cuda_graphs_on_a_gpu():
    layer, x = nn.Linear(64, 64), torch.zeros(4, 64)
    capturable = functools.partial(torch.optim.AdamW, capturable=True)
    found = weighed(layer, x, optimizer=capturable)
    plain = weighed(layer, x, optimizer=torch.optim.AdamW)
    assert found.account.ranks[0].optimizer_state_bytes == plain.account.ranks[0].optimizer_state_bytes


def test_the_kernels_of_bitsandbytes_optimizers_have_no_products_and_its_products_are_listed():
    library = torch.library.Library("bitsandbytes", "FRAGMENT")  # which need not be installed
    library.define("optimizer_update_test(Tensor(a!) p, Tensor g) -> ()")
    library.define("gemm_test(Tensor p) -> Tensor")
    library.impl("optimizer_update_test", lambda p, g: None, "Meta")
    library.impl("gemm_test", torch.clone, "Meta")

    class Optimizer(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                torch.ops.bitsandbytes.optimizer_update_test(parameter, parameter.grad)
                torch.ops.bitsandbytes.gemm_test(parameter)

    layer = nn.Linear(64, 64, bias=False)
    found = weighed(layer, torch.zeros(4, 64), optimizer=Optimizer)
    assert found.ledger.unpriced == ("bitsandbytes.gemm_test(fp32[64, 64]), 1 times",)
