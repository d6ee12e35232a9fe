from __future__ import annotations

from collections import Counter

from meshwright.torch_account._storages import _by_module, _with_outer


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
    rows = {row.path: row for row in _by_module(modules, flops, Counter({"a.b": 7, None: 3}))}
    assert [rows[path].forward_flops for path in modules] == [11, 1, 1, 10]
    assert [rows[path].backward_flops for path in modules] == [1100, 1100, 1000, 0]
    assert [rows[path].recomputed_flops for path in modules] == [1000, 1000, 1000, 0]
    assert [rows[path].saved_activation_bytes for path in modules] == [7, 7, 7, 0]
