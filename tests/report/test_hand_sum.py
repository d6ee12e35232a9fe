"""The rule of the lecture notes, by their own numbers, and what it says beside a ledger made by hand."""

import pytest

from meshwright.config import Layout, load_config
from meshwright.ledger import MemoryLedger, Timeline
from meshwright.report import hand_sum


def memory(**by_category: int) -> MemoryLedger:
    return MemoryLedger(
        reserved_bytes=sum(by_category.values()),
        peak_bytes=None,
        allowance={},
        usable_bytes=None,
        by_category=by_category,
        optimizer_state_by_moment={},
        buffers=(),
        timeline=Timeline(instants=(), last_instant=0, peak_instant=0, by_category={}),
    )


def made(preset, *overrides, layout="data=1", devices=1, **by_category):
    config = load_config(preset, overrides)
    return hand_sum(config, Layout.parse(layout), devices, memory(**by_category))


def row(found, quantity):
    return next(r for r in found.rows if r.quantity == quantity)


def test_the_cruncher_of_the_notes_by_the_notes_own_numbers():
    """B = 2, D = 4, two layers, AdaGrad: D x D x 2 + D parameters, B x D x 2 activations."""
    overrides = ("model.width=4", "batch.sequences=2", "optimizer.kind=adagrad")
    found = made("cruncher", *overrides)
    assert (found.parameters, found.activations, found.gradients, found.optimizer_state) == (36, 16, 36, 36)
    assert found.total_bytes == 4 * (36 + 16 + 36 + 36)
    assert row(found, "total").whole_bytes == found.total_bytes


@pytest.mark.parametrize(
    ("overrides", "moments"),
    [
        (("optimizer.kind=sgd",), 0),
        (("optimizer.kind=sgd", "optimizer.momentum=0.9"), 1),
        (("optimizer.kind=adagrad",), 1),
        (("optimizer.kind=adamw",), 2),
    ],
)
def test_each_optimizer_keeps_so_many_numbers_for_a_parameter(overrides, moments):
    found = made("cruncher", *overrides)
    assert found.optimizer_state == moments * found.parameters


def test_activations_are_one_output_of_each_layer():
    assert made("linear").activations == 0
    assert made("lenet").activations == 64 * (20 * 26 * 26 + 50 * 9 * 9 + 128)
    assert made("bytes-nano").activations == 8 * 64 * 64 * 2  # tokens 8 x 64, width 64, two blocks


def test_what_is_split_and_what_every_device_holds_is_said():
    whole = 4 * load_config("cruncher").model.num_parameters
    split = row(made("cruncher", layout="fsdp=8", devices=8, parameters=whole // 8), "parameters")
    assert split.device_bytes == whole / 8 == split.compiled_bytes
    assert split.why == "split over fsdp=8: each number lies on 1 of 8 devices"
    held = row(made("cruncher", layout="data=8", devices=8, parameters=whole), "parameters")
    assert held.why == "not split: each number lies on 8 of 8 devices"
    half = row(made("cruncher", parameters=whole // 2), "parameters")
    assert half.why.endswith("the device; at the peak a part of their place is used otherwise, or idle")


def test_an_optimizer_without_moments_has_only_its_counts():
    assert row(made("cruncher"), "optimizer state").why == "the optimizer keeps none"
    counted = row(made("cruncher", optimizer_state=4), "optimizer state")
    assert counted.why == "the optimizer keeps none, but 4 bytes of step counts"


@pytest.mark.parametrize(
    ("gradients", "why"),
    [
        (50, "at the peak the others are not made yet, or applied already"),
        (100, "all of them at the peak, split as the parameters are"),
        (250, "2.5 times one set, split as the parameters are: some have several forms"),
    ],
)
def test_gradients_are_set_beside_one_set_of_them(gradients, why):
    assert row(made("cruncher", parameters=100, gradients=gradients), "gradients").why == why


def test_what_the_rule_leaves_out_is_named_largest_first_and_the_column_adds_up():
    found = made("cruncher", parameters=100, logits_and_loss=2048, batch=10, fragmentation=5, keys=1)
    others = row(found, "everything else")
    assert others.why == "not in the rule: logits and loss 2.00 KiB, batch 10 B, fragmentation 5 B"
    assert sum(r.compiled_bytes for r in found.rows[:-1]) == found.rows[-1].compiled_bytes == 2164


def test_microbatches_and_rematerialisation_are_reasons_for_activations(weighing):
    config = load_config("bytes-nano", ["batch.microbatch_sequences=2"])
    ledger = weighing().ledger.memory
    why = row(hand_sum(config, Layout.parse("data=1"), 1, ledger), "activations").why
    assert why == (
        "kept in bf16; 2 of 8 sequences at a time; rematerialisation dots-attention; "
        "whatever else the backward pass needs counts too"
    )
    assert row(made("cruncher"), "activations").why == "none is alive at the peak"


def test_it_is_jsons_types():
    fields = made("cruncher", parameters=4).to_dict()
    assert fields["total_bytes"] == 4 * (2 * fields["parameters"] + fields["activations"])
    assert [r["quantity"] for r in fields["rows"]][-1] == "total"
