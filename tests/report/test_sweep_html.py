import dataclasses
import json
from pathlib import Path

from meshwright.report import write_sweep
from meshwright.results import Sweep, SweepRun


def a_sweep(tmp_path: Path, *losses, value="1e-3"):
    runs = []
    for number, loss in enumerate(losses, start=1):
        folder = tmp_path / f"{number:04d}-x"
        folder.mkdir()
        lines = [{"step": step, "loss": 5.0 - step} for step in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(
            SweepRun(
                values={"optimizer.learning_rate": f"{number}e-3" if number > 1 else value},
                folder=folder,
                steps=3,
                held_out_loss=loss,
                loss=loss,
                step_seconds=0.1,
                tokens_per_second=10.0,
                failed="" if loss else "the loss is <nan>",
                earlier=False,
            )
        )
    return Sweep(
        name="nano",
        fleet="1xCPU",
        folder=tmp_path,
        keys=("optimizer.learning_rate",),
        runs=tuple(runs),
        not_run=0,
        stopped=False,
    )


def test_the_page_has_table_pictures_and_what_failed(tmp_path):
    page = write_sweep(a_sweep(tmp_path, 2.5, 2.25, None)).read_text()
    assert "Best: learning_rate=2e-3, held-out loss 2.2500" in page
    assert page.index("2.2500</td>") < page.index("2.5000</td>")
    assert page.count("<svg") == 2 * 2  # each for a wide and for a narrow page
    assert "the loss is &lt;nan&gt;" in page
    assert "http" not in page.replace("http-equiv", "")  # needs nothing from elsewhere


def test_values_are_escaped(tmp_path):
    page = write_sweep(a_sweep(tmp_path, 2.5, value="<script>")).read_text()
    assert "<script>" not in page


def test_a_sweep_without_a_finished_run_has_no_picture(tmp_path):
    sweep = dataclasses.replace(a_sweep(tmp_path, None))
    page = write_sweep(sweep).read_text()
    assert "<svg" not in page
    assert "Not finished" in page
