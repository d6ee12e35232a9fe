"""Plant causes in two PyTorch processes over gloo, trace each by torch.profiler, and find them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import _planted

import meshwright as mw
from meshwright.contrib.causes import gap_of, kineto_trace
from tests.contrib.causes.kineto import Kineto


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Path:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    folder = tmp_path_factory.mktemp("gloo")
    _planted.trace_processes("gloo", folder, [plant.name for plant in _planted.GLOO])
    return folder


@pytest.mark.wide  # each pair of processes takes some 12 s of a processor
@pytest.mark.parametrize("plant", _planted.GLOO, ids=lambda plant: plant.name)
def test_a_cause_planted_in_two_processes_is_named_first_or_second(plant, traced):
    gap = _planted.gloo_gap(traced.glob(f"{plant.name}.?.json"))
    assert _planted.rank_of(plant, gap) in (1, 2), gap.causes
    assert gap.num_devices == 2
    assert _planted.parts_sum_to_the_gap(gap)


def _rank(path: Path, rank: int, late: int, sums: int) -> Path:
    """Write three steps of one of two ranks: a product, and messages that wait for the later rank."""
    t = Kineto(rank=rank, world=2)
    own = 1000 + (late if rank == 1 else 0)
    for index in range(3):
        begin = 10_000 * index
        t.step(index, begin, 10_000).op("aten::addmm", begin, 100, sequence=index)
        t.launch("sgemm", begin + 1, begin + 5, own)
        now = begin + 5 + own
        for number in range(sums):
            long = 500 + (late if rank == 0 and number == 0 else 0)
            facts = {"Collective name": "allreduce", "In msg nelems": 4160, "Out msg nelems": 4160}
            kernel = "ncclDevKernel_AllReduce"
            t.launch(kernel, begin + 10 + number, now, long, dtype="Float", **facts)
            now += long
        t.launch("void at::native::add(int)", begin + 50, now, begin + 10_000 - now)
    return t.write(path)


@pytest.mark.parametrize(
    ("late", "sums", "kind", "name"),
    [(4000, 1, "straggler", "rank 1, device 0"), (0, 4, "extra message", "all-reduce, 75% of its bytes")],
)
def test_a_late_rank_and_a_further_sum_are_named_from_files_of_two_ranks(late, sums, kind, name, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    weighing = mw.weigh("tests.contrib.causes.torch_program:program", on="2xH100", layout="data=2")
    files = [_rank(tmp_path / f"{rank}.json", rank, late, sums) for rank in range(2)]
    gap = gap_of(kineto_trace(files), weighing)
    cause = next(each for each in gap.causes if each.kind == kind)
    assert cause.name == name
    total = sum(each.seconds for each in gap.causes) + gap.unexplained_seconds
    assert total == pytest.approx(gap.gap_seconds)
