from __future__ import annotations

import dataclasses
import io
import re

import pytest
from rich.console import Console

from meshwright.config import Layout, load_config
from meshwright.hardware import Fleet
from meshwright.ledger import Finding
from meshwright.report import verdict, weighing_text
from meshwright.report._terminal import _rule_differences
from meshwright.report._wording import FLOP_CONVENTION

GIB = 2**30


def test_a_weighing_that_fits_reads_as_agreed(weighing, golden):
    golden("fits.txt", weighing_text(weighing()))


def test_a_weighing_that_does_not_fit_names_what_would_shrink_it(weighing, golden):
    sizes = {"saved_activations": 86 * GIB, "optimizer_state": 8 * GIB, "parameters": 4 * GIB}
    made = weighing(memory={"reserved_bytes": 98 * GIB, "peak_bytes": None, "by_category": sizes})
    golden("does_not_fit.txt", weighing_text(made))


def test_a_simulated_weighing_says_so_loudly(weighing, golden):
    made = weighing(
        compiled={"source": "simulated on CPU", "platform": "cpu"},
        prediction=None,
        no_prediction="the CPU's compiler made this program",
        cached=True,
    )
    golden("simulated.txt", weighing_text(made))


def test_a_foreign_program_is_shown_without_what_only_configs_have(weighing, golden):
    unknown = dict.fromkeys(("num_parameters", "num_matmul_parameters", "tokens_per_step", "sequence_length"))
    base = weighing()
    made = weighing(
        name="theirs:program",
        config=None,
        compiled=unknown,
        ledger=dataclasses.replace(
            base.ledger,
            flops=dataclasses.replace(base.ledger.flops, rule_6nd=None),
            traffic=(),
            unpriced=("fft of c64[8,8] [twice]",),
        ),
        prediction=dataclasses.replace(
            base.prediction,
            tokens_per_second_per_device=None,
            unpriced=("fft of c64[8,8] [twice]", "custom call x"),
        ),
    )
    golden("foreign.txt", weighing_text(made))


def test_of_a_model_with_experts_the_parameters_that_a_token_uses_are_said(weighing, plain):
    text = plain(weighing_text(weighing(config=load_config("mixtral-8x7b"))))
    assert "parameters (12.9B active)" in text
    assert "experts that a token is not sent to" in " ".join(text.split())


def test_no_verdict_where_the_memory_is_not_known(weighing):
    memory = weighing(memory={"usable_bytes": None}).ledger.memory
    simulated, unknown = Fleet.parse("8xCPU"), Fleet.parse("8xB100")
    assert verdict(memory, simulated) == "NO VERDICT: a simulated CPU device has no memory of its own"
    assert verdict(memory, unknown) == "NO VERDICT: the catalog does not know how much memory B100 has"


def test_to_the_byte_full_still_fits(weighing):
    memory = weighing(memory={"usable_bytes": 48 * GIB + GIB // 2 + GIB // 4}).ledger.memory
    assert verdict(memory, Fleet.parse("8xH100")).endswith("0 B (0.0 %) to spare")
    less = dataclasses.replace(memory, usable_bytes=memory.usable_bytes - 1)
    assert verdict(less, Fleet.parse("8xH100")).endswith("1 B (0.0 %) too much")


def test_a_weighing_without_any_flops_or_slices_can_be_shown(weighing, plain):
    base = weighing()
    nothing = dataclasses.replace(
        base.ledger.flops, model=0, executed=0, by_phase={}, by_format={}, rule_6nd=None
    )
    ledger = dataclasses.replace(
        base.ledger, flops=nothing, memory=dataclasses.replace(base.ledger.memory, buffers=())
    )
    prediction = dataclasses.replace(base.prediction, slices=(), mfu=0.0, hfu=0.0, peak_flops_per_second=0.0)
    assert "0.00 FLOP" in plain(weighing_text(weighing(ledger=ledger, prediction=prediction)))


@pytest.mark.parametrize("model", [210, 200, 180])
def test_the_steps_from_the_rule_to_the_model_add_up(weighing, model: int):
    base = weighing()
    flops = dataclasses.replace(base.ledger.flops, model=model * 10**15)
    made = weighing(ledger=dataclasses.replace(base.ledger, flops=flops))
    total = flops.rule_6nd
    for sign, count, _ in _rule_differences(made):
        assert count > 0
        total += count if sign == "+" else -count
    assert total == flops.model


def test_names_in_brackets_are_no_markup(weighing, plain):
    assert "all-gather[fsdp]" in plain(weighing_text(weighing()))


def test_a_bar_is_red_only_where_it_is_more_than_a_device_gives(weighing):
    def bar_colours(**memory: object) -> set[str]:
        console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
        console.print(weighing_text(weighing(memory=memory)))
        return set(re.findall("\x1b\\[(?:1;)?(3\\dm)━", console.file.getvalue()))

    assert bar_colours() == {"36m"}  # cyan
    assert bar_colours(usable_bytes=None) == {"36m"}
    assert bar_colours(usable_bytes=40 * GIB) == {"31m", "36m"}


def test_a_finding_is_told_with_its_line_and_its_mend(weighing, plain):
    made = weighing()
    found = Finding(kind="k", what="a gather is undone", source_line="model.py:7", mend="pin both sides")
    ledger = dataclasses.replace(made.ledger, findings=(found,))
    text = plain(weighing_text(weighing(ledger=ledger)))
    assert "What could be mended\n  a gather is undone (model.py:7). Mend: pin both sides." in text


def test_flops_by_module_and_what_goes_beyond_the_model_around_one(weighing, plain):
    made = weighing()
    flops = dataclasses.replace(
        made.ledger.flops, by_module={"layers/up": 110 * 10**15}, waste_by_module={"layers": 10**15}
    )
    text = plain(weighing_text(weighing(ledger=dataclasses.replace(made.ledger, flops=flops))))
    line = next(" ".join(line.split()) for line in text.splitlines() if "layers/up" in line)
    assert line == "layers/up 110 PFLOP 50.0 % of executed, 1.00 PFLOP beyond the model's around it"


def test_a_pipelines_bubble_stands_below_the_executed_flops(weighing, plain):
    made = weighing(layout=Layout.parse("stage=4,fsdp=2"))  # 512 sequences, one at a time on two replicas
    flops = dataclasses.replace(made.ledger.flops, bubble=22 * 10**14)
    text = plain(
        weighing_text(dataclasses.replace(made, ledger=dataclasses.replace(made.ledger, flops=flops)))
    )
    words = " ".join(text.split())
    assert "in the bubble 2.20 PFLOP 1.0 % of executed: 3 of a stage's 259 passes have none" in words
    assert "none of the 256 microbatches (4 stages, 1f1b)" in words
    few = weighing(layout=Layout.parse("stage=4,fsdp=256"), fleet=Fleet.parse("1024xH100"))
    assert "(4 stages, 1f1b), fewer microbatches than stages" in " ".join(plain(weighing_text(few)).split())
    assert "bubble" not in plain(weighing_text(weighing()))


def test_the_convention_and_the_elementwise_work_stand_below_the_flops(weighing, plain):
    made = weighing()
    flops = dataclasses.replace(made.ledger.flops, elementwise_by_class={"arithmetic": 12 * 10**11})
    text = plain(weighing_text(weighing(ledger=dataclasses.replace(made.ledger, flops=flops))))
    words = " ".join(text.split())
    assert f"{FLOP_CONVENTION} Elementwise operations: arithmetic 1.2T." in words


def test_what_is_taken_for_granted_in_the_counts_is_said(weighing, plain):
    made = weighing()
    ledger = dataclasses.replace(
        made.ledger, assumptions=("conditional at a.py:1: counted by its dearest branch, 2 of 2",)
    )
    text = plain(weighing_text(weighing(ledger=ledger)))
    assert "Taken for granted\n  conditional at a.py:1: counted by its dearest branch, 2 of 2" in text


def test_a_torus_dimensions_stand_beside_the_link(weighing, plain):
    made = weighing()
    placed = dataclasses.replace(made.ledger.traffic[0], dimensions=("x", "y"))
    text = plain(weighing_text(weighing(ledger=dataclasses.replace(made.ledger, traffic=(placed,)))))
    assert "inside x+y" in text


def test_a_target_made_of_published_figures_is_named_with_the_compiler(weighing):
    def text_on(fleet: str) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(weighing_text(weighing(fleet=Fleet.parse(fleet))))
        return console.file.getvalue()

    assert ", for a target made of published figures" in text_on("8xRTX-4090")
    assert "published figures" not in text_on("8xH100")
