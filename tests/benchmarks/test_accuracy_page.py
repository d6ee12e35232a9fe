"""The page of errors: its figures are those of the record's rows, and the picture has every row."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from accuracy_page import WORST, draw, page


def row(
    source: str,
    number: int,
    error: float,
    *,
    chip: str = "A100-80GB",
    holds: bool = True,
    kind: str = "fitted",
) -> dict:
    return {
        "kind": kind,
        "id": f"{source}-{number:03}",
        "source": source,
        "chip": chip,
        "num_devices": 8,
        "scale": "to 8",
        "layout": "fsdp=8",
        "stack": "ours",
        "software": "eager",
        "products": 0.9,
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
    assert "are of 13 runs, in the record\n`benchmarks/records/today.toml`" in text
    assert "| MosaicML, LLM Foundry | fitted | 9 | 10.0 % | 16.4 % | +10.0 % | 100 % |" in text
    assert "| PyTorch, torchtitan | fitted | 3 | 5.0 % | 5.0 % | -5.0 % | 67 % |" in text
    assert "| all others | fitted | 1 | 60.0 % | 60.0 % | +60.0 % | 100 % |" in text
    assert "| 33 | a TPU |" in text
    assert "| 1 | the step could not be compiled |" in text


def test_the_page_says_at_which_commits_programs_were_compiled(record):
    assert "Our programs were compiled" not in page(record, "today.toml")
    for each in record["row"][:2]:
        each["compiled_at"] = "0123456789ab"
    text = page(record, "today.toml")
    assert "Our programs were compiled: 11 where it is not known, 2 at `0123456`." in text


def test_the_first_figures_leave_each_source_out_of_the_fit(record):
    lines = page(record, "today.toml").splitlines()
    blind = next(line for line in lines if line.startswith("| fitted | 13 | each source left out"))
    fitted = next(line for line in lines if line.startswith("| fitted | 13 | all sources"))
    assert fitted == "| fitted | 13 | all sources in that fit | 8.0 % | 17.6 % | +8.0 % | 92 % |"
    # MosaicML's runs are then those of a chip on which another source took 1 / 1.6 of the prediction.
    assert blind.split(" | ")[3:6] != fitted.split(" | ")[3:6]


def test_the_worst_stand_first_with_what_is_known(record):
    text = page(record, "today.toml")
    worst = text.partition("## The worst ten")[2].splitlines()[4:]
    assert worst[0].startswith(
        "| rare-001 | fitted | 8 x A100-80GB | `fsdp=8` | 1 s | 1.6 s | +60 % | note of rare |"
    )
    assert sum(line.startswith("| ") for line in worst[:WORST]) == WORST


def test_the_picture_has_every_row(record):
    rows = [each for each in record["row"] if "error" in each]
    axes = draw(rows).axes[0]
    drawn = [point for line in axes.lines for point in line.get_ydata() if len(line.get_ydata()) != 2]
    assert sorted(drawn) == pytest.approx(sorted(1 / (1 + each["error"]) for each in rows))


def test_rows_on_tpus_have_a_section_and_a_blind_error_by_the_others_of_their_generation(record):
    rows = [row("maxtext", n, error, chip="v5e") for n, error in ((1, 0.1), (2, 0.1), (3, 0.0))]
    rows = [{**each, "kind": "fitted", "slices": 1} for each in rows]
    waits = {"slices": 4, "num_devices": 32, "otherwise_seconds": {"messages beside products": -0.05}}
    rows.append({**row("maxtext", 4, -0.1, chip="v5e"), "kind": "seen", **waits})
    rows = [{**each, "software": "", "products": 1.0} for each in rows]
    tpus = {
        "row": [*rows, {"id": "tpurec-001", "failed": "RESOURCE_EXHAUSTED"}],
        "inexpressible": {"mixture of experts": 25},
    }
    text = page(record, "today.toml", tpus, "tpus.toml")
    assert "3 runs on one slice and 1 on several (`benchmarks/records/tpus.toml`" in text
    # By the first two, products take 1 / 1.1 of the time that the third is predicted with.
    assert "| maxtext-003 | fitted | 8 x v5e | `fsdp=8` | 1 s | 1 s | +0.0 % | -9.0 % |" in text
    assert "| 25 | mixture of experts |" in text
    several = "several slices, by the rates of one; messages"
    assert f"| seen | 1 | {several} beside products, as for one slice | 15.4 %" in text  # by the fit
    assert f"| seen | 1 | {several} waited for as our program waits | 5.0 %" in text
    assert "| maxtext-004 | seen | 4 slices of 8 x v5e |" in text
    assert "| 1 | tpurec-001: RESOURCE_EXHAUSTED |" in text
    assert "| 33 | a TPU |" not in text
    assert "are of 13 runs, in the record" in text, "the figures at the top are those of GPUs"


def of_experts(number, error, ours, **others):
    """A row that took a second: our program alone, and with a dispatch and products of its stack's own."""
    told = {"experts": "experts in one domain, fp8", "configuration": "c0ffee", "stack": "their experts"}
    rules = {"otherwise_seconds": {"grouped products": 0.1, "reductions": -0.05}, "ours_seconds": ours}
    return {**row("mbridge", number, error), **told, **rules, **others}


def test_experts_have_a_class_each_with_what_every_rule_changed(record):
    assert "## Experts" not in page(record, "today.toml")
    record["row"] += [of_experts(1, 0.02, 1.4), of_experts(2, 0.04, 1.3)]
    record["row"] += [of_experts(3, -0.2, 0.9, experts="experts across domains, bf16", configuration="beef")]
    lines = page(record, "today.toml").splitlines()
    assert "3 runs of mixtures of experts, of 2 configurations: each release of a source's software" in lines
    one, across = "experts in one domain, fp8", "experts across domains, bf16"
    assert f"| {one} | fitted | 2 | 35.0 % | +35.0 % | 3.0 % | 3.8 % | +3.0 % |" in lines
    assert f"| {across} | fitted | 1 | 10.0 % | -10.0 % | 20.0 % | 20.0 % | -20.0 % |" in lines
    after = next(place for place, line in enumerate(lines) if line.startswith("| after |"))
    assert lines[after] == "| after | their experts (3) | all |"
    # 1.02, 1.04 and 0.8 s without 0.1 s of products and with the 0.05 s that reductions save.
    steps = [line.split(" | ")[1] for line in lines[after + 2 : after + 6]]
    assert steps == ["30.0 %, +30.0 %", "3.0 %, -3.0 %", "9.0 %, +7.0 %", "4.0 %, +2.0 %"]


SEALED = {
    "date": "2026-12-02",
    "what": "runs of somebody",
    "sealed_at": "0123456789ab",
    "group": [
        {"name": "all", "rows": 2, "median": 0.2, "p90": 0.28, "bias": -0.2, "holds": 0.5},
        {"name": "bf16", "rows": 1, "median": 0.1, "p90": 0.1, "bias": 0.1},
    ],
    "worst": [{"id": "new-1", "error": -0.3}],
}


def test_what_was_sealed_stands_first_the_newest_before_the_others(record):
    older = {**SEALED, "date": "2026-11-30", "group": [{**SEALED["group"][0], "median": 0.4}]}
    text = page(record, "today.toml", sealed={"new_seal.toml": SEALED, "old_seal.toml": older})
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    of_what = "runs of somebody, 2026-12-02, at `0123456`"
    assert lines[1] == f"| **sealed** | 2 | {of_what} | **20.0 %** | **28.0 %** | **-20.0 %** | **50 %** |"
    assert lines[2].startswith("| **sealed** | 2 | runs of somebody, 2026-11-30, at `0123456` | **40.0 %**")
    assert lines[3].startswith("| fitted | 13 | each source left out")
    assert "| bf16 | sealed | 1 | 10.0 % | 10.0 % | +10.0 % |  |" in text
    assert "| new-1 | sealed | -30.0 % |" in text


def test_every_table_of_errors_keeps_kinds_apart(record):
    record["row"] += [row("mosaic", n, 0.5, kind="seen") for n in range(10, 14)]
    text = page(
        record,
        "today.toml",
        {"row": [row("maxtext", n, 0.1, chip="v5e") for n in (1, 2)], "inexpressible": {}},
        "t.toml",
    )
    assert "| MosaicML, LLM Foundry | fitted | 9 | 10.0 % |" in text
    assert "| MosaicML, LLM Foundry | seen | 4 | 50.0 % |" in text
    assert "| fsdp | seen | 4 | 50.0 % |" in text
    assert "| seen | 4 | all sources in that fit | 50.0 % |" in text
    heads = [
        line for line in text.splitlines() if line.startswith("|") and ("error" in line or "bias" in line)
    ]
    assert heads
    assert all("| kind |" in line for line in heads)


def test_the_form_of_a_point_is_its_kind(record):
    rows = [row("mosaic", 1, 0.1), row("mosaic", 2, 0.2, kind="sealed"), row("mosaic", 3, 0.3, kind="seen")]
    figure = draw(rows)
    forms = {
        line.get_marker(): list(line.get_ydata())
        for line in figure.axes[0].lines
        if line.get_marker() != "None"
    }
    assert {form: len(points) for form, points in forms.items()} == {"o": 1, "*": 1, "s": 1}
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["MosaicML, LLM Foundry (3)", "sealed (1)", "seen (1)", "fitted (1)"]


def test_the_page_says_which_classes_of_runs_their_intervals_hold(record):
    """A class of 15 runs or more in which far more or fewer than nine of ten hold is named with its share."""
    known = {"width": ["a100"], "otherwise_seconds": {}}
    many = [{**row("mosaic", n, 0.02, holds=n > 4), **known} for n in range(20)]
    more = [{**row("bloom", n, 0.02, chip="A100-40GB"), **known} for n in range(20)]
    none = {**{key: value for key, value in row("tt", 1, 0.1).items() if key != "holds"}, **known}
    text = page({**record, "row": [*many, *more, none]}, "today.toml")
    section = text.partition("## Intervals")[2].partition("\n## ")[0]
    assert "| a100 | fitted | 40 | 2 | -12 to +22 % | 88 % |" in section
    assert (
        "Runs without an interval, for more than a fifth of our program is gaps between kernels: 1."
        in section
    )
    fewer, over = [line for line in section.splitlines() if line.startswith("* ")][:2]
    assert "source MosaicML, LLM Foundry 75.0 %" in fewer
    assert "source BigScience, tuning of BLOOM 100.0 %" in over


def test_a_page_of_rows_without_widths_has_no_section_of_intervals(record):
    assert "## Intervals" not in page(record, "today.toml")


def test_runs_of_experts_have_lines_and_rules_by_their_kind(record):
    experts = {
        "experts": "experts in one domain, fp8",
        "configuration": "a",
        "ours_seconds": 1.3,
        "otherwise_seconds": {"fused kernels": -0.2, "messages beside products": -0.1},
    }
    for each, kind in zip(record["row"], ("seen", "fitted", "fitted"), strict=False):
        each |= {**experts, "kind": kind, "predicted_seconds": 1.0, "error": 0.0}
    text = page(record, "today.toml")
    assert "3 runs of mixtures of experts, of 1 configurations" in text
    figures = "30.0 % | +30.0 % | 0.0 % | 0.0 % | +0.0 %"
    assert f"| experts in one domain, fp8 | fitted | 2 | {figures} |" in text
    assert f"| all | seen | 1 | {figures} |" in text
    of_seen, of_fitted = text.split("What each rule changes in ")[1:]
    assert of_seen.startswith("seen runs")
    assert "| after | ours (1) | all |" in of_seen
    assert "| fused kernels | 10.0 %, +10.0 % | 10.0 %, +10.0 % |" in of_seen
    assert "| after | ours (2) | all |" in of_fitted
