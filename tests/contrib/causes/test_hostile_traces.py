"""Read traces that nobody should have made: of mixed runs, of other clocks, cut short, too large."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.contrib.calibration import _chrome_events
from meshwright.contrib.causes import Recorded, gap_of, kineto_trace
from tests.contrib.causes.kineto import Kineto
from tests.contrib.causes.test_kineto import eager_step

MOST_HELD = 64 * 2**20  # bytes, of a file of gigabytes


@pytest.fixture(scope="module")
def weighing() -> mw.Weighing:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return mw.weigh("tests.contrib.causes.torch_program:program", on="2xH100", layout="data=2")


def rank_file(path: Path, rank: int, steps: range, world: int = 2, shift: float = 0.0) -> Path:
    """Write steps of one rank by their numbers, each of 1000 us."""
    t = Kineto(rank=rank, world=world)
    for place, number in enumerate(steps):
        begin = 1000 * place + shift
        t.step(number, begin, 1000).op("aten::mm", begin, 900, dims=[[64, 64], [64, 64]])
        t.launch("sgemm", begin + 1, begin + 2, 990)
    return t.write(path)


def test_ranks_of_two_runs_are_refused(tmp_path):
    files = [rank_file(tmp_path / f"{rank}.json", rank, range(3), world=2 + rank) for rank in range(2)]
    with pytest.raises(mw.InputError, match=r"0\.json is of a run of 2 ranks, and .*1\.json of one of 3"):
        kineto_trace(files)


def test_ranks_that_were_traced_at_other_times_are_refused(tmp_path):
    files = [rank_file(tmp_path / f"{rank}.json", rank, range(90 * rank, 90 * rank + 3)) for rank in range(2)]
    words = r"not of the same steps: rank 0 has ProfilerStep#0 to ProfilerStep#2; rank 1 has ProfilerStep#90"
    with pytest.raises(mw.InputError, match=words) as refused:
        kineto_trace(files)
    assert "one rank's alone" in refused.value.hint


def test_steps_that_not_every_rank_has_are_left_out_and_said(tmp_path):
    files = [rank_file(tmp_path / f"{rank}.json", rank, range(3 + rank, 7)) for rank in range(2)]
    found = kineto_trace(files)
    named = [(step.rank, step.index, step.name) for step in found.steps]
    assert named == [(rank, index, f"ProfilerStep#{4 + index}") for rank in range(2) for index in range(3)]
    assert len(found.work) == 6
    assert any(note.startswith("left out: 1 steps that not every rank has") for note in found.notes)


def test_a_rank_whose_clock_is_a_day_ahead_has_the_same_answer(weighing, tmp_path):
    gaps = []
    for shift in (0.0, 86_400e6):
        files = [
            rank_file(tmp_path / f"{shift}.{rank}.json", rank, range(3), shift=shift * rank)
            for rank in (0, 1)
        ]
        gaps.append(gap_of(kineto_trace(files), weighing))
    same, ahead = gaps
    assert ahead.measured_seconds == pytest.approx(same.measured_seconds, rel=1e-6)
    assert [cause.kind for cause in ahead.causes] == [cause.kind for cause in same.causes]


@pytest.mark.parametrize("name", ["cut.json", "cut.json.gz"])
def test_a_trace_that_is_cut_short_is_refused(name, tmp_path):
    path = eager_step().write(tmp_path / name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(mw.InputError, match=r"cut short|no whole gzip file"):
        mw.reconcile("linear", on="1xH100", trace=path)


def sparse(path: Path, begin: bytes, size: int) -> Path:
    """Write a file of which only the begin takes room on the disk."""
    path.write_bytes(begin)
    os.truncate(path, size)
    return path


@pytest.mark.parametrize(
    ("name", "begin", "words"),
    [
        ("t.json", b'{"traceEvents": [{"name": "a"}, ', "Expecting value"),
        ("t.json", b"", "it has no list of traceEvents"),
        ("t.xplane.pb", b"", "has 3.00 GiB, more than 256 MiB"),
        ("t.json.gz", b"\x1f\x8b\x08\x00", "more than 536,870,912 packed bytes"),
    ],
    ids=["cut", "empty", "xplane", "packed"],
)
def test_a_file_of_3_gib_is_refused_without_holding_it(name, begin, words, tmp_path):
    path = sparse(tmp_path / name, begin, 3 * 2**30)
    tracemalloc.start()
    try:
        with pytest.raises(mw.InputError, match=words):
            mw.reconcile("linear", on="1xCPU", trace=path)
        assert tracemalloc.get_traced_memory()[1] < MOST_HELD
    finally:
        tracemalloc.stop()


def test_json_beyond_the_limit_is_refused_where_it_is_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(_chrome_events, "MOST_JSON_BYTES", 2**20)
    monkeypatch.setattr(_chrome_events, "CHUNK_BYTES", 2**16)
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5}
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [event] * 20_000}))
    with pytest.raises(mw.InputError, match=r"more than 1,048,576 bytes; trace fewer steps"):
        mw.reconcile("linear", on="1xCPU", trace=path)


def test_work_is_looked_at_as_often_however_long_the_trace_is(weighing, tmp_path, monkeypatch):
    """A file of 2 GB has millions of kernels: what looks at all of them is asked for once, not for each."""
    asked = []
    devices = Recorded.__dict__["devices"].fget
    monkeypatch.setattr(Recorded, "devices", property(lambda self: asked.append(self) or devices(self)))
    often = []
    for steps in (range(3), range(60)):
        recorded = kineto_trace([rank_file(tmp_path / f"{len(steps)}.json", 0, steps)])
        asked.clear()
        gap_of(recorded, weighing)
        often.append(len(asked))
    assert often[0] == often[1]
