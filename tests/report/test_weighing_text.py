"""A weighing on a terminal: the one screen that `weigh` prints by default, and the full account."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re

import pytest
from rich.console import Console

from meshwright.config import Layout, load_config
from meshwright.hardware import Fleet
from meshwright.ledger import Finding
from meshwright.predict import Slice
from meshwright.report import FLOP_CONVENTION, facts_of, renderable
from meshwright.units import format_power_of_ten

GIB = 2**30
TOO_LARGE = {
    "reserved_bytes": 98 * GIB,
    "peak_bytes": None,
    "by_category": {"saved_activations": 86 * GIB, "optimizer_state": 8 * GIB, "parameters": 4 * GIB},
}
FINDING = Finding(kind="k", what="a gather is undone", source_line="model.py:7", fix="pin both sides")


@pytest.fixture
def foreign(weighing):
    unknown = dict.fromkeys(("num_parameters", "num_matmul_parameters", "tokens_per_step", "sequence_length"))
    without_rule = "fft of c64[8,8] [twice]"
    return weighing(
        name="theirs:program",
        config=None,
        compiled=unknown,
        flops={"rule_6nd": None},
        traffic=(),
        unpriced=(without_rule,),
        prediction={
            "tokens_per_second_per_device": None,
            "unpriced": (without_rule, "custom call x"),
        },
    )


@pytest.fixture
def simulated(weighing):
    return weighing(
        compiled={"source": "simulated on CPU", "platform": "cpu"},
        prediction=None,
        no_prediction="the CPU's compiler made this program",
        cached=True,
    )


def test_a_weighing_that_fits_reads_as_agreed(weighing, golden):
    golden("fits.txt", weighing(), verbose=True)


def test_a_weighing_that_does_not_fit_names_what_would_shrink_it(weighing, golden):
    golden("does_not_fit.txt", weighing(memory=TOO_LARGE), verbose=True)


def test_a_simulated_weighing_says_so_loudly(simulated, golden):
    golden("simulated.txt", simulated, verbose=True)


def test_a_foreign_program_is_shown_without_what_only_configs_have(foreign, golden):
    golden("foreign.txt", foreign, verbose=True)


def test_only_a_configuration_is_told_of_explain(weighing, foreign):
    assert "mw.explain" in str(weighing())
    assert "to_perfetto(FILE)" in str(foreign)
    assert "explain" not in str(foreign)


def test_the_screen_reads_as_agreed(weighing, golden):
    golden("screen.txt", weighing(num_steps=3750, price=1.8))


def test_the_screen_of_what_does_not_fit_reads_as_agreed(weighing, golden):
    golden("screen_does_not_fit.txt", weighing(memory=TOO_LARGE))


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def matters(printed: str) -> list[str]:
    """The sentences under that heading, each on a line of its own."""
    rows = lines(printed)
    start = rows.index("What matters most") + 1
    return rows[start : rows.index("", start)]


def test_a_category_of_a_twentieth_of_the_memory_has_a_row_and_an_unclear_one_a_reason(weighing, text):
    sizes = {f"category_number_{n}": 5 * GIB for n in range(6)}
    sizes |= {"fragmentation": 4 * GIB, "other": 3 * GIB, "small": GIB // 8}
    printed = text(
        weighing(memory={"by_category": sizes, "buffers": (), "reserved_bytes": 38 * GIB}), width=120
    )
    rows = lines(printed)
    assert any(row.startswith("fragmentation 4.00 GiB") for row in rows)
    assert any(row.startswith("other 3.00 GiB") for row in rows)
    assert "fragmentation, gaps between arrays that the compiler's plan leaves at the peak" in " ".join(rows)
    assert "of no phase that its names show" in " ".join(rows)


@pytest.mark.parametrize(("width", "most"), [(100, 25), (80, 31)])
def test_all_of_it_is_one_screen_however_much_there_is_to_say(weighing, text, width: int, most: int):
    sizes = {f"category_number_{n}": 16 * GIB >> n for n in range(16)}
    made = weighing(
        num_steps=3750,
        price=1.8,
        memory={"by_category": sizes, "buffers": ()},
        flops={"waste_by_module": {"layers": 10**16}, "bubble": 10**16},
    )
    rows = text(made, width=width).splitlines()
    assert len(rows) <= most
    assert max(map(len, rows)) <= width


def test_the_step_stands_beside_the_verdict_with_its_interval(weighing, text):
    _, verdict, step, *_ = text(weighing()).splitlines()
    assert verdict.startswith("FITS: 48.8 GiB of 80.0 GiB per device, 31.2 GiB (39.1 %) to spare")
    assert step == "STEP: 55.0 s (between 44.0 s and 66.0 s), 9.09K tokens/s per device, MFU 48.3 %"
    none = weighing(prediction=None, no_prediction="the link has no figure")
    assert text(none).splitlines()[2] == "STEP: none: the link has no figure"


@pytest.mark.parametrize(
    ("low", "high", "reasons", "expected"),
    [
        (1.0, 2.0, (), "1.50 s (between 1.00 s and 2.00 s),"),
        (1.0, 2.0, ("no table", "old rates"), "1.50 s (between 1.00 s and 2.00 s: no table; old rates),"),
        (1.0, None, ("not priced: a sort",), "1.50 s (at least 1.00 s, no upper end: not priced: a sort),"),
        (None, None, ("fp32",), "1.50 s (no interval: fp32),"),
    ],
)
def test_an_interval_says_its_ends_and_why_it_is_wide_or_lacks_one(
    weighing, words, low, high, reasons, expected
):
    seconds = dataclasses.replace(weighing().prediction.step_seconds, low=low, expected=1.5, high=high)
    made = weighing(prediction={"step_seconds": seconds, "interval_reasons": reasons})
    assert f"Predicted time of one step {expected}" in words(made, verbose=True)
    assert (f"its interval: {'; '.join(reasons)}" in words(made)) == bool(reasons)


def test_the_whole_run_and_its_cost_are_printed_where_they_are_known(weighing, text):
    run = "RUN: 15B tokens in 3,750 steps take 2.39 days (between 1.91 days and 2.86 days)"
    rows = text(weighing(num_steps=3750)).splitlines()
    assert rows[3:5] == [run, "COST: 458 device-hours (367 to 550)"]
    priced = text(weighing(num_steps=3750, price=1.8)).splitlines()
    assert priced[3:5] == [
        run,
        "COST: 825 in your currency (660 to 990): 458 device-hours (367 to 550) at 1.80",
    ]
    assert not any("COST" in line or "RUN" in line for line in text(weighing()).splitlines())
    assert run in text(weighing(num_steps=3750), verbose=True)


def test_the_flops_of_the_whole_run_are_printed_with_their_share_of_the_threshold_for_reports(weighing, text):
    step = weighing().ledger.flops

    def line(**more):
        return next(row for row in text(weighing(**more)).splitlines() if row.startswith("RUN FLOPs"))

    made = weighing(num_steps=10**6)
    assert made.run_flops.model == 10**6 * step.model
    assert made.run_flops.rule_6nd == 10**6 * step.rule_6nd
    assert made.run_flops.share_of_threshold == 10**6 * step.model / 1e26
    shown = [format_power_of_ten(10**6 * count) for count in (step.model, step.rule_6nd)]
    share = f"{100 * made.run_flops.share_of_threshold:.2g} %"
    expected = f"RUN FLOPs: {shown[0]} (6ND {shown[1]}), {share} of the reporting threshold 1e26"
    assert line(num_steps=10**6) == expected
    assert "under 0.01 % of the reporting threshold 1e26" in line(num_steps=10)
    assert "RUN FLOPs" in text(weighing(num_steps=10, prediction=None, no_prediction="no rate is known"))
    assert "RUN FLOPs" not in text(weighing())


def test_one_line_says_what_leaves_the_host_what_stays_and_what_is_hidden(weighing, text):
    def sent(**more):
        return dataclasses.replace(weighing().ledger.traffic[0], **more)

    traffic = (
        sent(wire_bytes=8 * 10**9, crossing_bytes=10**9),
        sent(kind="all-reduce", axes=("tensor",), wire_bytes=3 * 10**9, crossing_bytes=0),
        sent(kind="all-reduce", axes=("data",), wire_bytes=4, crossing_bytes=4),
    )
    fleet = Fleet.parse("16xH100")
    slices = (
        Slice(kind="communication", name="all-gather[fsdp]", seconds=12.0, exposed_seconds=3.0),
        Slice(kind="communication", name="all-reduce[tensor]", seconds=4.0, exposed_seconds=4.0),
    )
    made = weighing(fleet=fleet, traffic=traffic, prediction={"slices": slices})
    line = (
        "1.00 GB leave the host, 75.0 % hidden (fsdp); "
        "10.0 GB stay inside, 56.2 % hidden (fsdp 7.00 GB, 75.0 %; tensor 3.00 GB, 0.0 %)"
    )
    assert f"TRAFFIC: {line}" in text(made, width=200).splitlines()
    assert f"  {line}." in text(made, width=200, verbose=True).splitlines()
    untimed = weighing(fleet=fleet, traffic=traffic, prediction=None, no_prediction="no rate")
    assert "1.00 GB leave the host (fsdp); 10.0 GB stay" in text(untimed, width=200)
    alone = text(weighing(traffic=traffic[1:2]), width=200, verbose=True)
    assert "TRAFFIC" not in alone
    assert "nothing leaves the host; 3.00 GB stay inside (tensor)" in alone
    rack = weighing(fleet=Fleet.parse("144xGB200"), traffic=traffic)
    assert "1.00 GB leave the rack" in text(rack, width=200)


def test_a_run_of_seconds_has_no_device_hours_unless_they_have_a_price(weighing, text):
    seconds = dataclasses.replace(weighing().prediction.step_seconds, expected=5.0)
    short = {"num_steps": 1, "prediction": {"step_seconds": seconds}}
    assert "COST" not in text(weighing(**short))
    assert "COST: 0.02 in your currency (" in text(weighing(**short, price=1.8))


def test_figures_are_whole_on_a_narrow_terminal(weighing):
    for columns in (60, 50):
        written = io.StringIO()
        for verbose in (False, True):
            screen = renderable(weighing(), verbose=verbose)
            Console(file=written, width=columns, color_system=None, highlight=False).print(screen)
        lines = written.getvalue().splitlines()
        assert "…" not in written.getvalue()
        assert max(map(len, lines)) <= columns
        assert any(re.search(r"saved\s.*36.0 GiB +45.0 %", line) for line in lines)


def test_the_rows_of_the_memory_bar_begin_where_the_one_above_ends(weighing, text):
    rows = text(weighing()).splitlines()
    rows = rows[rows.index("Memory of one device") + 1 :]
    rows = rows[: rows.index("")]
    assert [row.split("  ")[1].strip() for row in rows[-2:]] == ["beside the program", "free"]
    cells = [[place for place, letter in enumerate(row) if letter in "\u2501\u257a\u2578"] for row in rows]
    assert all(
        0 <= after[0] - before[-1] <= 1 for before, after in itertools.pairwise(cells)
    )  # half cells may share one
    assert sum(map(len, cells)) == pytest.approx(32, abs=len(rows))


def test_a_terminal_without_line_drawing_gets_dashes(weighing):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=100, color_system=None).print(renderable(weighing()))
    file.flush()
    assert b"-----" in file.buffer.getvalue()


def test_a_bar_is_red_only_where_it_is_more_than_a_device_gives(weighing):
    def bar_colours(**memory: object) -> set[str]:
        console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
        console.print(renderable(weighing(memory=memory), verbose=True))
        return set(re.findall("\x1b\\[(?:1;)?(3\\dm)━", console.file.getvalue()))

    assert bar_colours() == {"36m"}  # cyan
    assert bar_colours(usable_bytes=None) == {"36m"}
    assert bar_colours(usable_bytes=40 * GIB) == {"31m", "36m"}


def test_three_things_matter_the_largest_losses_of_time_first(weighing, text):
    assert matters(text(weighing(), width=1000)) == [
        "time 11.0 s of the step, 20.0 %: waiting for communication",
        "FLOPs 4.5 % of the executed, 10.0 PFLOP: computed again in the backward pass (remat)",
        "memory 36.0 GiB, 75.0 % of the program's: saved activations",
    ]


def test_what_is_not_counted_and_what_the_lint_found_go_before_losses(weighing, text):
    finding = Finding(kind="work done twice", what="two do alike", source_line="", fix="split it")
    changes = {
        "findings": (finding, finding),
        "flops": {"waste_by_module": {"layers": 10**17}},
        "prediction": {"unpriced": ("sort of f32[8]", "custom call x")},
    }
    made = weighing(unpriced=("sort of f32[8]", "mystery(f32[8])"), **changes)
    first, second, third = matters(text(made, width=1000))
    no_rule = "no rule counts sort of f32[8], and 1 more: FLOPs and time leave it out"
    assert first == f"unpriced {no_rule}; time of custom call x"
    assert second == "finding two do alike. To fix it, split it (and 1 more: --verbose)"
    assert third.startswith("time 11.0 s")  # the finding has told of the work done twice
    assumed = weighing(**{**changes, "prediction": {}}, assumptions=("the larger branch",))
    assert "assumed the larger branch" in matters(text(assumed, width=1000))


def test_memory_that_lacks_matters_most_with_what_makes_it_smaller(weighing, text):
    first, second, *_ = matters(text(weighing(memory={"reserved_bytes": 98 * GIB}), width=1000))
    assert first == "memory most of it is saved activations (36.0 GiB) and optimizer state (8.00 GiB)"
    assert second == "Smaller with --set remat=full --set layer_loop=keep; --verbose has other changes"


def test_a_change_that_is_enough_is_said_to_fit(weighing, text):
    usable = weighing().ledger.memory.usable_bytes
    _, second, *_ = matters(text(weighing(memory={"reserved_bytes": usable}), width=1000))
    assert second == "Fits with --set offload=optimizer; --verbose has other changes"


def test_a_program_without_any_loss_says_what_its_time_and_memory_are(weighing, text):
    slices = weighing().prediction.slices[:1]
    made = weighing(flops={"recomputed": 0}, prediction={"slices": slices})
    assert matters(text(made, width=1000)) == [
        "memory 36.0 GiB, 75.0 % of the program's: saved activations",
        "time 44.0 s of the step, 80.0 %: matrix products",
    ]


def test_the_screen_says_how_to_see_the_rest(weighing, text):
    last = text(weighing()).splitlines()[-1]
    assert {"--verbose", "--html", "--explain"} <= set(last.replace(".", " ").split())


def test_of_a_model_with_experts_the_parameters_that_a_token_uses_are_said(weighing, words):
    made = words(weighing(config=load_config("mixtral-8x7b")), verbose=True)
    assert "parameters (12.9B active)" in made
    assert "experts that a token is not sent to" in made


@pytest.mark.parametrize(
    ("fleet", "why"),
    [
        ("8xCPU", "a simulated CPU device has no memory of its own"),
        ("8xB100", "the catalog does not know how much memory B100 has"),
    ],
)
def test_no_verdict_where_the_memory_is_not_known(weighing, text, fleet: str, why: str):
    made = weighing(memory={"usable_bytes": None}, fleet=Fleet.parse(fleet))
    assert text(made).splitlines()[1] == f"NO VERDICT: {why}"


def test_to_the_byte_full_still_fits(weighing, text):
    full = 48 * GIB + GIB // 2 + GIB // 4
    assert "0 B (0.0 %) to spare" in text(weighing(memory={"usable_bytes": full}))
    assert "1 B (0.0 %) too much" in text(weighing(memory={"usable_bytes": full - 1}))


def test_a_weighing_without_any_flops_or_slices_can_be_shown(weighing, text):
    made = weighing(
        flops={"model": 0, "executed": 0, "by_phase": {}, "by_format": {}, "rule_6nd": None},
        memory={"buffers": ()},
        prediction={"slices": (), "mfu": None, "hfu": None, "peak_flops_per_second": 0.0},
    )
    assert "0.00 FLOP" in text(made, verbose=True)
    assert "MFU unknown" in text(made)


@pytest.mark.parametrize("model", [210, 200, 180])
def test_the_steps_from_the_rule_to_the_model_add_up(weighing, model: int):
    made = weighing(flops={"model": model * 10**15})
    total = made.ledger.flops.rule_6nd
    for sign, count, _ in facts_of(made).rule_terms:
        assert count > 0
        total += count if sign == "+" else -count
    assert total == made.ledger.flops.model


def test_names_in_brackets_are_no_markup(weighing, text):
    assert "all-gather[fsdp]" in text(weighing(), verbose=True)


def test_small_categories_are_summed_so_that_the_rows_still_add_up(weighing, text):
    small = {"keys": 8, "step": 4, "outputs": 1000}
    memory = weighing().ledger.memory
    rows = lines(text(weighing(memory={"by_category": {**memory.by_category, **small}}), verbose=True))
    assert "3 smaller ones 1012 B 0.0 %" in [row.rstrip(" \u2578") for row in rows]
    assert not any(row.startswith("keys") for row in rows)


def test_moments_stand_below_the_optimizer_state_where_there_are_several(weighing, text):
    rows = lines(text(weighing(), verbose=True))
    place = next(i for i, line in enumerate(rows) if line.startswith("optimizer state"))
    assert [line.split()[0] for line in rows[place + 1 : place + 3]] == ["mu", "nu"]
    single = weighing(memory={"optimizer_state_by_moment": {"trace": 8 * GIB}})
    assert "trace" not in text(single, verbose=True)


def test_each_number_format_says_whose_it_is_and_small_ones_share_a_row(weighing, text):
    first, _ = weighing().ledger.memory.buffers
    held = {"saved_activations": 36 * GIB, "parameters": 4 * GIB, "keys": 8, "step": 4}
    formats = ("bf16", "f32", "u32", "s32")
    buffers = tuple(
        dataclasses.replace(first, category=category, format=dtype, num_bytes=size)
        for (category, size), dtype in zip(held.items(), formats, strict=True)
    )
    memory = {"by_category": {**held, "fragmentation": GIB}, "buffers": buffers}
    memory["reserved_bytes"] = 41 * GIB + 12
    rows = lines(text(weighing(memory=memory), verbose=True))
    start = rows.index("Number formats at the peak") + 2
    assert rows[start : start + 4] == [
        "bf16 36.0 GiB saved activations 36.0 GiB",
        "fp32 4.00 GiB parameters 4.00 GiB",
        "unused 1.00 GiB fragmentation 1.00 GiB",
        "uint32, int32 12 B",
    ]


def test_a_buffer_is_named_by_its_module_and_line_or_its_path(weighing, text):
    made = text(weighing(), verbose=True)
    assert "layers transformer.py:25" in made
    assert "state['parameters']['embedding']" in made
    first = dataclasses.replace(weighing().ledger.memory.buffers[0], module="", source_line="")
    assert "saved activations  body/dot_general" in text(weighing(memory={"buffers": (first,)}), verbose=True)
    without = text(weighing(memory={"buffers": ()}), verbose=True)
    assert "Largest buffers at the peak\n  none\n" in without


def test_memory_outside_the_device_is_listed_and_notes_are_sentences(weighing, words):
    memory = {"host_bytes": GIB, "on_chip_bytes": 2 * GIB, "host_needs": {"batches": 4096}}
    made = words(weighing(memory={**memory, "notes": ("the compiler counts less",)}), verbose=True)
    for expected in (
        "in host memory 1.00 GiB", "on the chip (VMEM) 2.00 GiB not reserved",
        "each host: batches 4.00 KiB of its own memory", "The compiler counts less.",
    ):  # fmt: skip
        assert expected in made


def test_a_finding_is_shown_with_its_line_and_its_fix(weighing, text):
    made = text(weighing(findings=(FINDING,)), verbose=True)
    assert "What could be fixed\n  a gather is undone (model.py:7). Fix: pin both sides." in made


def test_flops_by_module_and_what_goes_beyond_the_model_around_one(weighing, text):
    flops = {"by_module": {"layers/up": 110 * 10**15}, "waste_by_module": {"layers": 10**15}}
    rows = lines(text(weighing(flops=flops), verbose=True))
    assert "layers/up 110 PFLOP 50.0 % of executed, 1.00 PFLOP beyond the model's around it" in rows


def test_a_pipelines_bubble_stands_below_the_executed_flops(weighing, words):
    # 512 sequences, one at a time on two replicas
    made = words(weighing(layout=Layout.parse("stage=4,fsdp=2"), flops={"bubble": 22 * 10**14}), verbose=True)
    assert "in the bubble 2.20 PFLOP 1.0 % of executed: 3 of a stage's 259 passes have none" in made
    assert "none of the 256 microbatches (4 stages, 1f1b)" in made
    few = weighing(layout=Layout.parse("stage=4,fsdp=256"), fleet=Fleet.parse("1024xH100"))
    assert "(4 stages, 1f1b), fewer microbatches than stages" in words(few, verbose=True)
    assert "bubble" not in words(weighing(), verbose=True)


def test_the_convention_and_the_elementwise_work_stand_below_the_flops(weighing, words):
    made = weighing(flops={"elementwise_by_class": {"arithmetic": 12 * 10**11, "comparison": 34 * 10**9}})
    expected = f"{FLOP_CONVENTION} Elementwise operations: arithmetic 1.2T, comparison 34B."
    assert expected in words(made, verbose=True)
    assert f"{FLOP_CONVENTION} Traffic" in words(weighing(), verbose=True)


def test_assumptions_in_the_counts_are_listed(weighing, text):
    made = weighing(assumptions=("conditional at a.py:1: counted by its largest branch, 2 of 2",))
    expected = "Assumptions in the counts\n  conditional at a.py:1: counted by its largest branch, 2 of 2"
    assert expected in text(made, verbose=True)


def test_a_torus_dimensions_stand_beside_the_link(weighing, text):
    placed = dataclasses.replace(weighing().ledger.traffic[0], dimensions=("x", "y"))
    assert "inside x+y" in text(weighing(traffic=(placed,)), verbose=True)


def test_a_bound_saves_at_most_and_a_change_is_what_the_command_line_takes(weighing, words):
    (bound,) = weighing().prediction.what_helps
    order = dataclasses.replace(bound, saving_seconds=5.5, change="--layout fsdp=2,data=4", certainty="whole")
    made = words(weighing(prediction={"what_helps": (order, bound)}), verbose=True)
    assert "--layout fsdp=2,data=4 5.50 s 10.0 % whole" in made
    assert "at most 11.0 s 20.0 % bound: all of them" in made
    assert "faster" not in words(weighing(prediction={"what_helps": ()}), verbose=True)


def test_a_target_made_of_published_figures_is_named_with_the_compiler(weighing, words):
    assert ", for a target made of published figures" in words(weighing(fleet=Fleet.parse("8xRTX-4090")))
    assert "published figures" not in words(weighing(fleet=Fleet.parse("8xH100")))
