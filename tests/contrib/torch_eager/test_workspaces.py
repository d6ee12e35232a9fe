"""On a GPU cuBLAS takes a workspace for the products of the forward pass, and one for the backward pass."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from tests.contrib.torch_eager.steps import weighed  # noqa: E402

MIB = 1024 * 1024
X = torch.zeros(16, 64)


def workspaces(module, *inputs, on="1xH100", **how):
    memory = weighed(module, *(inputs or (X,)), on=on, **how).ledger.memory
    assert "cuBLAS workspace" not in memory.allowance  # it would count twice
    assert sum(memory.by_category.values()) == memory.reserved_bytes
    return memory.by_category.get("workspaces", 0)


@pytest.mark.parametrize(
    ("on", "each"),
    [("1xH100", 32 * MIB), ("1xB200", 32 * MIB), ("1xA100", 8 * MIB + MIB // 8), ("1xCPU", 0)],
)
def test_each_pass_with_products_has_one_as_large_as_the_gpu_asks_for(on, each):
    assert workspaces(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), on=on) == 2 * each


def test_a_module_without_gradients_has_one():
    assert workspaces(nn.Linear(64, 64).requires_grad_(False)) == 32 * MIB


def test_a_module_without_products_has_none():
    assert workspaces(nn.LayerNorm(64)) == 0


def test_attention_kernels_take_none():
    class Attends(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    assert workspaces(Attends(), x) == 0


def test_products_of_the_optimizer_share_that_of_the_forward_pass():
    class Multiplies(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                torch.outer(parameter, parameter) @ parameter[:, None]

    assert workspaces(nn.LayerNorm(64), optimizer=Multiplies) == 32 * MIB
    assert workspaces(nn.Linear(64, 64, bias=False).requires_grad_(False)) == 32 * MIB


def test_they_are_there_from_the_start_of_a_step_and_in_the_peak():
    layer = nn.Linear(64, 64)
    weighing, on_cpu = (weighed(layer, X, on=on) for on in ("1xH100", "1xCPU"))
    assert set(weighing.ledger.memory.timeline.by_category["workspaces"]) == {64 * MIB}
    assert weighing.account.ranks[0].peak_bytes == on_cpu.account.ranks[0].peak_bytes + 64 * MIB
    assert weighing.ledger.memory.reserved_bytes >= 64 * MIB
