"""One screen is what `weigh` prints by default."""

from __future__ import annotations

import dataclasses
import io
import itertools

import pytest
from rich.console import Console

from meshwright.ledger import Finding
from meshwright.report import screen_text, weighing_text

GIB = 2**30


def lines(weighing, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    console.print(screen_text(weighing))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def what_matters(weighing) -> list[str]:
    """The sentences under that heading, each on a line of its own."""
    found = lines(weighing, 1000)
    start = found.index("What matters most") + 1
    return [" ".join(line.split()) for line in found[start : found.index("", start)]]


def test_the_screen_reads_as_agreed(weighing, total, golden):
    golden("screen.txt", screen_text(weighing(run_total=total(price=1.8))))


def test_the_screen_of_what_does_not_fit_reads_as_agreed(weighing, golden):
    sizes = {"saved_activations": 86 * GIB, "optimizer_state": 8 * GIB, "parameters": 4 * GIB}
    made = weighing(memory={"reserved_bytes": 98 * GIB, "peak_bytes": None, "by_category": sizes})
    golden("screen_does_not_fit.txt", screen_text(made))


@pytest.mark.parametrize(("width", "most"), [(100, 24), (80, 30)])
def test_all_of_it_is_one_screen_however_much_there_is_to_say(weighing, total, width: int, most: int):
    sizes = {f"category_number_{n}": 3 * GIB for n in range(16)}
    base = weighing()
    flops = dataclasses.replace(base.ledger.flops, waste_by_module={"layers": 10**16}, bubble=10**16)
    made = weighing(
        run_total=total(price=1.8),
        ledger=dataclasses.replace(
            base.ledger, memory=dataclasses.replace(base.ledger.memory, by_category=sizes), flops=flops
        ),
    )
    found = lines(made, width)
    assert len(found) <= most
    assert max(map(len, found)) <= width


def test_the_step_stands_beside_the_verdict_with_its_interval(weighing):
    _, verdict, step, *_ = lines(weighing())
    assert verdict.startswith("FITS: 48.8 GiB of 80.0 GiB per device, 31.2 GiB (39.1 %) to spare")
    assert step == "STEP: 55.0 s (between 44.0 s and 66.0 s), 9.09K tokens/s per device, MFU 48.3 %"
    none = weighing(prediction=None, no_prediction="the link has no figure")
    assert lines(none)[2] == "STEP: none: the link has no figure"


def test_the_whole_run_and_its_cost_are_printed_where_they_are_known(weighing, total, plain):
    run = "RUN: 15B tokens in 3,750 steps take 2.39 days (between 45.8 h and 2.86 days)"
    assert lines(weighing(run_total=total()))[3:5] == [run, "COST: 458 device-hours (367 to 550)"]
    priced = lines(weighing(run_total=total(price=1.8)))[3:5]
    assert priced == [run, "COST: 825 (660 to 990): 458 device-hours (367 to 550) at 1.80"]
    assert not any("COST" in line or "RUN" in line for line in lines(weighing()))
    assert run in plain(weighing_text(weighing(run_total=total())))


def test_a_run_of_seconds_has_no_device_hours_unless_they_have_a_price(weighing, total):
    short = total(steps=1)
    tiny = dataclasses.replace(short, device_hours=dataclasses.replace(short.device_hours, expected=0.01))
    assert not any("COST" in line for line in lines(weighing(run_total=tiny)))


def test_the_rows_of_the_memory_bar_begin_where_the_one_above_ends(weighing):
    found = lines(weighing())
    rows = found[found.index("Memory of one device") + 1 :]
    rows = rows[: rows.index("")]
    assert [row.split("  ")[1].strip() for row in rows[-2:]] == ["beside the program", "free"]
    cells = [[place for place, letter in enumerate(row) if letter in "\u2501\u257a\u2578"] for row in rows]
    assert all(
        0 <= after[0] - before[-1] <= 1 for before, after in itertools.pairwise(cells)
    )  # half cells may share one
    assert sum(map(len, cells)) == pytest.approx(32, abs=len(rows))


def test_a_terminal_without_line_drawing_gets_dashes(weighing):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=100, color_system=None).print(screen_text(weighing()))
    file.flush()
    assert b"-----" in file.buffer.getvalue()


def test_three_things_matter_the_largest_losses_of_time_first(weighing):
    found = what_matters(weighing())
    assert found == [
        "time 11.0 s of the step, 20.0 %: waiting for communication",
        "FLOPs 4.5 % of the executed, 10.0 PFLOP: computed again in the backward pass (remat)",
        "memory 36.0 GiB, 75.0 % of the program's: saved activations",
    ]


def test_what_is_not_counted_and_what_the_lint_found_go_before_losses(weighing):
    base = weighing()
    finding = Finding(kind="work done twice", what="two do alike", source_line="", mend="split it")
    ledger = dataclasses.replace(
        base.ledger,
        unpriced=("sort of f32[8]",),
        findings=(finding, finding),
        flops=dataclasses.replace(base.ledger.flops, waste_by_module={"layers": 10**17}),
    )
    prediction = dataclasses.replace(base.prediction, unpriced=("sort of f32[8]", "custom call x"))
    first, second, third = what_matters(weighing(ledger=ledger, prediction=prediction))
    assert first == "unpriced no rule counts sort of f32[8], and 1 more: FLOPs and time leave it out"
    assert second == "finding two do alike. To mend it, split it (and 1 more: --verbose)"
    assert third.startswith("time 11.0 s")  # the finding has told of the work done twice
    taken = dataclasses.replace(ledger, unpriced=(), assumptions=("the dearest branch",))
    assert "assumed the dearest branch" in what_matters(weighing(ledger=taken))


def test_memory_that_lacks_matters_most_with_what_makes_it_smaller(weighing):
    made = weighing(memory={"reserved_bytes": 98 * GIB})
    first, second, *_ = what_matters(made)
    assert first == "memory most of it is saved activations (36.0 GiB) and optimizer state (8.00 GiB)"
    assert second == "Smaller with --set remat=full; --verbose has other changes"


def test_a_program_without_any_loss_says_what_its_time_and_memory_are(weighing):
    base = weighing()
    slices = base.prediction.slices[:1]
    flops = dataclasses.replace(base.ledger.flops, recomputed=0)
    made = weighing(
        ledger=dataclasses.replace(base.ledger, flops=flops),
        prediction=dataclasses.replace(base.prediction, slices=slices),
    )
    assert what_matters(made) == [
        "memory 36.0 GiB, 75.0 % of the program's: saved activations",
        "time 44.0 s of the step, 80.0 %: matrix products",
    ]


def test_the_screen_says_how_to_see_the_rest(weighing):
    assert {"--verbose", "--html", "--explain"} <= set(lines(weighing())[-1].replace(".", " ").split())
