"""What is predicted of experts: their load, and a dispatch that sends a token once to a host."""

import functools
import itertools
import tomllib
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.compiler import Routing
from meshwright.errors import InputError
from meshwright.predict import Prediction, copies_once, ends_with_waits, widths

RECORD = Path(__file__).parents[3] / "benchmarks/records/2026-11-28_predict_experts.toml"
SMALL = ("model.num_layers=1", "batch.sequences=16", "model.capacity_factor=none")


@functools.cache
def weighed(*overrides: str, on: str = "8xH100", layout: str = "data=2,expert=4") -> mw.Weighing:
    return mw.weigh("bytes-moe", on=on, layout=layout, overrides=[*SMALL, *overrides])


@pytest.fixture(scope="module")
def balanced() -> mw.Weighing:
    return weighed()


def slices(weighing: mw.Weighing) -> dict[str, float]:
    assert weighing.prediction is not None
    return {part.name: part.seconds for part in weighing.prediction.slices}


def test_a_load_multiplies_the_experts_messages_and_their_products_alone(balanced):
    loaded = weighed("model.expert_load=3")
    before, after = slices(balanced), slices(loaded)
    sent = [slices(weighed(f"model.expert_load={load}"))["all-to-all[expert]"] for load in (2, 3)]
    once = (
        sent[0] - before["all-to-all[expert]"]
    )  # of tokens; the compiler has others of its own on this axis
    assert once > 0.5 * before["all-to-all[expert]"]
    assert sent[1] - before["all-to-all[expert]"] == pytest.approx(2 * once)
    assert before["matmul"] < after["matmul"] < 3 * before["matmul"], "attention's and the head's are others"
    others = {name for name in before if name not in ("all-to-all[expert]", "matmul", "memory-bound")}
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    assert after["memory-bound"] >= before["memory-bound"]
    assert loaded.ledger.flops == balanced.ledger.flops, "the program is the same"
    assert loaded.compiled.fingerprint == balanced.compiled.fingerprint


def test_no_byte_depends_on_the_load_and_the_ledger_says_what_is_assumed(balanced):
    """What XLA has laid out is all that a program takes; rounds for more tokens are part of it."""
    loaded = weighed("model.expert_load=3")
    assert loaded.ledger.memory == balanced.ledger.memory
    assert any("model.expert_load = 1.0" in words for words in balanced.ledger.assumptions)
    assert any("3 times the mean" in words for words in loaded.ledger.assumptions)


def test_buffers_of_a_capacity_factor_take_as_long_however_full_they_are():
    capped = [weighed("model.capacity_factor=1.25", f"model.expert_load={load}") for load in (1, 3)]
    assert slices(capped[0]) == slices(capped[1])
    assert capped[0].ledger == capped[1].ledger
    assert any("no model.expert_load changes the step" in words for words in capped[1].ledger.assumptions)


def test_no_device_gets_more_than_all_tokens_nor_others_where_experts_are_whole():
    most, more = weighed("model.expert_load=4"), weighed("model.expert_load=9")
    assert slices(more) == slices(most)
    assert any("4 times the mean of tokens, all of them" in words for words in more.ledger.assumptions)
    whole = [weighed(f"model.expert_load={load}", layout="data=8") for load in (1, 3)]
    assert slices(whole[1]) == slices(whole[0])
    assert not any("expert_load" in words for each in whole for words in each.ledger.assumptions)


@pytest.mark.parametrize(
    ("width", "layout", "found"),
    [
        (200, "data=8", True),
        pytest.param(208, "data=8", False, marks=pytest.mark.wide),
        pytest.param(48, "tensor=2,data=4", True, marks=pytest.mark.wide),
    ],
)
def test_experts_of_a_width_that_no_kernel_takes_are_found_with_what_to_do(width, layout, found, balanced):
    looped = weighed(f"model.mlp_dim={width}", layout=layout)
    findings = [f for f in looped.ledger.findings if f.kind == "experts in a loop"]
    assert len(findings) == found
    assert "experts in a loop" not in {each.kind for each in balanced.ledger.findings}
    for finding in findings:
        wide, near = ("200", "192 or 208") if width == 200 else ("24", "16 or 32")
        assert f"{wide} wide on a device" in finding.what
        assert near in finding.fix


def test_a_gpu_older_than_triton_runs_experts_in_a_loop_and_is_told_so():
    found = mw.weigh("bytes-moe", on="1xT4", overrides=["model.num_layers=1", "model.capacity_factor=none"])
    (finding,) = (f for f in found.ledger.findings if f.kind == "experts in a loop")
    assert "T4 is older than Ampere" in finding.what
    assert "model.capacity_factor" in finding.fix


@pytest.mark.parametrize(
    ("name", "load", "words"),
    [("bytes-moe", "0.9", "expected at least 1"), ("bytes-nano", "1.5", "has no effect without")],
)
def test_a_load_that_cannot_be_is_refused(name, load, words):
    with pytest.raises(InputError, match=words):
        mw.weigh(name, on="8xH100", overrides=[f"model.expert_load={load}"])


@pytest.mark.parametrize(("domains", "members"), [(1, 4), (2, 2), (4, 1)])
def test_copies_are_those_of_every_choice_counted(domains, members):
    experts, chosen, devices = 8, 3, domains * members
    choices = list(itertools.combinations(range(experts), chosen))
    crossing = forwarded = 0
    for choice in choices:
        found = {expert * devices // experts for expert in choice}
        hosts = {device // members for device in found}
        crossing += len(hosts - {0})  # the token is of the first device
        # A row arrives on the device of each host that has the sender's place, and goes on from there.
        forwarded += sum(device % members != 0 for device in found)
    inside, between = copies_once(Routing(num_experts=experts, num_chosen=chosen), domains, members)
    assert between == pytest.approx(crossing / len(choices))
    assert inside == pytest.approx(forwarded / len(choices))


def over_two_hosts(*overrides: str) -> mw.Weighing:
    wide = ("model.embed_dim=1024", "model.num_experts=16", "model.experts_per_token=8")
    return weighed("batch.sequences=256", *wide, *overrides, on="2x2xH100", layout="expert=4")


@pytest.fixture(scope="module")
def across() -> Prediction:
    prediction = over_two_hosts("expert_domains=1").prediction
    assert prediction is not None
    return prediction


def test_our_own_step_sends_a_row_once_to_each_host(across):
    """By hand, of a token: four rows of 4 KiB there and back, and 96 bytes of numbers, weights and gradients.

    By choice half of eight rows cross, and an eighth more.
    """
    once, by_choice = over_two_hosts(), over_two_hosts("expert_domains=1")
    assert any("once to each of 2 fast domains" in words for words in once.ledger.assumptions)
    assert not any("fast domains" in words for words in by_choice.ledger.assumptions)
    sent = [
        {each.group_size: each for each in found.ledger.traffic if each.kind == "all-to-all"}
        for found in (once, by_choice)
    ]
    assert {size: each.link for size, each in sent[0].items()} == {2: "between", 4: "between"}
    table = sent[0][4].crossing_bytes  # the embedding's gradient, which both exchange
    share = sent[0][2].crossing_bytes / (sent[1][4].crossing_bytes - table)
    assert share == pytest.approx((4 * 4096 + 96) / (4 * 4096 * 4 * 1.125), rel=0.01)
    prediction = once.prediction
    assert prediction is not None
    assert prediction.step_seconds.expected < 0.8 * across.step_seconds.expected
    assert not any("once to each host" in help_.what for help_ in prediction.what_helps)


def test_across_hosts_a_dispatch_once_a_host_is_a_bound_of_what_helps(across):
    (found,) = (help_ for help_ in across.what_helps if "once to each host" in help_.what)
    whole = next(help_ for help_ in across.what_helps if help_.what.endswith("collectives over expert"))
    assert 0 < found.saving_seconds < whole.saving_seconds
    assert not found.change


def test_the_interval_holds_what_published_runs_with_experts_took(across):
    """Dense runs of the same chip are no sources for it: their width held 28 of these 69."""
    width, held = widths()["experts"], []
    for row in tomllib.loads(RECORD.read_text())["row"]:
        waits = sum(seconds for name, seconds in row["exposed_seconds"].items() if "[" in name)
        low, high = ends_with_waits(width.low, width.high, waits / row["predicted_seconds"])
        held.append(low <= row["measured_seconds"] / row["predicted_seconds"] <= high)
    assert 0.88 <= sum(held) / len(held) <= 0.95
    seconds = across.step_seconds
    assert seconds.low <= width.low * seconds.expected
    assert seconds.high >= width.high * seconds.expected
    assert any("of one source" in reason for reason in across.interval_reasons)


def test_another_load_is_the_same_program_and_is_not_compiled_again(balanced):
    assert weighed("model.expert_load=3.5").cached
