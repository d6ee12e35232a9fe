from meshwright.report._html_sections import happened_section, metrics_figures, seconds_section
from meshwright.report._run_files import RunFiles


def files(**fields) -> RunFiles:
    empty = {"name": "run", "config": None, "weighing": None, "metrics": (), "notices": ()}
    return RunFiles(**{**empty, "measurement": None, "reconciliation": None, "notes": (), **fields})


def test_what_happened_is_a_table_and_nothing_where_nothing_did():
    assert happened_section(()) == ""
    page = happened_section([{"step": 3, "kind": "bad step", "message": "the <loss> is nan", "hint": ""}])
    assert "What happened" in page
    assert "the &lt;loss&gt; is nan" in page


def test_of_many_notices_the_last_are_shown():
    page = happened_section([{"step": n, "kind": "spike", "message": f"number {n}."} for n in range(60)])
    assert "The first 10 are left out" in page
    assert "number 59." in page
    assert "number 9." not in page


def test_seconds_by_phase_add_up(measurement):
    page = seconds_section(measurement(seconds_by_phase={"compile": 1.0, "step": 3.0}))
    assert "Goodput 75.0 %" in page
    assert "25.0 %" in page
    assert seconds_section(None) == ""


def test_each_held_out_metric_beside_the_loss_has_its_curve():
    metrics = (
        {"step": 0, "held_out_loss": 2.3, "held_out_accuracy": 0.1},
        {"step": 1, "loss": 2.2, "accuracy": 0.2},
        {"step": 2, "loss": 2.0, "accuracy": 0.4, "held_out_loss": 2.0, "held_out_accuracy": 0.5},
    )
    (figure,) = metrics_figures(files(metrics=metrics))
    assert "accuracy by step" in figure
    assert list(metrics_figures(files(metrics=metrics[1:2]))) == []
