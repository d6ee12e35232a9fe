"""Sealed predictions: made without a look at what was measured, opened once, if nothing has changed."""

import csv
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _published_seal
import predict_published
from _published_table import INPUTS, MEASURED, rows_of
from _record import RECORDS
from _row_kinds import kind_of

from tests.benchmarks.rows import SIZES

ROOT = Path(__file__).parents[2]
ROW = {
    "source": "somebody's table",
    "date": "2026-10",
    "model": "Llama-3-8B",
    **SIZES,
    "accelerator": "H100-80GB-SXM",
    "n_devices": "64",
    "devices_per_node": "8",
    "precision": "bf16",
    "sharding": "FSDP2",
    "fsdp": "64",
    "micro_batch_per_device": "1",
    "act_ckpt": "full",
}
ROWS = [{**ROW, "id": f"new-{n}", "global_batch_seqs": str(64 * n)} for n in range(1, 7)]
MEASUREMENT = {"step_time_s": "2.0", "peak_mem_gib_per_device": "48.5"}


def table(path, rows):
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def stub(row):
    """A prediction without a compiler, which fails where a measured column was read."""
    assert row.measured is None
    told = {"id": row.id, "source": row.source, "kind": kind_of(row.id), "chip": row.fleet.chip.name}
    told |= {"num_devices": 64, "scale": "9 to 64", "layout": row.config.layout, "remat": row.config.remat}
    told |= {"standard": True, "sustained": True, "notes": [], "reserved_gib": 50.0}
    return told | {"predicted_seconds": 2.2, "low_seconds": 1.9, "high_seconds": 2.5}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Call predict_published.py with words; return what it prints, or the message that it ends with."""
    records, benchmarks = tmp_path / "records", tmp_path / "benchmarks"
    records.mkdir()
    benchmarks.mkdir()
    (benchmarks / "code.py").write_text("pass\n")
    monkeypatch.setattr(_published_seal, "RECORDS", records)
    monkeypatch.setattr(_published_seal, "BENCHMARKS", benchmarks)
    monkeypatch.setattr(predict_published, "predicted", stub)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["predict_published.py", *map(str, words)])
        try:
            predict_published.main()
        except SystemExit as end:
            return str(end.code)
        return capsys.readouterr().out

    return call


@pytest.fixture
def seal(command, tmp_path):
    path = tmp_path / "records" / "seal.json"
    assert "Sealed 6 rows" in command("--runs", table(tmp_path / "blank.csv", ROWS), "--seal", path)
    return path


def measured(tmp_path, **changes):
    return table(tmp_path / "measured.csv", [{**row, **MEASUREMENT, **changes} for row in ROWS])


def test_a_blind_reader_keeps_what_goes_into_a_prediction_and_nothing_else(tmp_path):
    secret = {column: "secret" for column in (*MEASURED, "seconds by another name")}
    path = table(tmp_path / "runs.csv", [{**row, **secret} for row in ROWS])
    assert rows_of(path, blind=True) == ROWS
    (tmp_path / "runs.toml").write_text('[[run]]\nid = "new-1"\nstep_time_s = 1.0\nhfu = 0.5\n')
    assert rows_of(tmp_path / "runs.toml", blind=True) == [{"id": "new-1"}]
    assert not {*INPUTS} & {*MEASURED}
    vtrain = tmp_path / "vtrain_single.csv"
    vtrain.write_text(
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
        "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n"
        "8,32,4,1024,16,24,1024,2,2,2,219.7\n"
    )
    assert "step_time_s" not in rows_of(vtrain, blind=True)[0]
    assert float(rows_of(vtrain)[0]["step_time_s"]) == pytest.approx(0.2197)


def test_a_seal_is_the_same_whatever_was_measured_and_its_order_is_the_seeds(command, tmp_path):
    found = []
    for number, rows in enumerate((ROWS, [{**row, "step_time_s": "secret"} for row in ROWS])):
        runs, path = table(tmp_path / f"{number}.csv", rows), tmp_path / f"{number}" / "seal.json"
        path.parent.mkdir()
        assert "Sealed 6 rows" in command("--runs", runs, "--seal", path, "--seed", "3")
        assert "secret" not in path.read_text()
        found.append(json.loads(path.read_text())["rows"])
    assert found[0] == found[1]
    ids = [row["id"] for row in found[0]]
    assert ids != sorted(ids) == [row["id"] for row in ROWS]
    assert {row["kind"] for row in found[0]} == {"sealed"}


def test_opening_sets_the_measurement_beside_the_prediction_once(command, seal, tmp_path):
    runs = measured(tmp_path)
    told = command("--runs", runs, "--open", seal)
    assert re.search(r"^new-1 +sealed +H100 .* \+10\.0 +yes", told, re.MULTILINE)
    outcome = tomllib.loads((tmp_path / "records" / "seal_opened.toml").read_text())
    assert {row["error"] for row in outcome["row"]} == {0.1}
    assert {row["measured_gib"] for row in outcome["row"]} == {48.5}
    assert (
        outcome["group"][0] | {"name": "all", "kind": "sealed", "rows": 6, "bias": 0.1} == outcome["group"][0]
    )
    assert outcome["sha256"] == json.loads(seal.read_text())["sha256"]
    assert not outcome["files_as_sealed"], "the measured columns came later"
    assert re.fullmatch(
        r"seal.json was opened on \d{4}-\d\d-\d\d: its errors are in seal_opened.toml.",
        command("--runs", runs, "--open", seal),
    )


def test_a_row_without_a_measurement_has_no_error_and_is_named(command, seal, tmp_path):
    runs = table(tmp_path / "some.csv", [*({**row, **MEASUREMENT} for row in ROWS[:4]), *ROWS[4:]])
    assert "neither step time nor tokens per second printed" in command("--runs", runs, "--open", seal)
    outcome = tomllib.loads((tmp_path / "records" / "seal_opened.toml").read_text())
    assert sorted(outcome["not_measured"]["neither step time nor tokens per second printed"]) == [
        "new-5",
        "new-6",
    ]
    assert len(outcome["row"]) == 4


def test_a_file_without_any_measurement_does_not_open_a_seal(command, seal, tmp_path):
    told = command("--runs", tmp_path / "blank.csv", "--open", seal)
    assert told.startswith("blank.csv has no measurement of any row of the seal, which stays closed")
    assert not (tmp_path / "records" / "seal_opened.toml").exists()


def test_opening_refuses_inputs_that_changed_or_are_gone(command, seal, tmp_path):
    told = command("--runs", measured(tmp_path, act_ckpt="none"), "--open", seal)
    assert "not what stands there now" in told
    assert "and 1 more differ in their inputs" in told
    runs = table(tmp_path / "fewer.csv", [{**row, **MEASUREMENT} for row in ROWS[1:]])
    assert command("--runs", runs, "--open", seal) == "new-1 of the seal in none of fewer.csv."
    assert not (tmp_path / "records" / "seal_opened.toml").exists()


def test_opening_refuses_another_source_tree_and_other_packages(command, seal, tmp_path, monkeypatch):
    runs, code = measured(tmp_path), tmp_path / "benchmarks" / "code.py"
    code.write_text("pass  # better\n")
    (tmp_path / "benchmarks" / "more.toml").write_text("")
    told = command("--runs", runs, "--open", seal)
    assert (
        "The source is not that of the seal: benchmarks/code.py differs, benchmarks/more.toml is new." in told
    )
    code.write_text("pass\n")
    (tmp_path / "benchmarks" / "more.toml").unlink()
    now = _published_seal.packages()
    monkeypatch.setattr(_published_seal, "packages", lambda: {**now, "jax": "9.9"})
    assert f"The packages are not those of the seal: jax {now['jax']} -> 9.9." in command(
        "--runs", runs, "--open", seal
    )


def test_opening_refuses_predictions_that_were_changed(command, seal, tmp_path):
    seal.write_text(seal.read_text().replace('"predicted_seconds": 2.2', '"predicted_seconds": 2.0', 1))
    assert "The predictions of seal.json were changed" in command(
        "--runs", measured(tmp_path), "--open", seal
    )


def test_a_row_is_sealed_once(command, seal, tmp_path):
    again, other = tmp_path / "blank.csv", seal.with_name("seal_2.json")
    assert "new-1 stands in seal.json" in command("--runs", again, "--seal", other)
    assert (
        command("--runs", again, "--seal", seal)
        == "seal.json exists: a seal is written once. Choose another name."
    )
    assert "Name mine.json *seal*.json" in command("--runs", again, "--seal", tmp_path / "mine.json")
    known = table(tmp_path / "known.csv", [{**ROWS[0], "id": "mosaic-999"}])
    assert "mosaic-999 is fitted since 2026-11-21" in command("--runs", known, "--seal", other)
    record = "2026-11-27_predict_published.toml"
    (tmp_path / "records" / record).write_text('[[row]]\nid = "met-1"\n')
    known = table(tmp_path / "known.csv", [{**ROWS[0], "id": "met-1"}])
    assert f"met-1 stands in {record}" in command("--runs", known, "--seal", other)
    assert not other.exists()


def test_rows_of_a_seal_that_is_closed_are_not_scored_beside_it(command, seal, tmp_path):
    told = command("--runs", measured(tmp_path), "--ids", ids_of(tmp_path, "new-2"))
    assert told.startswith("new-2 of seal.json: sealed, and not opened.")


def ids_of(tmp_path, *ids):
    path = tmp_path / "ids.txt"
    path.write_text("\n".join(ids) + "\n")
    return path


def test_a_source_that_changes_while_rows_are_predicted_is_not_sealed(command, tmp_path, monkeypatch):
    def edits(row):
        (tmp_path / "benchmarks" / "code.py").write_text("pass  # edited\n")
        return stub(row)

    monkeypatch.setattr(predict_published, "predicted", edits)
    path = tmp_path / "seal.json"
    told = command("--runs", table(tmp_path / "blank.csv", ROWS), "--seal", path)
    assert "The source changed while rows were predicted: benchmarks/code.py differs" in told
    assert not path.exists()


def test_the_hashed_source_is_the_package_and_the_benchmarks():
    names = _published_seal.tree()
    assert {"meshwright/predict/runs.toml", "meshwright/predict/_walk.py", "benchmarks/row_kinds.toml"} <= {
        *names
    }
    assert not any("__pycache__" in name or name.startswith("benchmarks/records") for name in names)


def test_every_row_of_the_newest_record_is_fitted_and_the_opened_rows_with_them():
    rows = tomllib.loads((RECORDS / "2026-11-28_predict_published.toml").read_text())["row"]
    seen = {row["id"] for row in rows if kind_of(row["id"]) == "seen"}
    assert seen == {"tune-010", "tune-012", "tune-013"}  # in pure bf16, which could not be expressed before
    assert {kind_of(row["id"]) for row in rows if row["id"] not in seen} == {"fitted"}
    record = tomllib.loads((RECORDS / "2026-11-27_sealed_score.toml").read_text())
    assert len(record["ids"]) == 68
    assert {kind_of(each) for each in record["ids"]} == {"fitted"}
    assert kind_of("litgpt-001") == "seen"
    assert kind_of("dgxcnemo-001") == "kind not declared", "of NeMo's rows, only those that were opened"


def test_readme_says_first_what_the_newest_seal_says():
    newest = max(
        (tomllib.loads(path.read_text()) for path in RECORDS.glob("*seal*.toml")),
        key=lambda r: str(r["date"]),
    )
    found = next(group for group in newest["group"] if group["name"] == "all")
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    figures = f"{100 * found['median']:.1f} %, nine of ten errors are within {100 * found['p90']:.1f} %"
    assert figures in text
    assert text.index(figures) < text.index("*Fitted*")
