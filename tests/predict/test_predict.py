import dataclasses
import itertools
import json
import math

import pytest

from meshwright.errors import InputError
from meshwright.hardware import Calibration, Fleet
from meshwright.ledger import executions_of
from meshwright.predict import Interval, Prediction, Slice, ends_with_waits, predict, predicted_trace, widths

# A product, an all-reduce that a second product hides in part, and an update of memory.
STEP = """
%main (x: bf16[8192,8192], w: bf16[8192,8192], p: f32[400000000]) -> f32[400000000] {
  %x = bf16[8192,8192] parameter(0)
  %w = bf16[8192,8192] parameter(1)
  %p = f32[400000000] parameter(2)
  %y = bf16[8192,8192] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %g = f32[400000000] all-reduce-start(%p), replica_groups={}, to_apply=%sum
  %z = bf16[8192,8192] dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %h = f32[400000000] all-reduce-done(%g)
  ROOT %q = f32[400000000] subtract(%p, %h)
}"""
COPY = """
%main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000] parameter(0)
  ROOT %y = f32[1000] copy(%x)
}"""
FLOPS = 8 * 2 * (2 * 8192**3)  # eight devices, two products


@pytest.fixture
def predicted(program_of, ledger_with, compiled_for):
    def make(fleet="8xH100", text=STEP, calibration=None, ledger=None, **compiled):
        name = fleet if isinstance(fleet, str) else fleet.name
        fleet = Fleet.parse(fleet) if isinstance(fleet, str) else fleet
        ledger = ledger or ledger_with(model=FLOPS, executed=FLOPS)
        return predict(
            executions_of(program_of(text)), ledger, compiled_for(name, **compiled), fleet, calibration
        )

    return make


def slower(fleet, what):
    """The fleet with half of one rate."""
    chip = fleet.chip
    if what == "peak":
        peaks = {name: rate / 2 for name, rate in chip.peak_flops_per_second.items()}
        changed = dataclasses.replace(chip, peak_flops_per_second=peaks)
    elif what == "memory":
        changed = dataclasses.replace(chip, memory_bytes_per_second=chip.memory_bytes_per_second / 2)
    else:
        link = getattr(chip, what)
        half = dataclasses.replace(link, bytes_per_second=link.bytes_per_second / 2)
        changed = dataclasses.replace(chip, **{what: half})
    return dataclasses.replace(fleet, chip=changed)


@pytest.mark.parametrize("what", ["peak", "memory", "inside"])
@pytest.mark.parametrize("name", ["8xA100-80GB", "8xH100", "8xB200", "8xRTX-PRO-6000", "8xA10"])
def test_half_a_rate_makes_the_step_slower_by_at_most_two(predicted, what, name):
    whole = Fleet.parse(name)
    before = predicted(whole).step_seconds.expected
    after = predicted(slower(whole, what)).step_seconds.expected
    assert before < after <= 2 * before


def test_half_the_network_makes_a_step_over_hosts_slower_by_at_most_two(predicted):
    whole = Fleet.parse("32xH100")
    before = predicted(whole).step_seconds.expected
    after = predicted(slower(whole, "between")).step_seconds.expected
    assert before < after <= 2 * before


def test_the_exposed_seconds_of_all_slices_are_the_step(predicted):
    found = predicted()
    assert sum(s.exposed_seconds for s in found.slices) == pytest.approx(found.step_seconds.expected)
    assert all(s.exposed_seconds <= s.seconds for s in found.slices)
    by_name = {s.name: s for s in found.slices}
    assert set(by_name) == {"matmul", "memory-bound", "launch", "all-reduce[data]"}
    assert by_name["all-reduce[data]"].exposed_seconds < by_name["all-reduce[data]"].seconds


def test_utilisation_and_throughput_follow_from_the_step(predicted, ledger_with):
    found = predicted(tokens=8 * 8192, ledger=ledger_with(model=FLOPS // 2, executed=FLOPS))
    seconds = found.step_seconds.expected
    assert found.peak_flops_per_second == 989.4e12
    assert found.mfu == pytest.approx(FLOPS / 2 / (8 * 989.4e12) / seconds)
    assert found.hfu == pytest.approx(2 * found.mfu)
    assert found.tokens_per_second_per_device == pytest.approx(8192 / seconds)


def test_a_program_without_products_has_no_utilisation(predicted, ledger_with):
    found = predicted(text=COPY, ledger=ledger_with())
    assert (found.mfu, found.hfu, found.peak_flops_per_second) == (None, None, 0)
    assert found.tokens_per_second_per_device is None


def test_more_model_flops_than_the_chip_can_do_are_our_bug(predicted, ledger_with):
    with pytest.raises(AssertionError, match="an MFU of"):
        predicted(ledger=ledger_with(model=10 * FLOPS, executed=FLOPS))


def assert_width(found, name):
    interval, width = found.step_seconds, widths()[name]
    low, high = ends_with_waits(width.low, width.high, waited(found) / interval.expected)
    assert interval.low < interval.expected < interval.high
    assert interval.low / interval.expected == pytest.approx(low)
    assert interval.high / interval.expected == pytest.approx(high)
    assert width.words in found.basis


def waited(found):
    return sum(each.exposed_seconds for each in found.slices if each.kind == "communication")


def test_waits_for_messages_widen_the_interval_and_are_named(predicted):
    """A step that mostly waits is known less well than published runs, which hide most of their messages."""
    found = predicted("8xH100")
    share = waited(found) / found.step_seconds.expected
    assert share > 0.3
    assert f"messages within a factor of 1.5 ({100 * share:.0f} % of the step waits for them)" in found.basis
    assert found.step_seconds.high > (1 + share / 2) * found.step_seconds.expected
    assert found.step_seconds.low < (1 - share / 3) * found.step_seconds.expected
    assert "messages within" not in predicted("v5p-8").basis


def test_the_interval_is_as_wide_as_what_is_known(predicted):
    sustained, tables = predicted("8xH100"), predicted("8xB200")
    default, products = predicted("8xA10"), predicted("8xH20")
    tpu, other_tpu = predicted("v5p-8", sequence_length=8192), predicted("v7x-8", sequence_length=8192)
    assert_width(sustained, "hopper")
    assert sustained.interval_reasons == ()
    assert tables.interval_reasons == ("no published run on this chip could be scored",)
    assert "derived from published figures: no table of kernels and" in default.interval_reasons[0]
    assert "and others' measurements of large products" in products.interval_reasons[0]
    assert "aiconfigurator" in sustained.basis
    assert "64 % of peak that such cards were measured to sustain, attention as measured" in sustained.basis
    assert_width(tables, "tables")
    assert "x 0.81" in tables.basis
    assert_width(default, "default")
    assert "No table for A10: A10's published peaks and bandwidth, medians over nine GPUs" in default.basis
    assert_width(products, "products")
    assert "large products as others measured them (https://" in products.basis
    assert_tpus_width(tpu, "tpu")
    assert "that published runs on v5p sustain" in tpu.basis
    assert_tpus_width(other_tpu, "other-tpu")
    assert "that those on other TPUs sustain" in other_tpu.basis


@pytest.mark.parametrize(("fleet", "of_ours"), [("v6e-8", "tpu"), ("v7x-8", "other-tpu")])
def test_a_program_that_is_no_transformer_of_ours_has_a_wider_interval_on_tpus(predicted, fleet, of_ours):
    ours, other = predicted(fleet, sequence_length=8192), predicted(fleet)
    assert_tpus_width(ours, of_ours)
    assert_tpus_width(other, f"{of_ours}-program")
    assert other.step_seconds.low < ours.step_seconds.low
    assert other.step_seconds.high > ours.step_seconds.high
    assert "such a program" in other.interval_reasons[0]
    assert predicted("8xH100").step_seconds == predicted("8xH100", sequence_length=8192).step_seconds


def test_cards_without_peer_to_peer_transfers_have_a_wider_interval(predicted):
    found, width = predicted("8xRTX-4090"), widths()["products"]
    interval = found.step_seconds
    assert 0 < interval.low < 0.9 * width.low * interval.expected
    share = waited(found) / interval.expected
    assert interval.high == pytest.approx(ends_with_waits(1, width.high, share)[1] * interval.expected)
    assert "RTX-4090 has no peer-to-peer transfers" in found.interval_reasons[1]


def test_a_chip_without_bf16_is_told_of_fp16(predicted):
    found = predicted("8xT4", text=STEP.replace("bf16", "f32"))
    assert_refused(found, "T4 has no bf16 and computes it in fp32, fp16 in its tensor cores")
    assert "--set precision=fp16" in found.interval_reasons[0]
    assert "precision=fp16" not in predicted("8xA10", text=STEP.replace("bf16", "f32")).interval_reasons[0]


def test_fp8_has_its_own_interval(predicted):
    found = predicted(text=STEP.replace("bf16", "f8e4m3fn"))
    assert_width(found, "hopper-fp8")
    assert "runs in fp8" in found.basis
    assert_width(predicted("8xGB200", text=STEP.replace("bf16", "f8e4m3fn")), "blackwell-fp8")


def assert_tpus_width(found, name):
    """Published runs on TPUs waited for no message: the lower end does not either."""
    width, interval = widths()[name], found.step_seconds
    assert waited(found) > 0
    assert interval.low == pytest.approx((interval.expected - waited(found)) * width.low)
    assert interval.high == pytest.approx(interval.expected * width.high)
    assert width.words in found.basis


def assert_refused(found, reason):
    assert (found.step_seconds.low, found.step_seconds.high) == (None, None)
    assert found.step_seconds.expected > 0
    assert reason in found.interval_reasons[0]
    assert found.basis.endswith("No interval.")


def test_many_small_kernels_have_no_interval(predicted, ledger_with):
    assert_refused(predicted(text=COPY, ledger=ledger_with()), "of the step are gaps between kernels")


@pytest.mark.parametrize("fleet", ["8xH100", "8xB200", "8xH20"])
def test_products_in_float32_have_no_interval(predicted, fleet):
    """Published runs and tables are of bf16 and fp8."""
    text = STEP.replace("bf16", "f32").replace(
        "rhs_contracting", "operand_precision={highest,highest}, rhs_contracting"
    )
    assert_refused(predicted(fleet, text=text), "products in fp32")


def test_a_little_float32_among_bf16_leaves_the_interval(predicted):
    small = "%small = f32[64,64] dot(%s, %s), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = STEP.replace("{\n", "{\n  %s = f32[64,64] parameter(3)\n  " + small + "\n", 1)
    assert_width(predicted(text=text), "hopper")


def test_unpriced_work_leaves_the_interval_without_an_upper_end(predicted, ledger_with):
    unpriced = ("sort(f32[8]) -> f32[8], from a", "a loop of unknown length", "fft of f32[8]")
    found = predicted(ledger=ledger_with(model=FLOPS, executed=FLOPS, unpriced=unpriced))
    priced = predicted().step_seconds
    assert (found.step_seconds.low, found.step_seconds.high) == (priced.low, None)
    assert found.interval_reasons == (f"not priced: {unpriced[0]}, {unpriced[1]} and 1 more",)
    assert "without an upper end" in found.basis


def test_fp8_on_a_chip_without_published_runs_is_as_wide_as_either(predicted):
    found = predicted("8xL40S", text=STEP.replace("bf16", "f8e4m3fn"))
    seconds, fp8, tables = found.step_seconds, widths()["fp8"], widths()["tables"]
    share = waited(found) / seconds.expected
    low, high = ends_with_waits(min(fp8.low, tables.low), max(fp8.high, tables.high), share)
    assert seconds.low / seconds.expected == pytest.approx(low)
    assert seconds.high / seconds.expected == pytest.approx(high)


def test_a_wider_interval_is_never_narrower_than_that_of_published_runs():
    """Each width of a chip of which less is known holds those of the chips of which more is."""
    order = [widths()[name] for name in ("hopper", "a100", "tables", "default")]
    assert all(a.low >= b.low and a.high <= b.high for a, b in itertools.pairwise(order))
    assert all("judgement" not in width.words for width in widths().values())


def test_an_interval_times_a_number_keeps_its_open_ends(predicted):
    seconds = predicted().step_seconds
    assert seconds.times(2) == Interval(
        low=2 * seconds.low, expected=2 * seconds.expected, high=2 * seconds.high
    )
    assert dataclasses.replace(seconds, low=None, high=None).times(2) == Interval(
        low=None, expected=2 * seconds.expected, high=None
    )


def test_no_time_is_predicted_from_a_program_simulated_on_a_cpu(predicted):
    with pytest.raises(InputError, match="no time is predicted for 8xH100") as caught:
        predicted(source="simulated on CPU")
    assert "meshwright doctor" in caught.value.hint


def test_simulated_devices_are_priced_by_their_hosts_calibration(predicted):
    host = Calibration(
        matmul_flops_per_second={"fp32": 3e11},
        memory_bytes_per_second=2e10,
        launch_seconds=1e-6,
        date="2026-11-21",
        source="by hand",
    )
    found = predicted("8xCPU", calibration=host)
    products = next(s for s in found.slices if s.name == "matmul")
    assert products.seconds == pytest.approx(FLOPS / 3e11)  # all eight devices' work on one host
    assert_width(found, "calibration")
    assert "2026-11-21 (by hand)" in found.basis


def test_rates_that_differ_from_round_to_round_and_doubts_widen_the_interval_and_are_said(
    program_of, ledger_with, compiled_for
):
    host = Calibration(
        matmul_flops_per_second={"fp32": 3e11},
        memory_bytes_per_second=2e10,
        launch_seconds=1e-6,
        date="2026-11-21",
        source="by hand",
        spread={"memory": 0.5, "launch": 0.01},
    )
    fleet, compiled = Fleet.parse("8xCPU"), compiled_for("8xCPU")
    ledger = ledger_with(model=FLOPS, executed=FLOPS)
    found = predict(
        executions_of(program_of(STEP)), ledger, compiled, fleet, host, cautions=("measured long ago",)
    )
    seconds, width = found.step_seconds, widths()["calibration"]
    assert seconds.low / seconds.expected == pytest.approx(width.low / 1.5)
    assert seconds.high / seconds.expected == pytest.approx(width.high * 1.5)
    assert "differ by up to 50 %" in found.interval_reasons[1]
    assert found.interval_reasons[2] == "measured long ago"


def test_a_chip_measured_here_does_not_claim_the_published_interval(predicted):
    card = Calibration(
        matmul_flops_per_second={"bf16": 6e14},
        memory_bytes_per_second=3e12,
        launch_seconds=1e-6,
        date="2026-11-21",
        source="by hand",
        chip="H100",
    )
    found = predicted("8xH100", calibration=card)
    assert_width(found, "tables")
    assert "measured here" in found.interval_reasons[0]


def test_convolutions_on_a_cpu_have_no_interval(predicted, ledger_with):
    host = Calibration(
        matmul_flops_per_second={"fp32": 3e11},
        memory_bytes_per_second=2e10,
        launch_seconds=1e-6,
        date="2026-11-21",
        source="by hand",
    )
    text = """
%main (x: f32[64,28,28,32], w: f32[3,3,32,64]) -> f32[64,26,26,64] {
  %x = f32[64,28,28,32] parameter(0)
  %w = f32[3,3,32,64] parameter(1)
  ROOT %y = f32[64,26,26,64] convolution(%x, %w), window={size=3x3}, dim_labels=b01f_01io->b01f
}"""
    found = predicted("8xCPU", text=text, calibration=host, ledger=ledger_with())
    assert_refused(found, "four to eight times")


def test_simulated_devices_without_a_calibration_are_sent_to_the_probe(predicted):
    with pytest.raises(InputError, match="no rates are known for 8xCPU") as caught:
        predicted("8xCPU")
    assert "`meshwright probe`" in caught.value.hint


def test_what_the_ledger_and_the_walk_could_not_price_is_listed(predicted, ledger_with):
    ledger = ledger_with(unpriced=("custom-call of unknown kind",))
    found = predicted("8xT4", ledger=ledger)
    assert found.unpriced[0] == "custom-call of unknown kind"
    assert found.unpriced[1] == "matmul in bf16: T4 has no known peak for it, 2 times"


def test_compute_exposed_communication_and_idle_sum_to_the_step(predicted):
    found = predicted()
    by_kind = found.seconds_by_kind
    assert set(by_kind) == {"compute", "communication", "idle"}
    assert math.fsum(by_kind.values()) == pytest.approx(found.step_seconds.expected, rel=1e-12)
    kinds = {each.name: each.kind for each in found.slices}
    assert kinds["launch"] == "idle"
    assert kinds["matmul"] == "compute"
    assert {kind for name, kind in kinds.items() if "[" in name} <= {"communication"}


def test_the_trace_of_a_step_is_a_file_of_trace_events_on_named_tracks(program_of, compiled_for, tmp_path):
    scoped = STEP.replace(
        "rhs_contracting_dims={0}",
        'rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp()/layers/up/dot"}',
    )
    trace = predicted_trace(
        executions_of(program_of(scoped)), compiled_for("16xH100"), Fleet.parse("16xH100")
    )
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"}
    assert {names[e["pid"], e["tid"]] for e in slices} == {"computing", "links between domains"}
    assert all(e["ts"] >= 0 and e["dur"] > 0 for e in slices)
    assert [e["name"] for e in slices if e["cat"] == "matmul"] == ["layers/up: matmul"] * 2
    # What one track shows never overlaps.
    for track in names:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in itertools.pairwise(mine))


@pytest.mark.parametrize("record", [Interval, Slice, Prediction])
def test_a_record_is_frozen_and_takes_names_only(record):
    assert record.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(record))


def test_an_interval_does_not_change_once_made():
    interval = Interval(low=1.0, expected=2.0, high=3.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        interval.low = 0.0
