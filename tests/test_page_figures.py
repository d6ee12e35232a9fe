"""Figures in pages equal the data that they come from: a page that falls behind its data fails here."""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import load_config
from meshwright.hardware import CATALOG, Fleet
from meshwright.planning import space_of
from meshwright.predict import TAIL_OF_NOISE, ends_with_waits, runs, widths

ROOT = Path(__file__).parents[1]


def text_of(page: str) -> str:
    """The text of a page, without its line breaks."""
    return " ".join((ROOT / page).read_text().split())


def record(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "benchmarks/records" / f"{name}.toml").read_text())


def ends(*names: str) -> str:
    """An interval as pages write it: the widest of the widths that apply."""
    found = [widths()[name] for name in names]
    low, high = min(each.low for each in found), max(each.high for each in found)
    return f"{100 * low - 100:+.0f} to {100 * high - 100:+.0f} %"


INTERVALS = {
    "16-bit products on an H100 or H200": ("hopper",),
    "fp8 products on them": ("hopper-fp8",),
    "16-bit products on an A100": ("a100",),
    "16-bit products on a V100": ("v100",),
    "fp8 products on a B200": ("blackwell-fp8",),
    "fp8 products on a B300": ("blackwell-ultra-fp8",),
    "fp8 products on other chips": ("fp8", "tables"),
    "other chips with kernel tables": ("tables",),
    "NVIDIA chips of which others measured large products": ("products",),
    "other NVIDIA chips": ("default",),
    "a step with experts": ("experts",),
    "a CPU": ("calibration",),
    "a TPU of v4, v5e, v5p or v6e": ("tpu",),
    "such a TPU": ("tpu-program",),
    "other TPUs (": ("other-tpu",),
    "other TPUs,": ("other-tpu-program",),
}


@pytest.mark.parametrize("what", INTERVALS)
def test_the_table_of_intervals_has_those_that_are_used(what: str):
    rows = [
        row
        for row in (ROOT / "docs/explanation/how-weighing-works.md").read_text().splitlines()
        if "|" in row
    ]
    (row,) = [row for row in rows if row.startswith(f"| {what}")]
    assert row.split("|")[2].strip().startswith(ends(*INTERVALS[what]))


def test_every_interval_is_on_the_page():
    assert {name for names in INTERVALS.values() for name in names} == set(widths()) - {"eager"}


def tera(name: str) -> str:
    return f"{runs()['sustained'][name]['flops_per_second'] / 1e12:.0f}"


def tpu_shares() -> tuple[str, ...]:
    found = runs()["sustained"]
    return tuple(
        f"{100 * found[name]['flops_per_second'] / found[name]['peak_flops_per_second']:.0f}"
        for name in ("v4", "v5e", "v5p", "v6e")
    )


def torch_steps() -> tuple[str, ...]:
    """Median error of the steps that were weighed, and how many today's interval of their chip contains."""
    rows = record("2026-11-26_torch_time")["row"]
    inside = 0
    for row in rows:
        applied = [widths()[name] for name in ("a100" if "A100" in row["fleet"] else "hopper", "eager")]
        low, high = min(each.low for each in applied), max(each.high for each in applied)
        inside += low <= row["measured_seconds"] / row["predicted_seconds"] <= high
    median = statistics.median(abs(row["error"]) for row in rows)
    return f"{100 * median:.1f}", str(inside), str(len(rows))


def of_accuracy(*kinds: str) -> tuple[str, ...]:
    """Median error, nine of ten, and intervals that hold, by the page that a program makes of the records."""
    lines = (ROOT / "docs/results/accuracy.md").read_text().replace("*", "").splitlines()
    rows = [line.split("|") for line in lines if line.startswith(tuple(f"| {kind} |" for kind in kinds))]
    cells = [[cell.strip().removesuffix(" %") for cell in row] for row in rows[:2]]
    return cells[0][4], cells[0][5], next(row[7] for row in cells if row[7])


def narrowest_of_factors() -> tuple[str, str]:
    spread = math.exp(TAIL_OF_NOISE * runs()["factors"]["between_programs"])
    return f"{100 / spread - 100:+.0f}", f"{100 * spread - 100:+.0f}"


def ends_of_waits(share: float) -> str:
    low, high = ends_with_waits(widths()["hopper"].low, widths()["hopper"].high, share)
    return f"{100 * low - 100:+.0f} to {100 * high - 100:+.0f} %"


FIGURES: list[tuple[str, str, Callable[[], tuple[str, ...]]]] = [
    (
        "docs/explanation/how-weighing-works.md",
        r"(\d+) TFLOP/s on a V100, (\d+) on an A100, (\d+) on an H100",
        lambda: (tera("v100"), tera("a100_sxm"), tera("h100_sxm")),
    ),
    (
        "docs/explanation/how-weighing-works.md",
        r"for a tenth of its time ([-+]\d+ to [-+]\d+ %), for a third of it ([-+]\d+ to [-+]\d+ %)",
        lambda: (ends_of_waits(1 / 10), ends_of_waits(1 / 3)),
    ),
    (
        "docs/explanation/how-weighing-works.md",
        r"by itself is faster: (\d+) TFLOP/s",
        lambda: (f"{runs()['alone']['hopper']['flops_per_second'] / 1e12:.0f}",),
    ),
    (
        "docs/explanation/how-weighing-works.md",
        r"Eager PyTorch in a fleet reaches ([\d.]+) of it",
        lambda: (str(runs()["shared"]["eager_products_share"]),),
    ),
    (
        "docs/explanation/how-weighing-works.md",
        r"without a sustained figure, the tables' rate is multiplied by ([\d.]+\d)",
        lambda: (str(runs()["shared"]["factor_without_sustained"]),),
    ),
    (
        "docs/explanation/how-weighing-works.md",
        r"sustains (\d+) % less than the median one",
        lambda: (f"{100 - 100 * runs()['shared']['slowest_share']:.0f}",),
    ),
    (
        "docs/results/tpus.md",
        r"(\d+) % \(v4\), (\d+) % \(v5e\), (\d+) % \(v5p\) and (\d+) % \(v6e\)",
        tpu_shares,
    ),
    ("docs/how-to/calibration.md", r"never narrower than ([+-]\d+) to ([+-]\d+) %", narrowest_of_factors),
    (
        "docs/how-to/pytorch.md",
        r"An operation takes the host (\d+) us",
        lambda: (f"{runs()['shared']['eager_launch_seconds'] * 1e6:.0f}",),
    ),
    (
        "docs/how-to/pytorch.md",
        r"The printed interval, ([-+]\d+ to [-+]\d+ %) on an H100 and ([-+]\d+ to [-+]\d+ %) on an A100",
        lambda: (ends("hopper", "eager"), ends("a100", "eager")),
    ),
    (
        "docs/how-to/pytorch.md",
        r"The median error is ([\d.]+) %, nine of ten are within .*? contains (\d+) of the (\d+)",
        torch_steps,
    ),
    (
        "README.md",
        r"\*\*Sealed\*\*.*?median error is ([\d.]+) %, nine of ten errors are within ([\d.]+) %, and (\d+) %",
        lambda: of_accuracy("sealed"),
    ),
    (
        "README.md",
        r"\*Fitted\*:.*?median error is ([\d.]+) %, nine of ten errors are within ([\d.]+) %, and (\d+) %",
        lambda: of_accuracy("fitted"),
    ),
    (
        "docs/how-to/planning.md",
        r"64 devices have (\d+) ways to be divided over six axes",
        lambda: (str(space_of(load_config("llama3-8b"), Fleet.parse("64xH100")).num_layouts),),
    ),
]


@pytest.mark.parametrize(("page", "words", "figures"), FIGURES, ids=[f"{f[0]}: {f[1][:40]}" for f in FIGURES])
def test_a_figure_on_a_page_is_that_of_its_data(
    page: str, words: str, figures: Callable[[], tuple[str, ...]]
):
    found = re.search(words, text_of(page))
    assert found is not None, f"{page} no longer says: {words}"
    assert found.groups() == figures()


def test_chips_that_pages_name_have_the_memory_that_they_show():
    shown = re.findall(
        r"on (\d+x[A-Z0-9-]+), layout .*?\n(?:FITS|DOES NOT FIT): \S+ GiB of ([\d.]+) GiB",
        "\n".join(
            (ROOT / page).read_text()
            for page in ("README.md", "docs/tutorials/getting-started.md", "docs/how-to/programs.md")
        ),
    )
    assert shown
    for fleet, gib in shown:
        chip = CATALOG[Fleet.parse(fleet).chip.name]
        assert f"{chip.memory_bytes / 2**30:.1f}" == gib


def test_the_size_that_the_readme_gives_is_about_right():
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / "src").rglob("*.py")}
    code = [count for path, count in lines.items() if path.name != "__init__.py"]
    found = re.search(r"has (\d+) modules of (\d+) lines at the median, ([\d,]+) lines", text_of("README.md"))
    assert found is not None
    shown = [int(figure.replace(",", "")) for figure in found.groups()]
    assert shown == pytest.approx([len(code), statistics.median(code), sum(lines.values())], rel=0.1)
