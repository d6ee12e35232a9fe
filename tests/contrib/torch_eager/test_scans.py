from __future__ import annotations

import pytest

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
jamba = pytest.importorskip(
    "transformers.models.jamba.modeling_jamba", reason="transformers is not installed"
)

from torch import nn  # noqa: E402

from tests.contrib.torch_eager import steps  # noqa: E402

ROWS, LENGTH, WIDTH, STATES = 2, 4096, 32, 16  # of two of the kernel's chunks of 2,048 positions
HALF, SINGLE = 2, 4  # bytes


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 3 * WIDTH + 2 * STATES, dtype=torch.bfloat16)
        self.a, self.d = nn.Parameter(-torch.ones(WIDTH, STATES)), nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        parts = self.project(x).split([WIDTH, WIDTH, WIDTH, STATES, STATES], -1)
        u, delta, z, b, c = (part.transpose(1, 2) for part in parts)
        return jamba.mamba_selective_scan(
            u, delta, self.a, b, c, D=self.d, z=z, delta_bias=self.bias, delta_softplus=True
        )


def test_a_scan_of_mamba_is_one_kernel_that_keeps_what_mamba_ssm_keeps():
    x = torch.zeros(ROWS, LENGTH, 64, dtype=torch.bfloat16)
    weighing = steps.weighed(Scan(), x, loss=lambda y: y.float().mean())
    (rank,) = weighing.account.ranks
    inputs = ROWS * LENGTH * (3 * WIDTH + 2 * STATES) * HALF  # copied: the kernel reads along positions
    before_gate, states = ROWS * LENGTH * WIDTH * HALF, ROWS * WIDTH * 2 * (2 * STATES) * SINGLE
    assert rank.saved_activation_bytes == inputs + before_gate + states
    assert rank.flops_by_phase["forward"] == 2 * ROWS * LENGTH * 64 * (3 * WIDTH + 2 * STATES)
    assert any("kernel of mamba-ssm" in words for words in weighing.ledger.assumptions)
    assert weighing.prediction.step_seconds.high is None  # no rate of the kernel is known
    assert not weighing.ledger.unpriced


def test_on_a_cpu_positions_are_computed_one_after_another():
    x = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    weighing = steps.weighed(Scan(), x, on="1xCPU", loss=lambda y: y.float().mean())
    assert not any("mamba-ssm" in words for words in weighing.ledger.assumptions)
    assert weighing.account.ranks[0].flops_by_phase["forward"] > 2 * 4 * 64 * (3 * WIDTH + 2 * STATES)
