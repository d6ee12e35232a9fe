"""`plan` compiles the most promising candidates, and recommends only what it has compiled."""

import json
import re
import time
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import meshwright as mw
from meshwright.errors import CompileError, InputError
from meshwright.planned import PlanProgress

RUN = {"model.num_layers": 1}  # compiles in two thirds of the time of its two layers
FIXED = ["offload=none", "pipeline=1f1b", "inner=tensor"]


@pytest.fixture(scope="module")
def made(forked_workers):
    return mw.plan(
        "bytes-nano",
        on="8xH100",
        budget_seconds=1,
        overrides=RUN,
        search=[*FIXED, "context=1"],
        run=mw.RunLength(tokens="1B", price_per_device_hour=2),
    )


def test_the_winner_is_the_fastest_compiled_candidate_that_fits(made):
    assert made.winner is not None
    assert made.best is not None
    assert made.winner.fits is True
    assert len(made.candidates) >= 2
    assert made.winner.step_seconds.expected == min(
        c.step_seconds.expected for c in made.candidates if c.fits
    )
    weighed = mw.weigh("bytes-nano", on="8xH100", overrides=RUN | made.winner.overrides)
    assert weighed.compiled.fingerprint == made.best.compiled.fingerprint
    assert weighed.step_seconds == made.winner.step_seconds.expected
    assert weighed.ledger.memory.reserved_bytes == made.winner.reserved_bytes


def test_every_candidate_is_counted_once(made):
    searched = [each for each in made.candidates if "layer_loop" not in each.overrides]
    assert len(made.candidates) - len(searched) <= 1  # the best, once more without its loop
    assert made.num_considered > len(searched)
    too_large = made.removed.get("state and block inputs alone do not fit", 0)
    assert made.num_open + too_large + len(searched) == made.num_considered


@pytest.mark.once
def test_its_toml_is_a_run_that_weighs_to_the_same_program(made, tmp_path):
    file = tmp_path / "planned.toml"
    file.write_text(made.to_toml())
    assert tomllib.loads(file.read_text())["layout"] == made.winner.layout
    again = mw.weigh(str(file), on="8xH100")
    assert again.compiled.fingerprint == made.best.compiled.fingerprint


def test_its_text_names_the_winner_the_cost_and_how_much_was_searched(made):
    text = str(made)
    assert f"BEST: {made.winner.layout}, {made.winner.settings}" in text
    assert "1B tokens" in text.replace("1.00B", "1B")
    assert "device-hours" in text
    assert f"{made.num_considered:,} candidates of {made.num_layouts:,} layouts" in " ".join(text.split())
    assert made.ended in " ".join(text.split())


def test_its_json_has_every_candidate_in_order(made):
    fields = json.loads(made.to_json())
    assert fields["best"]["layout"] == made.winner.layout
    assert fields["num_compiled"] == len([c for c in made.candidates if not c.failed])
    times = [c["prediction"]["step_seconds"]["expected"] for c in fields["candidates"] if c["fits"]]
    assert times == sorted(times)


def test_every_field_of_its_json_is_documented_and_every_documented_field_is_there(made):
    page = (Path(__file__).parents[1] / "docs/how-to/planning.md").read_text().partition("## JSON")[2]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    fields = made.to_dict()
    of_fleets = {"fastest", "cheapest", "refused", "plans"}
    assert {name for name in documented if name[0] != "." and "[]" not in name} == (
        set(fields) - {"candidates"}
    ) | of_fleets
    each = {name.rpartition(".")[2] for name in documented if name[0] == "." or "[]" in name}
    assert each == set(fields["candidates"][0])


def test_the_front_has_no_candidate_that_another_beats_in_both(made):
    points = [(c.step_seconds.expected, c.reserved_bytes) for c in made.candidates if not c.failed]
    front = [(c.step_seconds.expected, c.reserved_bytes) for c in made.front]
    assert front
    assert not any(x < seconds and y < size for seconds, size in front for x, y in points)


def test_its_page_has_a_dot_for_each_candidate_and_shows_all_without_a_script(made):
    page = made.to_html()
    wide = page.partition('<svg class="wide"')[2].partition("</svg>")[0]
    assert wide.count("<circle") == len([c for c in made.candidates if not c.failed])
    assert made.winner.layout in page
    body = page.partition("<script>")[0]
    assert all(candidate.layout in body for candidate in made.candidates)
    assert "http" not in page.replace("http://www.w3.org", "")


@pytest.mark.once
def test_a_second_call_goes_on_from_what_the_first_compiled(made, forked_workers):
    again = mw.plan(
        "bytes-nano", on="8xH100", budget_seconds=0.1, overrides=RUN, search=[*FIXED, "context=1"]
    )
    assert [candidate.cached for candidate in again.candidates].count(True) >= len(made.candidates) / 2
    assert again.winner.step_seconds.expected <= made.winner.step_seconds.expected


@pytest.mark.once
def test_a_candidate_whose_compilation_fails_is_reported_and_the_others_go_on(monkeypatch, forked_workers):
    from meshwright.programs import _configured_plan

    monkeypatch.setenv("MESHWRIGHT_PLAN_WORKERS", "1")
    real, calls = _configured_plan.weigh_run, []

    def weigh(*args, **keywords):
        calls.append(args)
        if len(calls) == 2:
            raise CompileError("the worker died", hint="none")
        return real(*args, **keywords)

    monkeypatch.setattr(_configured_plan, "weigh_run", weigh)
    made = mw.plan("linear", on="2xH100", budget_seconds=60)
    assert [c.failed for c in made.candidates if c.failed] == ["the worker died"]
    assert made.winner is not None
    assert "the worker died" in str(made)


@pytest.mark.once
def test_progress_tells_the_best_so_far(forked_workers):
    events = []
    made = mw.plan("linear", on="2xH100", budget_seconds=1, on_event=events.append)
    assert all(isinstance(event, PlanProgress) for event in events)
    assert events[0].best is None
    assert events[-1].num_considered == made.num_considered


@pytest.mark.once
def test_what_still_runs_when_the_time_is_over_is_cut_off(monkeypatch, forked_workers):
    monkeypatch.setattr("meshwright.api._plan_runner.LEAST_GRACE_SECONDS", 0.0)
    changed = {"batch.sequences": 24}  # of a size that no other test compiles
    made = mw.plan("linear", on="2xH100", budget_seconds=0.1, overrides=changed)
    assert made.winner is None
    assert all("cut off" in each.failed for each in made.candidates)
    assert "NONE COMPILED" in str(made)
    assert made.ended == "the budget of 0.1 s is spent"


@pytest.mark.once
def test_the_simplest_layouts_are_always_compiled(made):
    tried = {(each.layout, each.overrides["remat"]) for each in made.candidates}
    assert {("fsdp=8", "full"), ("fsdp=8", "none")} <= tried
    assert {remat for layout, remat in tried if re.fullmatch(r"fsdp=\d,tensor=\d", layout)} >= {
        "full",
        "none",
    }
    assert made.simplest in made.fitting
    assert "SIMPLEST: " in str(made)
    assert str(made).splitlines()[1].startswith("COMPILED: ")


@pytest.mark.once
def test_memory_is_counted_as_weigh_counts_it(made):
    memory, winner = made.best.ledger.memory, made.winner
    assert (winner.usable_bytes, winner.allowance_bytes) == (memory.usable_bytes, memory.allowance_bytes)
    verdict = next(line for line in str(made.best).splitlines() if line.startswith("FITS"))
    assert verdict in " ".join(str(made).split())


@pytest.mark.once
def test_ctrl_c_returns_what_was_compiled_so_far(forked_workers):
    def stop(event):
        if event.num_compiled:
            raise KeyboardInterrupt

    made = mw.plan("linear", on="2xH100", budget_seconds=60, on_event=stop)
    assert made.interrupted
    assert made.winner is not None


@pytest.mark.once
def test_a_list_price_is_used_with_its_provider_and_date(made, forked_workers):
    fix = [*FIXED, "context=1"]
    listed = mw.plan(
        "bytes-nano",
        on="8xH100",
        budget_seconds=0.1,
        overrides=RUN,
        search=fix,
        run=mw.RunLength(tokens="1B"),
    )
    assert listed.fleet.price_per_device_hour
    assert "20" in listed.price
    assert listed.price in " ".join(str(listed).split())
    assert made.price == ""


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"budget_seconds": 0}, "cannot be spent"),
        ({"search": ["tensor=3"]}, "no layout of bytes-nano on 8xH100 is legal"),
        ({"search": ["data=8", "data=4,8"]}, "data is given twice"),
        ({"search": ["width=3"]}, "nothing that the planner chooses"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_compiling(keywords, words):
    with pytest.raises(InputError, match=words):
        mw.plan("bytes-nano", on="8xH100", **keywords)


OWN = """
from typing import Literal
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def program(mesh, *, times: Literal[1, 2] = 1, narrow: bool = False):
    def step(w, x):
        for _ in range(times):
            x = x @ (w.astype(jnp.bfloat16) if narrow else w)
        return x.sum()
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    x = jax.ShapeDtypeStruct((6, 1024), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return step, (w, x)

program.axes = ("data", "model")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_program.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "own_program:program"


def test_a_function_is_planned_over_its_meshes_and_knobs(own, forked_workers):
    length = mw.RunLength(tokens_per_step=6, tokens=600)
    made = mw.plan(own, on="4xH100", budget_seconds=60, search=["narrow=False"], run=length)
    assert made.best.num_steps == 100
    assert made.num_considered == 6  # three meshes, two values of `times`
    by_mesh = {(c.layout, c.overrides["times"]): c for c in made.candidates}
    # Six rows do not divide over four devices: that mesh alone is refused, and the others go on.
    assert "data=4,model=1" in {layout for (layout, _), c in by_mesh.items() if c.failed}
    assert made.winner.overrides["times"] == "1"
    weighed = mw.weigh(own, on="4xH100", layout=made.winner.layout, overrides={"times": 1})
    assert weighed.compiled.fingerprint == made.best.compiled.fingerprint
    assert "NOT THE SAME WORK" in str(made)
    assert made.to_dict()["config"] == own
    assert "list price" in made.price, "a price that was not given has a source"
    assert made.winner.layout in made.to_html()
    with pytest.raises(InputError, match="is not a configuration that `train` could run"):
        made.to_toml()


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"search": ["times=3"]}, "none of its values"),
        ({"search": ["model=x"]}, "no size of a mesh axis"),
        ({"run": mw.RunLength(tokens="1B")}, "the number of tokens in its step is not known"),
        ({"search": ["data=3"]}, "no mesh of data, model has the 4 devices"),
    ],
)
def test_what_a_function_cannot_have_is_refused(own, keywords, words, forked_workers):
    with pytest.raises(InputError, match=words):
        mw.plan(own, on="4xH100", **keywords)


def test_a_functions_knobs_can_be_weighed_by_name(own, forked_workers):
    weighed = mw.weigh(own, on="2xH100", layout="data=2,model=1", overrides=["times=2", "narrow=true"])
    assert weighed.name == "own_program:program(times=2, narrow=true)"
    assert weighed.ledger.flops.model == 2 * 2 * 6 * 1024 * 1024
    with pytest.raises(InputError, match="declares no knob 'speed'"):
        mw.weigh(own, on="2xH100", overrides={"speed": 9})
    with pytest.raises(InputError, match="times = '7' is no value"):
        mw.weigh(own, on="2xH100", overrides={"times": 7})


@pytest.mark.once
def test_weigh_names_the_command_that_plans(forked_workers):
    command = "meshwright plan bytes-nano --on 8xH100 --set model.num_layers=1"
    weighed = mw.weigh("bytes-nano", on="8xH100", overrides={**RUN, "remat": "full"})
    assert weighed.plan_command == command
    assert f"PLAN: `{command}` searches other layouts" in " ".join(str(weighed).split())
    assert mw.weigh("linear", on="1xH100").plan_command is None


@pytest.mark.wide
@pytest.mark.once
def test_all_knobs_that_are_not_named_can_be_kept(forked_workers):
    made = mw.plan(
        "bytes-nano",
        on="8xH100",
        budget_seconds=60,
        overrides=RUN,
        search=["rest", "remat=full,dots-attention"],
    )
    run = mw.load("bytes-nano", RUN)
    assert made.num_considered == 2
    assert made.candidates[0].overrides["remat"] == run.remat, "the run as it stands comes first"
    assert {c.overrides["remat"] for c in made.candidates} <= {"full", "dots-attention"}
    for candidate in made.candidates:
        assert candidate.overrides["zero1"] == run.zero1
        assert candidate.overrides["offload"] == run.offload
    same = mw.plan("bytes-nano", on="8xH100", overrides=RUN, search={"rest": True, "remat": "full"})
    assert same.num_considered == 1


@pytest.mark.once
@pytest.mark.parametrize(
    ("how", "budget", "tried", "few"),
    [
        pytest.param("auto", 60, True, False, marks=pytest.mark.wide),
        pytest.param("unroll", 60, True, False, marks=pytest.mark.wide),
        ("unroll", 60, True, True),
        pytest.param("keep", 60, False, True, marks=pytest.mark.wide),
        pytest.param("auto", 5, False, False, marks=pytest.mark.wide),
    ],
)
def test_a_plan_tries_its_best_without_the_loop_over_layers(how, budget, tried, few, forked_workers):
    """Seventeen layers are too many to unroll without a question, and so are layers of two kinds."""
    two_kinds = {"model.num_layers": 4, "model.window": 16, "model.global_every": 2}
    deep = {**(two_kinds if few else {"model.num_layers": 17}), "layer_loop": how}
    made = mw.plan("bytes-nano", on="1xH100", overrides=deep, budget_seconds=budget, search="rest")
    looped, *unrolled = made.candidates
    assert "layer_loop" not in looped.overrides
    assert bool(unrolled) == tried
    for candidate in unrolled:
        assert candidate.overrides == {**looped.overrides, "layer_loop": "unroll"}
        assert candidate.settings == f"{looped.settings}, layers unrolled"
        assert made.winner is candidate
        assert made.best.step_seconds == candidate.step_seconds.expected < looped.step_seconds.expected
        assert made.best.config.layer_loop == "unroll"


@pytest.mark.once
def test_the_program_without_its_loop_takes_no_more_time_than_is_left(monkeypatch, forked_workers):
    """Forty-eight layers of experts took a minute more than the budget, which candidates may."""
    limits = []

    def until(is_over):
        limits.append(is_over)
        return nullcontext()

    monkeypatch.setattr("meshwright.api._plan_runner.compiling_until", until)
    deep = {"model.num_layers": 4, "model.window": 16, "model.global_every": 2, "layer_loop": "unroll"}
    mw.plan("bytes-nano", on="1xH100", overrides=deep, budget_seconds=60, search="rest")
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + 61)
    _, of_unrolled = limits
    assert not of_unrolled()
    monkeypatch.setattr("meshwright.api._plan_runner.time", late)
    assert of_unrolled()


@pytest.mark.once
def test_one_knob_may_be_given_as_a_text(forked_workers):
    fixed = mw.plan("linear", on="2xH100", budget_seconds=0.1, search="fsdp=2")
    assert {candidate.layout for candidate in fixed.candidates} == {"fsdp=2"}


@pytest.mark.parametrize(
    ("name", "on", "words"),
    [
        ("bytes-10m", "2xH100 reserve 79GiB", "with 79.0 GiB of each device reserved"),
        ("llama3-405b", "1xV100-16GB", "is more than a device has"),
    ],
)
def test_where_the_bounds_leave_nothing_it_does_not_blame_the_budget(name, on, words):
    made = mw.plan(name, on=on, budget_seconds=1, overrides={"batch.sequences": 8})
    text = " ".join(str(made).split())
    assert "NOTHING FITS: the least that each of" in text
    assert words in text
    assert "budget" not in text
    assert made.ended == "none can fit"


@pytest.mark.once
def test_when_its_time_is_over_a_plan_looks_for_nothing_more(monkeypatch, forked_workers):
    """A plan of 60 s reckoned larger fleets for five minutes, with -0.9 s left to try them in."""
    passed, searches = [0.0], set()
    late = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr("meshwright.api._plan.time", late)

    def on_event(progress):
        searches.add(progress.of)
        passed[0] = 1000.0 * bool(progress.running)

    small = {"offload": "none", "model.num_layers": 2, "batch.sequences": 64}
    how = {"search": "rest", "overrides": small, "on_event": on_event}
    made = mw.plan("gpt2-124m", on="1xH100 reserve 76500MiB", budget_seconds=30, **how)
    assert made.winner is None
    assert searches == {""}
    assert made.suggestions == ()
    assert made.ended == "no other candidate promises a saving"
    assert "the plan's time is over" in " ".join(str(made).split())


@pytest.mark.wide
def test_where_nothing_else_fits_the_layers_wait_in_the_hosts_memory(forked_workers):
    search = ["remat=full", "microbatch=1", "zero1=false"]
    made = mw.plan("gpt2-124m", on="1xH100 reserve 78950MiB", budget_seconds=20, search=search)
    assert made.winner is not None
    assert made.winner.overrides["offload"] in ("state", "all")
    assert all(each.fits is False for each in made.candidates if each.overrides["offload"] == "both")
    assert "parameters wait in the hosts' memory, for nothing else" in " ".join(str(made).split())
    assert 'offload = "' in made.to_toml()
