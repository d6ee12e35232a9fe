"""The page of errors: its figures are those of the record's rows, and the picture has every row."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from accuracy_page import WORST, draw, page


def row(source: str, number: int, error: float, *, chip: str = "A100-80GB", holds: bool = True) -> dict:
    return {
        "id": f"{source}-{number:03}",
        "source": source,
        "chip": chip,
        "num_devices": 8,
        "scale": "to 8",
        "layout": "fsdp=8",
        "stack": "ours",
        "sustained": True,
        "notes": [f"note of {source}"],
        "measured_seconds": 1.0,
        "predicted_seconds": 1 + error,
        "error": error,
        "exposed_seconds": {"matmul": 1 + error},
        "holds": holds,
    }


@pytest.fixture
def record() -> dict:
    rows = [row("mosaic", n, 0.02 * n) for n in range(1, 10)]
    rows += [row("tt", n, -0.05, chip="H100", holds=n != 1) for n in range(1, 4)]
    rows += [row("rare", 1, 0.6)]
    return {
        "row": [*rows, {"id": "x-1", "failed": "no such heads"}],
        "inexpressible": {"a TPU": 33},
        "summary": {"failed": {"x-1": "no such heads"}},
    }


def test_a_group_has_its_own_line_and_small_ones_share_one(record):
    text = page(record, "today.toml")
    assert "for the same 13 runs" in text
    assert "records/today.toml" in text
    assert "| MosaicML, LLM Foundry | 9 | 10.0 % | 16.4 % | +10.0 % | 100 % |" in text
    assert "| PyTorch, torchtitan | 3 | 5.0 % | 5.0 % | -5.0 % | 67 % |" in text
    assert "| all others | 1 | 60.0 % | 60.0 % | +60.0 % | 100 % |" in text
    assert "| 33 | a TPU |" in text
    assert "| 1 | the step could not be compiled |" in text


def test_the_first_figures_leave_each_source_out_of_the_fit(record):
    lines = page(record, "today.toml").splitlines()
    blind = next(line for line in lines if line.startswith("| each source left out"))
    fitted = next(line for line in lines if line.startswith("| all sources"))
    assert fitted == "| all sources in the fit | 8.0 % | 17.6 % | +8.0 % |"
    # MosaicML's runs are then those of a chip on which another source took 1 / 1.6 of the prediction.
    assert blind != fitted


def test_the_worst_stand_first_with_what_is_known(record):
    text = page(record, "today.toml")
    worst = text.partition("## The worst ten")[2].splitlines()[4:]
    assert worst[0].startswith("| rare-001 | 8 x A100-80GB | `fsdp=8` | 1 s | 1.6 s | +60 % | note of rare |")
    assert sum(line.startswith("| ") for line in worst[:WORST]) == WORST


def test_the_picture_has_every_row(record):
    rows = [each for each in record["row"] if "error" in each]
    axes = draw(rows).axes[0]
    drawn = [point for line in axes.lines for point in line.get_ydata() if len(line.get_ydata()) != 2]
    assert sorted(drawn) == pytest.approx(sorted(1 / (1 + each["error"]) for each in rows))


def test_rows_on_tpus_have_a_section_and_a_blind_error_by_the_others_of_their_generation(record):
    rows = [row("maxtext", n, error, chip="v5e") for n, error in ((1, 0.1), (2, 0.1), (3, 0.0))]
    tpus = {
        "row": [*rows, {"id": "tpurec-001", "failed": "RESOURCE_EXHAUSTED"}],
        "inexpressible": {"several TPU slices: a fleet of ours is one": 25},
    }
    text = page(record, "today.toml", tpus, "tpus.toml")
    assert "3 runs on one slice each (`benchmarks/records/tpus.toml`" in text
    # By the first two, products take 1 / 1.1 of the time that the third is predicted with.
    assert "| maxtext-003 | 8 x v5e | `fsdp=8` | 1 s | 1 s | +0.0 % | -9.0 % |" in text
    assert "| 25 | several TPU slices: a fleet of ours is one |" in text
    assert "| 1 | tpurec-001: RESOURCE_EXHAUSTED |" in text
    assert "| 33 | a TPU |" not in text
    assert "for the same 13 runs" in text, "the figures at the top are those of GPUs"
