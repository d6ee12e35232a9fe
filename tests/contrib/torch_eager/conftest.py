from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest


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
