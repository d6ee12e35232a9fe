from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from meshwright.contrib.torch_eager import ModuleStack  # noqa: E402
from tests.contrib.torch_eager.steps import counted  # noqa: E402


class Notes(nn.Module):
    """Notes the path while it runs forward, and while its gradient is made."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def forward(self, x):
        self.notes.append(("forward", self.stack.path()))
        x = x * 2
        x.grad_fn.register_prehook(lambda _: self.notes.append(("backward", self.stack.path())))
        return x


def test_forward_and_backward_work_belongs_to_the_innermost_module():
    notes = []
    first, second = Notes(notes), Notes(notes)
    root = nn.Sequential(first, nn.Sequential(second))
    Notes.stack = stack = ModuleStack(root)
    with stack:
        assert stack.path() is None
        out = root(torch.ones(2, requires_grad=True))
        assert not stack.inside
        out.sum().backward()
    assert notes == [("forward", "0"), ("forward", "1.0"), ("backward", "1.0"), ("backward", "0")]


def test_a_module_that_is_no_child_belongs_to_the_one_that_calls_it():
    paths = []

    class Calls(nn.Module):
        def forward(self, x):
            return Asks()(x)

    class Asks(nn.Module):
        def forward(self, x):
            paths.append(stack.path())
            return x

    root = nn.Sequential(Calls())
    stack = ModuleStack(root)
    with stack:
        root(torch.ones(1))
        Asks()(torch.ones(1))
    assert paths == ["0", None]


def test_a_module_that_fails_is_left_again():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    root = nn.Sequential(Fails())
    stack = ModuleStack(root)
    with stack:
        with pytest.raises(ValueError, match="no"):
            root(torch.ones(1))
        assert not stack.inside


def test_no_hook_stays():
    from torch.nn.modules.module import _has_any_global_hook

    with ModuleStack(nn.ReLU()):
        assert _has_any_global_hook()
    assert not _has_any_global_hook()


def test_a_module_holds_what_its_children_cost_and_not_what_ran_outside():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.ab, self.plain = nn.ModuleDict({"b": nn.Linear(4, 4)}), nn.Linear(4, 4), nn.ReLU()
            self.matrix = nn.Parameter(torch.zeros(4, 4))

        def forward(self, x):
            return self.plain(self.ab(self.a["b"](x)) @ self.matrix)

    weight = torch.zeros(4, 4)
    found = counted(Outer(), torch.zeros(2, 4), loss=lambda output: (output @ weight).sum())
    product = 2 * 2 * 4 * 4
    forward = {scope: each.flops_by_phase["forward"] for scope, each in found.modules.items()}
    assert forward == {"": 3 * product, "a": product, "a/b": product, "ab": product, "plain": 0}
    backward = {scope: each.flops_by_phase["backward"] for scope, each in found.modules.items()}
    assert backward == {"": 5 * product, "a": product, "a/b": product, "ab": 2 * product, "plain": 0}
    assert found.forward == 4 * product  # with that of the loss
    saved = {scope: each.saved_activation_bytes for scope, each in found.modules.items()}
    assert (
        saved[""]
        == found.rank.saved_activation_bytes
        == sum(saved[each] for each in ("a", "ab", "plain")) + 32
    )
    assert {each.kind for each in found.modules.values()} == {"Outer", "ModuleDict", "Linear", "ReLU"}
