from __future__ import annotations

import dataclasses

from meshwright.torch_account import Account, flop_table, memory_table, module_table, unknown_table


def test_memory_stands_by_what_it_holds_then_the_hand_sum_then_the_peak(made_account: Account):
    header, rows, numbers = memory_table(made_account.memory)
    assert [row[0] for row in rows] == [
        "parameters", "buffers", "gradients", "optimizer state", "inputs", "saved activations", "hand sum",
        "temporaries at the peak", "peak",
    ]  # fmt: skip
    assert numbers <= set(header)
    assert rows[6] == (
        "hand sum",
        "17.6 KiB",
        "18,000",
        "parameters, gradients, optimizer state, saved activations",
    )


def test_flops_stand_by_pass(made_account: Account):
    _, rows, _ = flop_table(made_account.flops)
    assert [(row[0], row[2]) for row in rows] == [
        ("forward", "1,000"), ("backward", "2,600"), ("recomputed", "600"), ("optimizer", "50"),
        ("model", "3,000"),
    ]  # fmt: skip


def test_modules_stand_dearest_first_and_those_that_cost_nothing_are_left_out(made_account: Account):
    _, rows, _ = module_table(made_account)
    assert [row[0] for row in rows] == ["(all)", "a"]
    assert [row[0] for row in module_table(made_account, top=1)[1]] == ["(all)"]


def test_nothing_unknown_is_an_empty_table(made_account: Account):
    assert unknown_table(made_account)[1] == [("aten._fft_r2c(fp32[4, 8])", "2")]
    assert unknown_table(dataclasses.replace(made_account, unknown={}))[1] == []
