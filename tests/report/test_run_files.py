from __future__ import annotations

import json
from pathlib import Path

from meshwright.report._run_files import read_run


def test_an_empty_folder_is_read_and_each_missing_file_named(tmp_path: Path):
    run = read_run(tmp_path)
    assert (run.config, run.weighing, run.metrics, run.measurement, run.reconciliation) == (
        None, None, (), None, None,
    )  # fmt: skip
    assert [note.split()[0] for note in run.notes] == [
        "config.json", "weighing.json", "metrics.jsonl", "measurement.json", "reconciliation.json",
    ]  # fmt: skip


def test_a_half_written_last_line_is_named_and_the_rest_kept(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5}\n{"step": 2, "loss": 4}\n{"step": 3, "lo')
    run = read_run(tmp_path)
    assert run.series("loss") == ([1, 2], [5.0, 4.0])
    assert "metrics.jsonl: no whole entry on line 3; the rest is shown." in run.notes


def test_many_broken_lines_are_not_all_listed(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("[]\n" * 9)
    assert "line 1, 2, 3, 4, 5, ...;" in read_run(tmp_path).notes[2]


def test_broken_files_are_named_with_the_reason(tmp_path: Path):
    (tmp_path / "weighing.json").write_text('{"schema": ')
    (tmp_path / "measurement.json").write_text("{}")
    (tmp_path / "config.json").mkdir()
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe")
    notes = {note.split()[0].rstrip(":"): note for note in read_run(tmp_path).notes}
    for name in ("weighing.json", "measurement.json", "config.json", "metrics.jsonl"):
        assert "cannot be read" in notes[name]


def test_steps_are_in_order_and_the_last_word_counts(tmp_path: Path):
    lines = [
        {"step": 2, "loss": 4},
        {"step": 1, "loss": 5},
        {"step": 1, "held_out_loss": 6},
        {"step": 2, "loss": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    run = read_run(tmp_path)
    assert run.series("loss") == ([1, 2], [5.0, 3.0])
    assert run.series("held_out_loss") == ([1], [6.0])
