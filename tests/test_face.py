"""The Python face: what comes in, how results print, and what they can be written as."""

import importlib.metadata
import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.contrib.sweeps import SweepRunStarted
from meshwright.results import FirstStepsCompared, Phase


@pytest.fixture(scope="module")
def weighing():
    return mw.weigh("linear", on="8xH100")


def test_a_config_is_loaded_with_overrides_as_a_dict_or_as_texts():
    by_dict = mw.load("bytes-nano", {"batch.sequences": 16, "model": {"num_layers": 2}, "precision": "fp32"})
    by_text = mw.load("bytes-nano", ["batch.sequences=16", "model.num_layers=2", "precision=fp32"])
    assert by_dict == by_text
    assert mw.load(by_dict, "model.num_layers=3").model.num_layers == 3
    assert mw.load(by_dict, {"checkpoint.every_steps": None}).checkpoint.every_steps is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"model.num_layerz": 2}, "num_layerz"),
        ({"": 2}, "override '' is not section.key"),
        ({"model.a.b": 2}, "override 'model.a.b=2': model.a.b is nested too deeply"),
        ({"model.num_layers": "two"}, "num_layers"),
        ("model.num_layers", "is not section.key=value"),
    ],
)
def test_an_override_that_is_wrong_is_refused_in_words(overrides, words):
    with pytest.raises(mw.InputError) as refused:
        mw.load("bytes-nano", overrides)
    assert words in str(refused.value)


def test_a_weighing_prints_as_its_screen_and_without_colours(weighing):
    text = str(weighing)
    assert text.startswith("linear on 8xH100")
    assert "FITS" in text
    assert "\x1b" not in text
    assert "to_html" in text.splitlines()[-1]
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_weighing_is_a_page_in_a_notebook_and_in_a_file(weighing, tmp_path):
    page = weighing.to_html(tmp_path / "w.html")
    assert (tmp_path / "w.html").read_text() == page
    assert page.startswith("<!doctype html>")
    frame = weighing._repr_html_()
    assert frame.startswith("<iframe")
    assert "<!doctype" not in frame, "the page is escaped inside the frame"
    with pytest.raises(mw.InputError, match="cannot write"):
        weighing.to_html(tmp_path / "none" / "w.html")


def test_the_repr_of_a_result_is_one_line(weighing, tmp_path):
    import jax.numpy as jnp

    results = [
        weighing,
        mw.explain(weighing),
        mw.clock(jnp.sin, jnp.ones(3), repeats=1),
        mw.footprint([jnp.ones(3)]),
        mw.live(),
        mw.memory(),
        *mw.matmul_mfu(size=64),
        mw.train("linear", on="1xCPU", steps=4, folder=tmp_path / "run"),
        mw.reconcile(tmp_path / "run"),
        mw.sweep("linear", {"seed": [1, 2]}, on="1xCPU", steps=2, folder=tmp_path / "s"),
        mw.plan("linear", on="2xCPU", budget_seconds=1),
    ]
    for result in results:
        assert repr(result).startswith(f"<{type(result).__name__}: ")
        assert len(repr(result).splitlines()) == 1
        assert len(repr(result)) < 300
    assert repr(weighing).startswith("<Weighing: linear on 8xH100, layout data=8: fits, ")
    assert str(weighing).splitlines()[0].startswith("linear on 8xH100, layout data=8")


def test_figures_of_a_weighing_have_short_names(weighing):
    prediction = weighing.prediction
    assert weighing.mfu == prediction.mfu
    assert weighing.tokens_per_second == 8 * prediction.tokens_per_second_per_device
    assert weighing.cost is None
    priced = mw.weigh("linear", on="8xH100", run=mw.RunLength(price_per_device_hour=2.0))
    assert priced.cost == priced.run_total.cost.expected


def test_the_package_says_its_version_its_types_and_its_names_alone():
    assert mw.__version__ == importlib.metadata.version("meshwright")
    assert (Path(mw.__file__).parent / "py.typed").exists()
    names = [name for name in dir(mw) if not name.startswith("__")]
    assert names == sorted(mw.__all__)
    assert not {"sys", "TYPE_CHECKING", "lazy", "plugins"} & set(names)
    scope: dict[str, object] = {}
    exec("from meshwright import *", scope)
    assert set(mw.__all__) <= set(scope)


def test_a_notebook_shows_the_line_the_message_and_the_hint_of_an_error():
    with pytest.raises(mw.InputError) as refused:
        mw.weigh("linear", on="8xH1000")
    line, message, hint = refused.value._render_traceback_()
    assert line.endswith('mw.weigh("linear", on="8xH1000")')
    assert (message, hint) == ("InputError: unknown chip 'H1000'", "  hint: did you mean 'H100'?")


def test_a_weighing_is_json_and_a_trace(weighing, tmp_path):
    assert json.loads(weighing.to_json())["fits"] is True
    weighing.to_perfetto(str(tmp_path / "w.json"))
    assert json.loads((tmp_path / "w.json").read_text())["traceEvents"]
    assert weighing.step_seconds == weighing.prediction.step_seconds.expected


def test_changes_print_as_their_table_and_stay_a_tuple():
    events: list[Phase] = []
    weighing = mw.weigh("linear", on="8xH100", on_event=events.append)
    assert Phase(name="reckoning") in events
    changes = mw.explain(weighing)
    assert isinstance(changes, tuple)
    assert str(changes).startswith("What would help")
    assert "<td data-head" in changes.to_html()
    assert json.loads(changes.to_json())["changes"] == [change.to_dict() for change in changes]


@pytest.mark.once
def test_a_run_emits_one_stream_of_events_and_prints_as_its_report(tmp_path):
    events: list[object] = []
    run = mw.train("linear", on="1xCPU", steps=12, folder=tmp_path / "run", on_event=events.append)
    kinds = {type(event).__name__ for event in events}
    assert {"Phase", "Started", "StepDone", "FirstStepsCompared", "Evaluated", "Finished"} <= kinds
    (compared,) = (event for event in events if isinstance(event, FirstStepsCompared))
    assert "step seconds" in {row.quantity for row in compared.rows}
    assert "12 steps" in str(run)
    assert run.to_html().startswith("<!doctype html>")
    assert json.loads(run.to_json())["measurement"]["steps"] == 12
    assert mw.reconcile(run) == mw.reconcile(run.folder) == run.reconciliation
    with pytest.raises(mw.InputError, match="cannot be read"):
        mw.reconcile(tmp_path / "no-run")


@pytest.mark.once
def test_a_sweep_takes_values_as_a_dict_and_prints_as_its_table(tmp_path):
    events: list[object] = []
    over = {"optimizer.learning_rate": [0.1, 0.01], "seed": 3}
    sweep = mw.sweep("linear", over, on="1xCPU", steps=2, folder=tmp_path / "s", on_event=events.append)
    assert [run.values for run in sweep.runs] == [
        {"optimizer.learning_rate": "0.1"},
        {"optimizer.learning_rate": "0.01"},
    ]
    started = [event for event in events if isinstance(event, SweepRunStarted)]
    assert [(each.number, each.total) for each in started] == [(1, 2), (2, 2)]
    assert "held-out loss" in str(sweep)
    assert "Sweep of linear" in sweep.to_html()
    with pytest.raises(mw.InputError, match="twice"):
        mw.sweep("linear", {"seed": [1, 1]})
    with pytest.raises(mw.InputError, match="nothing to sweep"):
        mw.sweep("linear", {"seed": 1})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"program": "linear", "on": None}, "no fleet is named"),
        ({"program": 3, "on": "8xH100"}, "int is no program"),
        ({"program": lambda x: x, "on": "8xH100"}, "function is no program"),
    ],
)
def test_what_cannot_be_weighed_is_refused_in_words(given, words):
    with pytest.raises(mw.InputError, match=words):
        mw.weigh(given.pop("program"), **given)


def test_a_torch_module_is_weighed_by_the_same_verb():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(8, 4)
    step = mw.torch_step(module, torch.zeros(2, 8), optimizer=torch.optim.SGD)
    alone, weighing = mw.weigh(step, on="1xH100"), mw.weigh(step, on="8xH100")
    assert isinstance(weighing, mw.Weighing)
    assert alone.ledger.flops.by_phase["forward"] == 2 * 2 * 8 * 4
    assert weighing.ledger.flops.by_phase["forward"] == 8 * 2 * 2 * 8 * 4
    assert "rule_of_thumb" not in weighing.to_dict(), "what it lacks is absent"
    with pytest.raises(mw.InputError, match="takes no simulate"):
        mw.weigh(step, on="8xH100", simulate=True)
    with pytest.raises(mw.InputError, match="there is no compiled program"):
        _ = weighing.compiled
    with pytest.raises(mw.InputError, match="Linear is no program") as refused:
        mw.weigh(module, on="8xH100")
    assert "mw.torch_step(module, *inputs)" in refused.value.hint
