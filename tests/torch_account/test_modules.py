from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from meshwright.torch_account._step import _count_modules, _with_outer  # noqa: E402
from meshwright.torch_account._watch import ModuleStack  # noqa: E402
from torch import nn  # noqa: E402


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


class Module:
    def parameters(self):
        return ()


def test_a_path_lies_in_all_that_are_around_it():
    assert _with_outer("a.b.c") == ["", "a", "a.b", "a.b.c"]
    assert _with_outer("") == [""]
    assert _with_outer(None) == []


def test_modules_hold_what_their_children_cost_and_not_what_ran_outside():
    modules = {"": Module(), "a": Module(), "a.b": Module(), "ab": Module()}
    flops = Counter(
        {("forward", "a.b"): 1, ("forward", "ab"): 10, ("backward", "a"): 100, ("recomputed", "a.b"): 1000,
         ("forward", None): 5}
    )  # fmt: skip
    rows = {row.path: row for row in _count_modules(modules, flops, Counter({"a.b": 7, None: 3}))}
    assert [rows[path].forward_flops for path in modules] == [11, 1, 1, 10]
    assert [rows[path].backward_flops for path in modules] == [1100, 1100, 1000, 0]
    assert [rows[path].recomputed_flops for path in modules] == [1000, 1000, 1000, 0]
    assert [rows[path].saved_activation_bytes for path in modules] == [7, 7, 7, 0]
