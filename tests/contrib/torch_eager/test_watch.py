from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from meshwright.contrib.torch_eager import _watch  # noqa: E402
from meshwright.errors import InputError  # noqa: E402
from tests.contrib.torch_eager.steps import counted  # noqa: E402


def test_a_tensor_from_outside_that_asks_for_a_gradient_is_refused():
    outside = torch.zeros(8, requires_grad=True)
    with pytest.raises(InputError) as raised:
        counted(nn.Linear(8, 8), torch.randn(4, 8), loss=lambda output: (output + outside).sum())
    assert "from outside the module that requires a gradient, fp32[8]" in raised.value.message
    assert raised.value.hint == "make it a parameter of the module, and let no closure hold the module"


def test_a_closure_that_holds_the_users_module_is_refused():
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.call = lambda x: self.layer(x)  # of the original, in a copy too

        def forward(self, x):
            return self.call(x)

    with pytest.raises(InputError, match="requires a gradient"):
        counted(Held(), torch.randn(4, 8))


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    def wrong(_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(_watch, "flops_of", wrong)
    with pytest.raises(ZeroDivisionError, match="ours"):
        counted(nn.Linear(8, 8), torch.randn(4, 8))


def test_operations_of_others_are_unknown():
    with torch.library._scoped_library("meshwright_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")

        class Twice(nn.Module):
            def forward(self, x):
                return torch.ops.meshwright_test.twice(x)

        with torch.no_grad():
            found = counted(Twice(), torch.randn(4, 8))
    assert found.unknown == {"meshwright_test.twice(fp32[4, 8])": 1}


def test_constants_made_on_the_way_are_no_inputs():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * torch.tensor([1.0, 2.0])

    assert counted(Scaled(), torch.randn(4, 2)).rank.inputs_bytes == 32
