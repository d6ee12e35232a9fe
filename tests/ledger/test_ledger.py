import dataclasses
import json

import pytest

from meshwright.compiler import TracedFlops
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import Ledger, MemoryLedger, Timeline, ledger_of


def test_every_sample_has_a_ledger_with_nothing_unpriced(samples):
    for name in samples.names:
        assert samples.ledger(name).unpriced == ()


def test_executed_flops_are_summed_over_devices_and_phases(samples):
    flops = samples.ledger("transformer-8xH100").flops
    assert flops.executed == sum(flops.by_phase.values()) == sum(flops.by_format.values())
    assert flops.recomputed == flops.by_phase["recompute"] > 0
    assert samples.ledger("cruncher-8xH100").flops.recomputed == 0


def test_model_flops_leave_recomputation_out_and_the_rule_stands_beside_them(samples):
    folder = samples.folder("cruncher-8xH100")
    traced = TracedFlops(
        by_phase={"forward": 5, "backward": 7, "recompute": 9}, unpriced=("odd",), attention=0
    )
    compiled = dataclasses.replace(
        samples.compiled("cruncher-8xH100"),
        traced_flops=traced,
        num_parameters=10,
        num_matmul_parameters=10,
        tokens_per_step=3,
    )
    ledger = ledger_of(folder, compiled, Fleet.parse("8xH100"))
    assert (ledger.flops.model, ledger.flops.rule_6nd) == (12, 6 * 10 * 3)
    assert ledger.unpriced == ("odd",)


@pytest.mark.parametrize("missing", ["num_parameters", "tokens_per_step"])
def test_without_parameters_or_tokens_there_is_no_rule_of_thumb(samples, missing):
    known = {"num_parameters": 10, "tokens_per_step": 3} | {missing: None}
    compiled = dataclasses.replace(samples.compiled("cruncher-8xH100"), **known)
    ledger = ledger_of(samples.folder("cruncher-8xH100"), compiled, Fleet.parse("8xH100"))
    assert ledger.flops.rule_6nd is None


def test_flops_by_module_add_up_and_say_what_several_devices_do_alike(samples):
    name = "cruncher-8xH100"  # data=8: each device has its own rows, so nothing is done twice
    compiled, executed = samples.compiled(name), samples.ledger(name).flops
    assert sum(executed.by_module.values()) == executed.executed
    assert executed.waste_by_module == {}  # not known: the sample was compiled before modules were counted
    half = {module: flops // 2 for module, flops in executed.by_module.items()}
    traced = dataclasses.replace(compiled.traced_flops, by_module=half)
    doubled = dataclasses.replace(compiled, traced_flops=traced)
    wasteful = ledger_of(samples.folder(name), doubled, Fleet.parse("8xH100")).flops
    assert sum(wasteful.waste_by_module.values()) == executed.executed - sum(half.values())


def test_products_merged_under_one_name_are_no_waste(samples):
    from meshwright.ledger._flops import _waste

    model = {"block/query": 4, "block/key": 4, "mlp/up": 8}
    assert _waste(model, {"block/query": 8, "mlp/up": 8}) == {}
    assert _waste(model, {"block/query": 8, "mlp/up": 16}) == {"mlp": 8}
    assert _waste({}, {"mlp/up": 16}) == {}


def test_the_json_has_the_agreed_names(samples):
    ledger = samples.ledger("transformer-8xH100")
    fields = json.loads(json.dumps(ledger.to_dict()))
    assert {"reserved_bytes", "peak_bytes", "allowance_bytes", "usable_bytes", "by_category"} <= set(
        fields["memory"]
    )
    assert {"model", "executed", "recomputed", "by_phase"} <= set(fields["flops"])
    assert {"kind", "axes", "count", "payload_bytes", "wire_bytes"} <= set(fields["traffic"][0])
    assert fields["unpriced"] == []
    assert fields["memory"]["allowance_bytes"] == sum(ledger.memory.allowance.values())
    assert fields["memory"]["fits"] is True


def memory(reserved, usable):
    return MemoryLedger(
        reserved_bytes=reserved,
        argument_bytes=0,
        peak_bytes=None,
        allowance={"context": 10, "libraries": 5},
        usable_bytes=usable,
        by_category={},
        optimizer_state_by_moment={},
        buffers=(),
        timeline=Timeline(instants=(), last_instant=0, peak_instant=0, by_category={}),
    )


@pytest.mark.parametrize(("reserved", "fits"), [(85, True), (86, False)])
def test_it_fits_if_reserved_and_allowance_are_at_most_usable(reserved, fits):
    assert memory(reserved, 100).fits is fits
    assert memory(reserved, 100).allowance_bytes == 15


def test_whether_it_fits_is_unknown_where_the_usable_bytes_are():
    assert memory(1, None).fits is None


def test_a_format_without_a_name_of_ours_keeps_the_compilers(samples):
    known = samples.ledger("cruncher-8xH100").memory
    first, *rest = known.buffers
    strange = dataclasses.replace(known, buffers=(dataclasses.replace(first, format="f8e8m0fnu"), *rest))
    assert strange.by_format["f8e8m0fnu"] == first.num_bytes
    assert strange.by_format["fp32"] + first.num_bytes == known.by_format["fp32"]


def test_a_ledger_survives_its_json(samples):
    for name in samples.names:
        ledger = samples.ledger(name)
        assert Ledger.from_json(json.dumps(ledger.to_dict())) == ledger


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "this is not a ledger"),
        ("[]", "this is not a ledger"),
        ('{"schema": 9}', "this is not a ledger"),
        ('{"schema": 4}', "a ledger of schema 4; this version of Meshwright reads schema 9"),
    ],
)
def test_what_is_no_ledger_of_this_version_is_refused(text, words):
    with pytest.raises(InputError, match=words):
        Ledger.from_json(text)
