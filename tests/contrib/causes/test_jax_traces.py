"""Read traces of jax's profiler: whole ones, and ones that are damaged, foreign or too large."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from _planted_jax import arguments, make, traced

import meshwright as mw
from meshwright.contrib.causes import _jax_trace
from meshwright.contrib.causes._jax_trace import jax_trace

RECORDED_ON_A_GPU = Path(__file__).parents[1] / "calibration/h200_bytes_nano.xplane.pb.gz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trace of five steps, of which the last is left out; a kept program may have another file's lines."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks for the setting once
    yield traced(tmp_path_factory.mktemp("trace"), make())
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def _file(folder: Path) -> Path:
    return next(folder.rglob("*.xplane.pb"))


def test_a_trace_tells_steps_kernels_lines_and_what_the_host_did(folder):
    found = jax_trace([folder])
    assert len(found.steps) == 4
    assert found.devices == ("0/0",)
    product = next(work for work in found.work if work.kind == "matmul")
    assert product.format_name == "fp32"
    assert (product.source or "").startswith("_planted_jax.py:")
    assert {"forward", "backward"} <= {work.phase for work in found.work}
    assert any(
        span.name == "wait" and (span.source or "").startswith("_planted_jax.py") for span in found.host
    )


def test_the_json_of_the_same_trace_tells_the_same_steps_without_programs(folder):
    names = ("*.xplane.pb", "*.trace.json.gz")
    whole, packed = (jax_trace([next(folder.rglob(name))]) for name in names)
    assert len(packed.steps) == len(whole.steps)
    assert packed.steps[0].seconds == pytest.approx(whole.steps[0].seconds, rel=0.01)
    assert any("no compiled programs" in note for note in packed.notes)


def test_a_trace_of_a_gpu_tells_its_runs_by_what_runs_once(tmp_path):
    file = tmp_path / "nano.xplane.pb"
    file.write_bytes(gzip.decompress(RECORDED_ON_A_GPU.read_bytes()))
    found = jax_trace([file])
    assert len(found.steps) == 1  # of two, the last is not whole
    assert {"matmul", "attention", "memory-bound"} <= {work.kind for work in found.work}


def test_a_trace_of_another_program_is_refused_with_the_share_that_it_has(folder):
    with pytest.raises(mw.InputError, match="the trace is of another program"):
        mw.reconcile("linear", on="1xCPU", trace=folder)


def test_a_trace_that_is_cut_short_is_refused(folder, tmp_path):
    whole = _file(folder).read_bytes()
    cut = tmp_path / "cut.xplane.pb"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(mw.InputError, match=r"cut short|cannot be read"):
        jax_trace([cut])


def test_an_empty_folder_and_a_trace_without_work_are_refused(tmp_path):
    with pytest.raises(mw.InputError, match="holds no file"):
        jax_trace([tmp_path])
    with jax.profiler.trace(str(tmp_path / "idle")):
        pass
    with pytest.raises(mw.InputError, match="no device did any work"):
        jax_trace([tmp_path / "idle"])


def test_hosts_with_different_numbers_of_steps_are_refused(folder, tmp_path):
    other = traced(tmp_path / "other", make(), steps=3)
    shutil.copy(_file(folder), tmp_path / "a.xplane.pb")
    shutil.copy(_file(other), tmp_path / "b.xplane.pb")
    with pytest.raises(mw.InputError, match=r"different numbers of steps: 4 of a\S+, 2 of b"):
        jax_trace([tmp_path / "a.xplane.pb", tmp_path / "b.xplane.pb"])


def test_hosts_whose_clocks_differ_are_read_as_they_are(folder, tmp_path):
    """A day between the clocks of two hosts changes no step: times of different hosts are not compared."""
    whole = json.loads(gzip.decompress(next(folder.rglob("*.trace.json.gz")).read_bytes()))
    for name, shift in (("a.json", 0), ("b.json", 86_400e6)):
        events = [{**e, "ts": e["ts"] + shift} if "ts" in e else e for e in whole["traceEvents"]]
        (tmp_path / name).write_text(json.dumps({**whole, "traceEvents": events}))
    found = jax_trace([tmp_path / "a.json", tmp_path / "b.json"])
    assert found.num_ranks == 2
    assert not found.one_clock
    one, other = (found.steps_of(rank)[0].seconds for rank in (0, 1))
    assert one == pytest.approx(other, rel=1e-3)


def test_a_time_below_zero_is_refused_with_its_place(folder, tmp_path):
    whole = json.loads(gzip.decompress(next(folder.rglob("*.trace.json.gz")).read_bytes()))
    last = max(place for place, event in enumerate(whole["traceEvents"]) if event.get("ph") == "X")
    whole["traceEvents"][last]["dur"] = -5
    file = tmp_path / "negative.json"
    file.write_text(json.dumps(whole))
    with pytest.raises(mw.InputError, match="which cannot be"):
        jax_trace([file])


def test_a_file_that_is_too_large_is_refused_with_its_size(folder, monkeypatch):
    monkeypatch.setattr(_jax_trace, "MOST_BYTES", 1000)
    with pytest.raises(mw.InputError, match="more than") as refused:
        jax_trace([folder])
    assert "fewer steps" in refused.value.hint
    monkeypatch.undo()
    monkeypatch.setattr(_jax_trace, "MOST_EVENTS", 10)
    with pytest.raises(mw.InputError, match="more than 10 events"):
        jax_trace([folder])


def test_both_forms_of_one_trace_are_not_counted_twice(folder):
    with pytest.raises(mw.InputError, match="of two kinds"):
        jax_trace([_file(folder), next(folder.rglob("*.trace.json.gz"))])


def test_a_step_on_more_devices_than_the_fleet_has_is_refused(folder):
    meant = mw.jax_step(jax.jit(make()), *arguments(1))
    two = traced(folder / "two", make(), 2)
    with pytest.raises(mw.InputError, match="the trace has 2 devices"):
        mw.reconcile(meant, on="1xCPU", trace=two)
