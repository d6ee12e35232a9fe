"""The planner's candidates are those that the configuration and `check_layout` accept, and no others."""

import itertools

import numpy as np
import pytest

from meshwright.config import (
    AXES,
    Layout,
    check_layout,
    check_precision,
    load_config,
    overridden,
    resolve_batch,
)
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import allowance
from meshwright.planning import candidates_of, estimate, knobs_of_run, parsed_knobs, space_of
from meshwright.predict import machine_of

pytestmark = pytest.mark.once

CASES = [
    ("bytes-moe", "8xCPU", ["fold_experts=tensor"]),
    ("bytes-moe", "8xCPU", ["fold_experts=both", "model.num_dense_layers=1", "model.dense_mlp_dim=64"]),
    ("deepseek-v2-lite", "16xH100", []),
    ("llama3-8b", "64xH100", ()),
    ("mixtral-8x7b", "32xH100", ()),
    ("gpt2-124m", "16xH100", ()),
    ("bytes-10m", "8xCPU", ()),
    ("bytes-10m", "8xCPU", ("model.unroll=true", "model.loss_chunk=64")),
    ("resnet18-fashion", "8xCPU", ()),
    ("cruncher", "16xH100", ()),
    ("linear", "4xCPU", ()),
    ("llama3-405b", "4096xH100", ()),
]


def is_accepted(run, overrides, fleet):
    try:
        changed = overridden(run, overrides)
        layout = Layout.parse(changed.layout).resolve(fleet.num_devices)
        check_layout(resolve_batch(changed, layout), layout)
        check_precision(changed, fleet.chip)
    except InputError:
        return False
    return True


@pytest.mark.parametrize(("model", "fleet_name", "changes"), CASES)
def test_every_candidate_is_accepted_by_the_configuration_and_the_layout_check(model, fleet_name, changes):
    run, fleet = load_config(model, changes), Fleet.parse(fleet_name)
    candidates = space_of(run, fleet).candidates
    chosen = np.random.default_rng(0).permutation(len(candidates))[:60]
    assert len(chosen)
    assert all(is_accepted(run, candidates.overrides(row), fleet) for row in chosen)


@pytest.mark.parametrize(("model", "fleet_name"), [("llama3-8b", "16xH100"), ("bytes-moe", "8xCPU")])
def test_a_layout_that_is_accepted_is_a_candidate(model, fleet_name):
    run, fleet = load_config(model), Fleet.parse(fleet_name)
    space = space_of(run, fleet, parsed_knobs(["offload=none", "remat=full", "pipeline=1f1b", "zero1=false"]))
    found = {
        (str(space.candidates.layout(row)), int(space.candidates.microbatch[row]))
        for row in range(len(space.candidates))
    }
    sizes = [n for n in range(1, fleet.num_devices + 1) if fleet.num_devices % n == 0]
    accepted = set()
    for counts in itertools.product(sizes, repeat=len(AXES)):
        if np.prod(counts) != fleet.num_devices:
            continue
        axes = tuple((name, n) for name, n in zip(AXES, counts, strict=True) if n > 1)
        layout = Layout(axes=axes or (("data", 1),))
        overrides = {"layout": str(layout), "remat": "full", "batch.microbatch_sequences": 1}
        if is_accepted(run, overrides, fleet):
            accepted.add((str(layout), 1))
    assert accepted
    assert accepted <= found


def test_sixty_four_devices_have_as_many_layouts_as_ways_to_write_two_to_the_sixth():
    # Six axes share six factors of two: C(6 + 5, 5) = 462.
    space = space_of(load_config("llama3-8b"), Fleet.parse("64xH100"))
    assert space.num_layouts == 462
    assert space.num_considered > 2000
    assert (
        sum(n for rule, n in space.illegal.items() if rule.startswith("expert splits nothing")) == 462 - 210
    )


def test_strides_are_those_of_the_written_layout():
    run, fleet = load_config("mixtral-8x7b"), Fleet.parse("64xH100")
    candidates = space_of(run, fleet).candidates
    strides = candidates.strides()
    for row in np.random.default_rng(1).permutation(len(candidates))[:50]:
        axes = candidates.layout(row).axes
        for place, (name, _) in enumerate(axes):
            inside = int(np.prod([size for _, size in axes[place + 1 :]], dtype=int))
            assert strides[row, AXES.index(name)] == inside, (axes, name)


def test_only_orders_with_another_place_on_the_hosts_are_kept():
    run = load_config("llama3-8b")
    one_host = space_of(run, Fleet.parse("8xH100")).candidates
    assert set(one_host.inner.tolist()) == {AXES.index("tensor")}
    several = space_of(run, Fleet.parse("16xH100")).candidates
    texts = {str(several.layout(row)) for row in range(len(several))}
    assert {"fsdp=8,tensor=2", "tensor=2,fsdp=8"} <= texts
    kept = {(str(several.layout(row)), str(several.overrides(row))) for row in range(len(several))}
    assert len(kept) == len(several), "no candidate is there twice"


def test_fixed_and_varied_knobs_restrict_the_candidates():
    run, fleet = load_config("llama3-8b"), Fleet.parse("64xH100")
    knobs = parsed_knobs(["tp=8", "remat=full,dots", "microbatch=1,2", "zero1=false", "offload=none"])
    candidates = space_of(run, fleet, knobs).candidates
    assert set(candidates.size(AXES.index("tensor")).tolist()) == {8}
    assert set(candidates.microbatch.tolist()) == {1, 2}
    assert {candidates.overrides(row)["remat"] for row in range(len(candidates))} == {"full", "dots"}
    assert set(parsed_knobs({"tensor": [4, 8], "zero1": True})["tensor"]) == {"4", "8"}


def test_a_list_of_results_is_estimated_between_the_policies_around_it():
    run, fleet = load_config("llama3-8b", ["layer_loop=keep"]), Fleet.parse("8xH100")
    policies = ("full", "save:query,key,value", "save:query,key,value,context,out", "dots-attention")
    knobs = ["fsdp=8", "zero1=false", "offload=none", "microbatch=1", f"remat={','.join(policies)}"]
    candidates = space_of(run, fleet, parsed_knobs(knobs)).candidates
    found = estimate(run, machine_of(fleet, None), candidates)
    rows = {candidates.overrides(row)["remat"]: row for row in range(len(candidates))}
    memory, seconds = ([column[rows[name]] for name in policies] for column in (found.memory, found.seconds))
    assert list(memory) == sorted(memory)
    assert list(seconds) == sorted(seconds, reverse=True)


def test_other_policies_are_searched_if_asked_or_if_they_are_the_runs_own():
    fleet = Fleet.parse("8xCPU")

    def searched(knobs=(), *changes):
        candidates = space_of(load_config("bytes-nano", changes), fleet, parsed_knobs(knobs)).candidates
        return {candidates.overrides(row)["remat"] for row in range(len(candidates))}

    usual = {"none", "dots-attention", "save:query,key,value,context,out", "full"}
    assert searched() == usual
    assert searched((), "remat=full-every-2") == {*usual, "full-every-2"}
    assert searched((), "remat=save:key,query") == {*usual, "save:query,key"}
    assert searched(["remat=full,save:query,value,dots"]) == {"full", "save:query,value", "dots"}
    assert not searched(["remat=save:expert_up"]), "a dense block has none"
    assert searched(["remat=full-every-2,full"]) == {"full-every-2", "full"}


def test_stages_with_whole_groups_of_blocks_are_candidates_and_others_are_not():
    run, fleet = load_config("bytes-nano", ["model.num_layers=8", "remat=full-every-4"]), Fleet.parse("4xCPU")
    knobs = parsed_knobs(["remat=full-every-4", "microbatch=1", "offload=none", "zero1=false", "tensor=1"])
    candidates = space_of(run, fleet, knobs).candidates
    rows = [candidates.overrides(row) for row in range(len(candidates))]
    assert all(is_accepted(run, chosen, fleet) for chosen in rows)
    assert {Layout.parse(chosen["layout"]).size("stage") for chosen in rows} == {1, 2}  # 4 hold two layers


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["model.num_layers=3"], "nothing that the planner chooses"),
        (["tensor"], "cannot read"),
        (["tensor=0"], "not a positive number"),
        (["tensor=-1"], "not a positive number"),
        (["remat=half"], "not known"),
        (["tensor=2", "tp=4"], "given twice"),
    ],
)
def test_a_wrong_knob_is_refused_in_words(given, words):
    with pytest.raises(InputError, match=words):
        parsed_knobs(given)


def test_a_run_that_no_layout_suits_has_no_candidates():
    run = load_config("linear", ["batch.sequences=1"])
    assert space_of(run, Fleet.parse("7xCPU")).num_considered == 0
    assert len(allowance(Fleet.parse("8xCPU"), ())) == 0


def test_precision_is_varied_only_if_asked_and_only_where_the_chip_has_it():
    run = load_config("llama3-8b")
    own = space_of(run, Fleet.parse("8xH100"))
    assert {own.candidates.overrides(row)["precision"] for row in range(len(own.candidates))} == {"bf16"}
    for fleet, formats in (("8xH100", {"bf16", "fp8"}), ("8xA100-80GB", {"bf16"})):
        varied = space_of(run, Fleet.parse(fleet), parsed_knobs(["precision=bf16,fp8"])).candidates
        assert {varied.overrides(row)["precision"] for row in range(len(varied))} == formats


def test_a_run_with_sums_in_bf16_is_planned_only_in_formats_that_have_them():
    run = load_config("gpt2-124m", ["gradient_sum=bf16"])
    space = space_of(run, Fleet.parse("8xH100"), parsed_knobs(["precision=fp32,bf16,fp16"])).candidates
    assert {space.overrides(row)["precision"] for row in range(len(space))} == {"bf16"}


def test_a_run_with_gradients_all_in_fp32_is_planned_with_zero1_only_over_stages():
    run = load_config("gpt2-124m", ["gradient_sum=all-fp32"])
    space = space_of(run, Fleet.parse("8xH100")).candidates
    found = [space.overrides(row) for row in range(len(space)) if space.overrides(row).get("zero1")]
    assert found
    assert all("stage" in str(overrides["layout"]) for overrides in found)


def test_a_run_as_it_stands_has_the_microbatch_of_its_share_of_the_batch():
    run = load_config("bytes-10m", ["batch.sequences=8", "batch.microbatch_sequences=2"])
    for fleet, microbatch in (("2xCPU", "2"), ("8xCPU", "1")):
        knobs = knobs_of_run(run, Fleet.parse(fleet), {"remat": ("none", "full")})
        assert knobs["microbatch"] == (microbatch,)
        assert len(space_of(run, Fleet.parse(fleet), {**knobs, "remat": ("none", "full")}).candidates) == 2


def test_estimates_know_what_expert_divides_and_what_zero1_gathers_once():
    """In bytes by hand: state in fp32 with two moments, no more than each device holds."""
    changes = ["layout=fsdp=2,expert=4", "optimizer.kind=adamw"]
    runs = [load_config("bytes-moe", [*changes, f"zero1={zero1}"]) for zero1 in ("false", "true")]
    fleet = Fleet.parse("8xH100")
    bounds = [estimate(run, machine_of(fleet, None), candidates_of([run])).memory_bound[0] for run in runs]
    model = runs[0].model
    inputs = 64 * 64 * 4 * 2  # one sequence of 64, 64 wide, of two blocks
    assert bounds == [pytest.approx(12 * model.num_parameters / 8 + inputs)] * 2
