"""Factors fitted to measured steps: what they are, how a walk uses them, and the interval they leave."""

import dataclasses
import json
import math
from itertools import permutations

import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm, t

from meshwright.errors import InputError
from meshwright.hardware import Fleet, MeasuredClass, MeasuredRun, MeasuredRuns
from meshwright.ledger import executions_of
from meshwright.predict import machine_of, predict, rates_digest, runs, walk

FLEET = Fleet.parse("8xH100")
NOISE = runs()["factors"]["between_programs"]
OWN = math.log(1.14 / 0.89) / 2 / 1.6449  # standard deviation before of products, from the rates' interval
SHARED = math.log(runs()["factors"]["widths"]["whole_step"]) / 1.6449
PRODUCTS = math.hypot(OWN, SHARED)
STEP = """
%main (a: bf16[8192,8192], s: f32[100000000]) -> f32[8000000] {
  %a = bf16[8192,8192] parameter(0)
  %s = f32[100000000] parameter(1)
  %m = bf16[8192,8192] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %c = f32[100000000] copy(%s)
  %i = f32[1000000] slice(%s), slice={[0:1000000]}
  ROOT %g = f32[8000000] all-gather(%i), replica_groups=[1,8]<=[8], dimensions={0}
}"""


def run(measured_seconds, exposed_seconds, classes=None, **changes):
    fields = {
        "what": "trace" if classes else "step time",
        "program": "small",
        "fleet": "8xH100",
        "fingerprint": str(exposed_seconds),
        "rates": rates_digest(FLEET, None),
        "date": "2026-11-23",
        "measured_seconds": measured_seconds,
        "predicted_seconds": sum(exposed_seconds.values()),
        "exposed_seconds": exposed_seconds,
        "classes": classes or {},
    }
    return MeasuredRun(**{**fields, **changes})


def machine_with(*measured, fleet=FLEET):
    return machine_of(fleet, None, measured=MeasuredRuns(chip=fleet.chip.name, runs=measured))


def factors_of(*measured):
    return machine_with(*measured).factors


def test_one_step_of_one_class_moves_it_as_far_as_width_and_noise_say():
    found = factors_of(run(1.2, {"matmul": 1.0})).by_class["matmul"]
    # A normal prior and one normal observation: their mean by weight (any textbook of statistics).
    weight = PRODUCTS**2 / (PRODUCTS**2 + NOISE**2)
    assert math.log(found.value) == pytest.approx(weight * math.log(1.2), rel=1e-3)
    spread = math.sqrt(weight) * NOISE
    assert math.log(found.high / found.value) == pytest.approx(1.6449 * spread, rel=1e-3)
    assert found.low * found.high == pytest.approx(found.value**2)


def test_of_several_steps_each_is_believed_as_students_t_says():
    seconds = (1.0, 1.0, 1.08)
    factors = factors_of(*(run(each, {"matmul": 1.0}, fingerprint=str(each)) for each in seconds))
    assert factors.scale == 1
    best = minimize_scalar(
        lambda x: (
            -norm.logpdf(x, scale=PRODUCTS) - sum(t.logpdf(x - math.log(s), 2, scale=NOISE) for s in seconds)
        ),
        bounds=(0, 0.1),
    )
    assert math.log(factors.of("matmul")) == pytest.approx(best.x, rel=1e-3)


def test_one_odd_step_among_others_moves_the_factors_little():
    mixes = [{"matmul": share, "memory-bound": 1 - share} for share in (0.7, 0.72, 0.74, 0.76)]
    alike = factors_of(*(run(1.1, mix) for mix in mixes))
    odd = factors_of(*(run(seconds, mix) for seconds, mix in zip((1.1, 1.1, 1.1, 1.5), mixes, strict=True)))
    assert odd.of("matmul") == pytest.approx(alike.of("matmul"), rel=0.03)


def test_steps_with_and_without_rematerialisation_tell_its_kernels_apart():
    plain = {"matmul": 0.8, "memory-bound": 0.2}
    again = {"matmul": 0.25, "memory-bound": 0.05}
    slower = 1 + 0.2 * sum(again.values())  # recomputed kernels take 1.2 times as long
    steps = [run(1.0, plain, fingerprint=str(n)) for n in range(3)]
    steps += [run(slower, plain, fingerprint=f"r{n}", recomputed_seconds=again) for n in range(3)]
    factors = factors_of(*steps)
    assert factors.again == pytest.approx(1.2, rel=0.06)
    assert factors.of("matmul", is_recomputed=True) == factors.of("matmul") * factors.again
    assert factors.by_class["recomputed"].num_runs == 3
    # What a step computes again, of which nothing was measured, is one more doubt.
    known = factors_of(*steps[:3])
    assert known.again == 1
    assert known.deviation(plain, 0.3) > known.deviation(plain, 0.0)


def test_a_class_of_which_nothing_was_measured_has_what_all_classes_share():
    factors = factors_of(run(1.2, {"matmul": 1.0}))
    assert factors.of("attention") == factors.of("all-gather[fsdp]") == factors.shared
    # Of the logarithm, the shared part explains as much as it has of the variance (two normal summands).
    share = math.log(factors.shared) / math.log(factors.of("matmul"))
    assert share == pytest.approx(SHARED**2 / PRODUCTS**2, rel=1e-3)


def test_steps_that_are_all_slower_by_one_factor_move_every_class_by_it():
    mixes = [{"matmul": 0.7, "launch": 0.3}, {"matmul": 0.5, "attention": 0.5}, {"memory-bound": 1.0}]
    factors = factors_of(*(run(2.0, mix) for mix in mixes))
    assert [factors.of(name) for name in ("matmul", "attention", "memory-bound")] == pytest.approx(
        [2.0] * 3, rel=0.02
    )
    assert factors.scale == 1


def test_steps_that_no_factors_explain_together_are_believed_less_and_widen_the_interval():
    mixes = [
        {"matmul": 0.7, "launch": 0.3},
        {"matmul": 0.71, "launch": 0.29},
        {"matmul": 0.69, "launch": 0.31},
    ]
    agreeing = factors_of(*(run(1.2, mix) for mix in mixes))
    apart = factors_of(*(run(seconds, mix) for seconds, mix in zip((0.7, 1.2, 2.2), mixes, strict=True)))
    assert (agreeing.scale, apart.scale > 4) == (1, True)
    assert apart.deviation(mixes[0], 0.0) > 4 * agreeing.deviation(mixes[0], 0.0)
    assert 0.7 < apart.of("matmul") < 2.2


def test_steps_of_different_mixes_tell_classes_apart():
    mixes = [{"matmul": 0.9, "launch": 0.1}, {"matmul": 0.5, "launch": 0.5}, {"matmul": 0.1, "launch": 0.9}]
    true = {"matmul": 1.1, "launch": 3.0}
    measured = [run(sum(mix[name] * true[name] for name in mix), mix) for mix in mixes]
    alone, together = factors_of(measured[1]), factors_of(*measured)
    for name, value in true.items():
        assert together.of(name) == pytest.approx(value, rel=0.05)
        assert together.by_class[name].low < value < together.by_class[name].high
    assert together.resolves("launch")
    assert abs(alone.of("matmul") - 1.1) > abs(together.of("matmul") - 1.1)


def test_a_class_that_a_trace_timed_is_that_and_the_others_take_the_rest():
    timed = {"attention": MeasuredClass(measured_seconds=0.6, predicted_seconds=0.4)}
    factors = factors_of(run(1.2, {"matmul": 0.6, "attention": 0.4}, timed))
    assert factors.of("attention") == pytest.approx(1.5, rel=0.1)
    assert factors.of("matmul") == pytest.approx(1.0, abs=0.1)


def test_the_order_in_which_steps_are_given_does_not_matter():
    measured = [
        run(1.3, {"matmul": 1.0, "attention": 0.1}),
        run(0.9, {"matmul": 0.5, "memory-bound": 0.5}),
        run(2.0, {"all-gather": 1.0, "launch": 0.1}),
    ]
    found = [factors_of(*order) for order in permutations(measured)]
    for name in found[0].by_class:
        assert [each.of(name) for each in found] == pytest.approx([found[0].of(name)] * 6, rel=1e-6)


def test_a_step_far_from_its_prediction_is_fitted_too():
    assert factors_of(run(20.0, {"launch": 1.0})).of("launch") == pytest.approx(20, rel=0.05)
    assert factors_of(run(0.1, {"memory-bound": 1.0, "matmul": 0.01})).of("memory-bound") < 0.2


def test_steps_compared_with_other_rates_are_set_aside():
    factors = factors_of(run(1.2, {"matmul": 1.0}, rates="others"))
    assert (factors.runs, factors.set_aside, factors.of("matmul")) == ((), 1, 1.0)
    faster = dataclasses.replace(FLEET.chip, memory_bytes_per_second=9e12)
    assert rates_digest(FLEET, None) != rates_digest(dataclasses.replace(FLEET, chip=faster), None)
    assert rates_digest(FLEET, None) == rates_digest(Fleet.parse("64xH100"), None)
    link = dataclasses.replace(FLEET.chip.inside, by_group={8: {2: 1e9}})
    wired = dataclasses.replace(FLEET.chip, inside=link)
    assert rates_digest(FLEET, None) != rates_digest(dataclasses.replace(FLEET, chip=wired), None)


def test_steps_of_another_chip_and_unknown_classes_are_refused():
    with pytest.raises(InputError, match="steps measured on H100"):
        machine_of(Fleet.parse("8xA100"), None, measured=MeasuredRuns(chip="H100", runs=()))
    with pytest.raises(InputError, match="no class of work is called 'matmull'") as refused:
        factors_of(run(1.0, {"matmull": 1.0}))
    assert "matmul" in refused.value.hint


TIMED = {
    "matmul": MeasuredClass(measured_seconds=3.0, predicted_seconds=2.0),
    "memory-bound": MeasuredClass(measured_seconds=0.5, predicted_seconds=1.0),
    "all-gather": MeasuredClass(measured_seconds=2.0, predicted_seconds=1.0),
    "launch": MeasuredClass(measured_seconds=4.0, predicted_seconds=1.0),
}


def test_the_walk_multiplies_each_kernel_message_and_gap_by_its_factor(walked_on):
    measured = run(9.5, {"matmul": 2.0, "memory-bound": 1.0, "all-gather": 1.0, "launch": 1.0}, TIMED)
    machine = machine_with(measured)
    plain, walked = walked_on(STEP), walked_on(STEP, machine=machine)
    for name, seconds in plain.total.items():
        assert walked.total[name] == pytest.approx(seconds * machine.factors.of(name), rel=1e-9)
    assert walked.seconds == pytest.approx(sum(walked.exposed.values()))
    assert machine.factors.of("launch") > 3


def test_the_walk_multiplies_what_the_backward_pass_runs_again_by_its_factor_too(walked_on):
    path = "jit(step)/transpose(jvp())/checkpoint/rematted_computation/dot_general"
    again = STEP.replace(
        "rhs_contracting_dims={0}", f'rhs_contracting_dims={{0}}, metadata={{op_name="{path}"}}'
    )
    plain = walked_on(again)
    assert plain.recomputed == {"matmul": plain.exposed["matmul"]}
    assert walked_on(STEP).recomputed == {}
    mix = {"matmul": 1.0, "memory-bound": 1.0}
    steps = [run(2.0, mix, fingerprint=str(n)) for n in range(3)]
    steps += [run(2.2, mix, fingerprint=f"r{n}", recomputed_seconds={"matmul": 1.0}) for n in range(3)]
    machine = machine_with(*steps)
    assert machine.factors.again > 1.05
    both = machine.factors.of("matmul") * machine.factors.again
    walked = walked_on(again, machine=machine)
    assert walked.total["matmul"] == pytest.approx(plain.total["matmul"] * both, rel=1e-9)
    assert walked.recomputed["matmul"] == walked.total["matmul"]


def test_slower_computing_hides_more_of_a_message(program_of):
    text = """
%main (a: bf16[8192,8192], s: f32[100000000]) -> f32[800000000] {
  %a = bf16[8192,8192] parameter(0)
  %s = f32[100000000] parameter(1)
  %g = (f32[100000000], f32[800000000]) all-gather-start(%s), replica_groups=[1,8]<=[8], dimensions={0}
  %m = bf16[8192,8192] dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %d = f32[800000000] all-gather-done(%g)
}"""
    timed = {
        "matmul": MeasuredClass(measured_seconds=3.0, predicted_seconds=2.0),
        "all-gather": MeasuredClass(measured_seconds=1.0, predicted_seconds=1.0),
    }
    slower = machine_with(run(3.5, {"matmul": 2.0, "all-gather": 0.5}, timed))
    executions, axes = executions_of(program_of(text)), (("data", 8),)
    plain, walked = (walk(machine, executions, axes) for machine in (machine_of(FLEET, None), slower))
    name = next(iter(plain.transfers))
    assert walked.total[name] == pytest.approx(plain.total[name], rel=0.05)
    assert walked.total["matmul"] > 1.4 * plain.total["matmul"]
    assert walked.exposed[name] < plain.exposed[name]  # what computing loses, waiting gains
    assert walked.seconds == pytest.approx(walked.total[name] + walked.exposed["launch"], rel=1e-3)


@pytest.fixture
def predicted(program_of, ledger_with, compiled_for):
    def make(*measured, fleet="8xH100", text=STEP):
        fleet = Fleet.parse(fleet)
        kept = MeasuredRuns(chip=fleet.chip.name, runs=measured) if measured else None
        executions = executions_of(program_of(text))
        return predict(executions, ledger_with(), compiled_for(fleet.name), fleet, measured=kept)

    return make


def exposed(prediction):
    return {each.name.partition("[")[0]: each.exposed_seconds for each in prediction.slices}


def test_a_prediction_says_that_it_uses_measured_steps_and_its_interval_is_narrower(predicted):
    plain = predicted()
    seconds = 1.15 * plain.step_seconds.expected
    made = predicted(run(seconds, exposed(plain)))
    assert made.step_seconds.expected == pytest.approx(seconds, rel=0.05)
    assert "times factors of 1 measured step kept on this machine (2026-11-23): " in made.basis
    assert "one measured step does not tell the classes of its work apart" in made.interval_reasons
    low, high = made.step_seconds.low / made.step_seconds.expected, plain.step_seconds.low
    assert low > high / plain.step_seconds.expected
    assert made.step_seconds.low < seconds < made.step_seconds.high


def test_steps_far_from_usual_move_all_classes_where_those_near_it_are_shared_with_noise():
    mixes = ({"matmul": 1.0}, {"matmul": 0.6, "attention": 0.4}, {"matmul": 0.5, "memory-bound": 0.5})
    near = factors_of(*(run(1.06, mix) for mix in mixes)).shared
    far = factors_of(*(run(2.0, mix) for mix in mixes)).shared
    assert 1.02 < near < 1.06
    assert far == pytest.approx(2.0, rel=0.05)


def test_where_no_published_run_is_known_a_machine_may_be_unusual():
    found = {}
    for chip in ("H100", "A10"):
        fleet = Fleet.parse(f"8x{chip}")
        one = run(1.3, {"attention": 1.0}, fleet=fleet.name, rates=rates_digest(fleet, None))
        found[chip] = machine_with(one, fleet=fleet).factors.shared
    assert found["A10"] > 1.15 > found["H100"] > 1.0


def test_the_measured_step_itself_is_predicted_as_it_was_measured(predicted):
    plain = predicted()
    for factor in (0.8, 1.3, 2.5):
        made = predicted(run(factor * plain.step_seconds.expected, exposed(plain)))
        # One step is believed up to its noise: 0.047, beside what products and all classes vary by.
        assert made.step_seconds.expected == pytest.approx(factor * plain.step_seconds.expected, rel=0.03)


def test_no_number_of_measured_steps_makes_the_interval_narrower_than_what_lies_between_programs(predicted):
    plain = predicted()
    many = [run(plain.step_seconds.expected, exposed(plain), fingerprint=str(n)) for n in range(200)]
    interval = predicted(*many).step_seconds
    tail = t.ppf(0.95, 2) * NOISE
    assert math.log(interval.high / interval.expected) == pytest.approx(tail, rel=0.1)
    assert math.log(interval.high / interval.expected) > tail


def test_work_of_which_nothing_was_measured_keeps_the_interval_wide(predicted):
    plain = predicted()
    same, other = run(plain.step_seconds.expected, exposed(plain)), run(1.0, {"host-transfer": 1.0})
    known, unknown = predicted(same).step_seconds, predicted(other).step_seconds
    assert unknown.expected == pytest.approx(plain.step_seconds.expected, rel=0.01)
    assert math.log(unknown.high / unknown.expected) > 1.5 * math.log(known.high / known.expected)


def test_steps_set_aside_are_a_reason_and_change_no_time(predicted):
    plain = predicted()
    made = predicted(run(9.0, exposed(plain), rates="others"))
    assert made.step_seconds == plain.step_seconds
    assert any("set aside: calibrate again" in reason for reason in made.interval_reasons)


def test_a_measured_step_bounds_the_time_on_a_chip_without_published_runs(predicted):
    plain = predicted(fleet="8xMI300X")
    assert plain.step_seconds.high is None
    fleet = Fleet.parse("8xMI300X")
    digest = rates_digest(fleet, None)
    made = predicted(run(plain.step_seconds.expected, exposed(plain), rates=digest), fleet="8xMI300X")
    assert made.step_seconds.low < made.step_seconds.expected < made.step_seconds.high


def test_measured_runs_are_read_back_as_written_and_a_damaged_text_is_refused_in_words():
    one = run(1.2, {"matmul": 1.0}, {"matmul": MeasuredClass(measured_seconds=1.0, predicted_seconds=2.0)})
    kept = MeasuredRuns(chip="H100", runs=(one,))
    assert MeasuredRuns.from_json(kept.to_json()) == kept
    fields = json.loads(kept.to_json())
    for damage, words in (
        ({"schema": 2}, "schema 2"),
        ({"runs": [{**fields["runs"][0], "measured_seconds": -1.0}]}, "measured_seconds = -1.0"),
        ({"runs": [{**fields["runs"][0], "more": 1}]}, "more"),
        ({"runs": [{**fields["runs"][0], "what": "guess"}]}, "guess"),
        ({"runs": [{**fields["runs"][0], "exposed_seconds": {"matmul": -2.0}}]}, "exposed_seconds.matmul"),
        (
            {"runs": [{**fields["runs"][0], "recomputed_seconds": {"matmul": 2.0}}]},
            "recomputed_seconds.matmul",
        ),
    ):
        with pytest.raises(InputError, match=words):
            MeasuredRuns.from_json(json.dumps({**fields, **damage}))
    with pytest.raises(InputError, match="this is not a list of measured runs"):
        MeasuredRuns.from_json(kept.to_json()[:-20])


def test_a_run_takes_the_place_of_an_earlier_one_of_the_same_program_on_the_same_fleet():
    kept = MeasuredRuns(chip="H100", runs=()).adding(run(1.0, {"matmul": 1.0}))
    assert len(kept.adding(run(2.0, {"matmul": 1.0})).runs) == 1
    assert kept.adding(run(2.0, {"matmul": 1.0})).runs[0].measured_seconds == 2.0
    assert len(kept.adding(run(2.0, {"matmul": 1.0}, fleet="64xH100")).runs) == 2
    assert len(kept.adding(run(2.0, {"matmul": 1.5})).runs) == 2
