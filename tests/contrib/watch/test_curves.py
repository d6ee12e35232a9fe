"""What is read of metrics.jsonl as it grows, and what of it is sent to be drawn."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.contrib.runs import Buckets, Metrics
from meshwright.contrib.runs._buckets import MOST_BUCKETS
from meshwright.contrib.watch import Shelf
from tests.contrib.watch.made_runs import line, make_run

pytestmark = pytest.mark.once


def curves(shelf: Shelf, **ends: int) -> dict:
    """Return the curves of steps of the one run of a shelf."""
    (run,) = shelf.runs
    return shelf.curves([run.id], **ends)[run.id]["tracks"]["train"]


def refreshed(shelf: Shelf) -> dict:
    shelf.refresh()
    curves(shelf)
    while shelf.read_on():
        pass
    return curves(shelf)


def test_a_spike_of_one_step_in_a_hundred_thousand_is_drawn(tmp_path):
    lines = [line(step, loss=9.0 if step == 70_001 else 2.0) for step in range(1, 100_001)]
    track = refreshed(shelf := Shelf([make_run(tmp_path / "run", lines)]))
    least, mean, largest = track["curves"]["loss"]
    assert len(track["first"]) <= 600
    assert max(largest) == 9.0
    assert min(least) == 2.0
    at = largest.index(9.0)
    assert track["first"][at] <= 70_001 <= track["last"][at]
    assert mean[at] == pytest.approx(2.0 + 7.0 / track["width"], rel=1e-5)
    close = curves(shelf, low=69_990, high=70_010)
    assert close["width"] < track["width"], "fewer steps are drawn in more detail"
    assert max(close["curves"]["loss"][-1]) == 9.0


def test_a_page_that_has_the_first_buckets_gets_the_others(tmp_path):
    folder = make_run(tmp_path / "run", [line(step, loss=step) for step in range(1, 1001)])
    shelf = Shelf([folder])
    (run,) = shelf.runs
    had = refreshed(shelf)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(f"{line(step, loss=step)}\n" for step in range(1001, 1100))
    refreshed(shelf)
    have = {run.id: {"train": (had["generation"], had["width"], len(had["first"]) - 1)}}
    new = shelf.curves([run.id], have=have)[run.id]["tracks"]["train"]
    whole = curves(shelf)
    assert new["start"] == len(had["first"]) - 1
    assert had["first"][: new["start"]] + new["first"] == whole["first"]
    assert had["curves"]["loss"][1][: new["start"]] + new["curves"]["loss"][1] == whole["curves"]["loss"][1]


def test_each_byte_is_read_once_and_a_line_that_is_cut_short_waits(tmp_path):
    folder = make_run(tmp_path / "run", [line(1), line(2)])
    shelf = Shelf([folder])
    assert refreshed(shelf)["first"] == [1, 2]
    (run,) = shelf.runs
    whole = line(3, loss=5.0)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(whole[:20])
    assert refreshed(shelf)["first"] == [1, 2]
    at = run.metrics.offset
    with (folder / "metrics.jsonl").open("r+") as file:  # what was read is not looked at again
        file.write("x" * 10)
        file.seek(0, 2)
        file.write(f"{whole[20:]}\n")
    assert refreshed(shelf)["first"] == [1, 2, 3]
    assert run.metrics.offset == at + len(whole) - 19
    assert run.details()["notes"] == []


def test_a_file_that_a_resumed_run_has_cut_is_read_anew(tmp_path):
    folder = make_run(tmp_path / "run", [line(step) for step in range(1, 51)])
    shelf = Shelf([folder])
    before = refreshed(shelf)
    (folder / "new").write_text("".join(f"{line(step, loss=1.0)}\n" for step in range(1, 31)))
    (folder / "new").replace(folder / "metrics.jsonl")
    after = refreshed(shelf)
    assert after["first"] == list(range(1, 31))
    assert set(after["curves"]["loss"][0]) == {1.0}
    assert after["generation"] != before["generation"], "the page drops what it has"


def test_steps_that_are_trained_again_replace_the_earlier_ones(tmp_path):
    lines = [line(step, loss=9.0) for step in range(1, 11)] + [line(step, loss=1.0) for step in range(6, 9)]
    track = refreshed(Shelf([make_run(tmp_path / "run", lines)]))
    assert track["first"] == list(range(1, 9))
    assert track["curves"]["loss"] == [[9.0] * 5 + [1.0] * 3]


def test_values_that_are_no_numbers_leave_gaps(tmp_path):
    texts = [
        line(1, loss=None),
        '{"step": 2, "loss": "text", "seconds": 1e999}',
        '{"step": 3, "loss": [1], "seconds": 1' + "0" * 200 + "}",
        '{"step": 4, "loss": NaN, "seconds": true}',
        line(5, loss=3.0, seconds=0.5),
    ]
    shelf = Shelf([make_run(tmp_path / "run", texts)])
    track = refreshed(shelf)
    assert track["first"] == [1, 2, 3, 4, 5]
    assert track["curves"]["loss"] == [[None, None, None, None, 3.0]]
    assert track["curves"]["seconds"][0][1:3] == [None, None]
    json.dumps(shelf.rows(), allow_nan=False)


@pytest.mark.parametrize(
    "broken",
    [
        "not JSON",
        "[" * 5000,
        '{"step": "1", "loss": 1}',
        '{"step": -1, "loss": 1}',
        '{"step": 1e3, "loss": 1}',
        '{"step": 99999999999999999999, "loss": 1}',
        '{"loss": 1}',
        '{"step": true, "loss": 1}',
        '1],[{"step": 1}',
        "\x00" * 50,
        '{"a":' * 200,
        "x" * 200_000,
    ],
    ids=lambda text: text[:12].replace("\x00", "0"),
)
def test_a_line_that_holds_no_step_is_left_out_and_counted(tmp_path, broken):
    shelf = Shelf([make_run(tmp_path / "run", [line(1), broken, line(2)])])
    assert refreshed(shelf)["first"] == [1, 2]
    (run,) = shelf.runs
    (note,) = run.details()["notes"]
    assert note == "metrics.jsonl: 1 lines hold no step and are left out."


def test_a_line_without_an_end_takes_no_memory(tmp_path):
    folder = make_run(tmp_path / "run", [line(1)])
    with (folder / "metrics.jsonl").open("a") as file:
        for _ in range(40):
            file.write("x" * 2**17)
        file.write(f"\n{line(2)}\n")
    shelf = Shelf([folder])
    assert refreshed(shelf)["first"] == [1, 2]
    assert len(shelf.runs[0].metrics._rest) == 0


def test_a_million_quantities_of_a_hostile_file_are_not_all_kept(tmp_path):
    text = json.dumps({"step": 1, "loss": 1.0, **{f"key{number}": 1.0 for number in range(2000)}})
    assert len(refreshed(Shelf([make_run(tmp_path / "run", [text])]))["curves"]) <= 64


def test_a_large_file_is_drawn_from_samples_until_it_is_read(tmp_path):
    lines = [line(step, loss=step) for step in range(1, 60_001)]
    shelf = Shelf([make_run(tmp_path / "run", lines)])
    (run,) = shelf.runs
    first = shelf.curves([run.id])[run.id]
    assert 0 < first["read"] < 1
    sample = first["tracks"]["train"]
    assert len(sample["first"]) > 100
    assert sample["first"][-1] > 59_900, "the samples are from all over the file"
    assert sample["curves"]["loss"] == [list(map(float, sample["first"]))]
    assert refreshed(shelf)["last"][-1] == 60_000
    assert shelf.curves([run.id])[run.id]["read"] == 1.0


chunks = st.lists(st.integers(1, 700), max_size=8)


@settings(max_examples=25)
@given(chunks, st.sampled_from([1, 3, 1000]), st.integers(0, 2**32))
def test_buckets_hold_the_extremes_and_the_mean_of_their_lines_however_they_come(sizes, gap, seed):
    rng = random.Random(seed)
    sizes = [size for size in sizes for _ in range(4)]
    steps = np.cumsum([rng.randint(1, gap) for _ in range(sum(sizes))])
    values = np.array([rng.choice([rng.gauss(0, 1), math.nan]) for _ in steps])
    buckets, place = Buckets(), 0
    for size in sizes:
        part = slice(place, place := place + size)
        buckets.add(steps[part], ["loss"], values[part, None])
    window, whole = buckets.window(100), buckets.window(MOST_BUCKETS)
    assert len(window.first) <= 100
    assert len(whole.first) == min(len(steps), len(whole.first)) <= MOST_BUCKETS
    assert len(steps) <= 100 or len(window.first) > 30, "few lines leave few buckets, many do not"
    inside = [
        (first <= steps) & (steps <= last) for first, last in zip(window.first, window.last, strict=True)
    ]
    assert not sizes or np.all(np.sum(inside, axis=0) == 1), "each line is in one bucket"
    for number, lines in enumerate(inside):
        assert (window.first[number], window.last[number]) == (steps[lines][0], steps[lines][-1])
        known = values[lines][np.isfinite(values[lines])]
        made = window.curves["loss"][:, number]
        wanted = [known.min(), known.mean(), known.max()] if len(known) else [math.nan] * 3
        assert list(made) == pytest.approx(wanted, rel=1e-9, abs=1e-12, nan_ok=True)


def test_a_step_that_is_trained_again_replaces_evaluations_and_epochs_after_it_too(tmp_path):
    held_out = '{"step": %d, "held_out_loss": %s}'
    first = [line(1), held_out % (1, 5.0), line(2), line(3), held_out % (3, 9.0)]
    lines = [*first, line(2), held_out % (2, 7.0)]
    shelf = Shelf([make_run(tmp_path / "run", lines)])
    refreshed(shelf)
    (run,) = shelf.runs
    curve = run.metrics.curve("held_out_loss")
    assert (curve.steps, curve.means) == ((1, 2), (5.0, 7.0))
    assert run.metrics.curve("loss").steps == (1, 2)


def test_an_estimate_of_the_finish_replaces_no_evaluation_of_its_step(tmp_path):
    texts = ['{"step": 1, "held_out_loss": 5.0}', '{"step": 1, "finish_seconds_left": 60.0}']
    shelf = Shelf([make_run(tmp_path / "run", [line(1), *texts])])
    refreshed(shelf)
    (run,) = shelf.runs
    assert run.metrics.curve("held_out_loss").means == (5.0,)
    assert run.metrics.curve("finish_seconds_left").means == (60.0,)


@pytest.fixture
def long_run(tmp_path, monkeypatch):
    """Return the folder of a run whose curves the cache keeps, with an empty cache."""
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("MESHWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("meshwright.contrib.runs._kept_curves.LEAST_BYTES", 10_000)
    monkeypatch.setattr("meshwright.contrib.runs._metrics.LEAST_BYTES", 10_000)
    return make_run(tmp_path / "run", [line(step, loss=step) for step in range(1, 5001)])


def read_whole(folder) -> tuple[Metrics, int]:
    """Return the metrics of a run and how many lines had to be read."""
    metrics = Metrics(folder / "metrics.jsonl")
    metrics.read(0)
    before = metrics.offset
    metrics.read_whole()
    return metrics, metrics.offset - before


def test_a_long_file_is_read_once_and_then_what_it_grew_by(long_run):
    first, read = read_whole(long_run)
    assert read == first.size
    second, read = read_whole(long_run)
    assert read == 0
    assert second.is_whole
    assert second.curve("loss") == first.curve("loss")
    assert second.newest == first.newest
    with (long_run / "metrics.jsonl").open("a") as file:
        file.write(more := f"{line(5001, loss=-1.0)}\n")
    third, read = read_whole(long_run)
    assert read == len(more)
    assert third.curve("loss").lows[-1] == -1.0
    assert third.curve("seconds").steps[-1] == 5001


def cut_short(folder) -> None:
    os.truncate(folder / "metrics.jsonl", 300_000)


def replaced(folder) -> None:
    (folder / "new").write_bytes((folder / "metrics.jsonl").read_bytes())
    (folder / "metrics.jsonl").unlink()
    (folder / "kept").write_text("")  # takes the number that the file had
    (folder / "new").rename(folder / "metrics.jsonl")


def touched(folder) -> None:
    with (folder / "metrics.jsonl").open("r+b") as file:
        file.seek(200_000)
        file.write(b" ")
    os.utime(folder / "metrics.jsonl", (1, 1))


def damaged(folder) -> None:
    (kept,) = (folder.parent / "cache/curves").iterdir()
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)


def emptied(folder) -> None:
    (kept,) = (folder.parent / "cache/curves").iterdir()
    kept.write_bytes(b"")


def newer(folder) -> None:
    (kept,) = (folder.parent / "cache/curves").iterdir()
    content = kept.read_bytes().partition(b"\n")[2].replace(b'{"schema": 1', b'{"schema": 2', 1)
    kept.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def a_folder(folder) -> None:
    (kept,) = (folder.parent / "cache/curves").iterdir()
    kept.unlink()
    kept.mkdir()


@pytest.mark.parametrize("happens", [cut_short, replaced, touched, damaged, emptied, newer, a_folder])
def test_curves_that_are_not_of_this_file_are_read_again(long_run, happens):
    read_whole(long_run)
    happens(long_run)
    metrics, read = read_whole(long_run)
    assert read == metrics.size == (long_run / "metrics.jsonl").stat().st_size
    assert metrics.curve("loss").steps[-1] == len((long_run / "metrics.jsonl").read_text().splitlines()) - (
        happens is cut_short
    )


def test_a_cache_that_cannot_be_written_keeps_nothing_and_stops_nothing(long_run):
    (long_run.parent / "cache/curves").write_text("a file where a folder is to be")
    for _ in range(2):
        metrics, read = read_whole(long_run)
        assert read == metrics.size
        assert metrics.curve("loss").steps[-1] == 5000


def test_the_cache_keeps_the_curves_of_so_many_files(long_run, monkeypatch):
    monkeypatch.setattr("meshwright.contrib.runs._kept_curves.MOST_KEPT", 2)
    for number in range(4):
        long_run = long_run.rename(long_run.with_name(f"run{number}"))
        read_whole(long_run)
    assert len(list((long_run.parent / "cache/curves").iterdir())) == 2
