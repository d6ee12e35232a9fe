from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from meshwright.torch_account import Account, FlopCount, MemoryCount, ModuleCount


@pytest.fixture
def counted_by_torch() -> Callable[..., tuple[int, int]]:
    """FLOPs of forward and backward pass by PyTorch's own counter, on real tensors."""
    from torch.utils.flop_counter import FlopCounterMode

    def count(module: Any, *inputs: Any) -> tuple[int, int]:
        module = copy.deepcopy(module)
        with FlopCounterMode(display=False) as forward:
            output = module(*inputs)
        with FlopCounterMode(display=False) as backward:
            (output[0] if isinstance(output, tuple) else output).sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    return count


def made_account() -> Account:
    """By hand, each number another."""
    memory = MemoryCount(
        parameters_bytes=4000, buffers_bytes=8, gradients_bytes=3000, optimizer_state_bytes=6000,
        inputs_bytes=100, saved_activation_bytes=5000, temporary_peak_bytes=700,
        peak_bytes=15_808, peak_phase="backward",
        at_peak={"parameters": 4000, "temporaries": 700},
        by_format={"parameters": {"fp32": 4000}, "saved activations": {"fp32": 1000, "bf16": 4000}},
    )  # fmt: skip
    flops = FlopCount(
        forward=1000, backward=2600, recomputed=600, optimizer=50,
        by_operation={"aten.mm": 3600}, by_format={"bf16": 3600},
    )  # fmt: skip
    rows = [
        ("", "Net", 1000, 1000, 2600, 600, 5000),
        ("a", "Linear", 900, 600, 1200, 0, 5000),
        ("b", "ReLU", 0, 0, 0, 0, 0),
    ]
    names = (
        "path",
        "kind",
        "num_parameters",
        "forward_flops",
        "backward_flops",
        "recomputed_flops",
        "saved_activation_bytes",
    )
    modules = tuple(ModuleCount(**dict(zip(names, row, strict=True))) for row in rows)
    return Account(
        name="Net", num_parameters=1000, flops=flops, memory=memory, by_module=modules,
        unknown={"aten._fft_r2c(fp32[4, 8])": 2}, conventions=("One.", "Two."), torch_version="2.13.0",
    )  # fmt: skip


@pytest.fixture(name="made_account")
def _made_account() -> Account:
    return made_account()
