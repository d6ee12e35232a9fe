"""The page of a run's folder, a weighing or a sweep: complete, escaped, and in need of no other file."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.contrib.changes import Changes
from meshwright.contrib.pages import page_of, read_run, write_report
from meshwright.contrib.sweeps import Sweep, SweepRun
from meshwright.ledger import Finding
from meshwright.measure import Reconciliation, Row
from meshwright.results import WEIGHING_SCHEMA, Change

pytestmark = pytest.mark.once

GIB = 2**30
VOID = {"meta", "br", "wbr"}
INLINE = {"span", "wbr"}
LINKING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps the text, the links and the names of elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.links: list[str] = []
        self.words: list[str] = []
        self._parts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    @property
    def text(self) -> str:
        """The words, with one blank for whatever stands between them."""
        return " ".join("".join(self._parts).split())

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self._parts += [] if tag in INLINE else [" "]
        self.links += [value for name, value in attrs if name in LINKING]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag
        self._parts += [] if tag in INLINE else [" "]

    def handle_data(self, data):
        self.words.append(data)
        self._parts.append(data)


@pytest.fixture
def run(tmp_path: Path, weighing, measurement) -> Path:
    """The folder of a run that is over, with markup where a stranger could have put it."""
    row = Row(quantity="step seconds", unit="seconds", predicted=0.012, measured=0.016, how="the <clock>")
    compared = Reconciliation(same_program=True, rows=(row,), not_compared={"MFU": "no peak"})
    metrics = [{"step": n, "loss": loss} for n, loss in measurement().losses.items()]
    metrics += [{"step": n, "held_out_loss": loss} for n, loss in measurement().held_out_losses.items()]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weighing.json").write_text(weighing(name="mine<b>").to_json())
    sample = "<script>alert(1)</script>\n"
    (tmp_path / "measurement.json").write_text(measurement(sample=sample).to_json())
    (tmp_path / "reconciliation.json").write_text(compared.to_json())
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return tmp_path


def page_in(folder: Path) -> Page:
    return Page(write_report(folder).read_text("utf-8"))


def test_the_page_is_well_formed_and_shows_what_the_files_say(run: Path):
    page = page_in(run)
    text = page.text
    for expected in (
        "mine<b>", "FITS: 48.8 GiB of 80.0 GiB per device, 31.2 GiB (39.1 %) to spare",
        "5.750 → 4.250", "4.375", "16.0 ms", "32K",
        "12.0 ms", "-25.0 %", "the <clock>", "no peak", "36.0 GiB", "210 PFLOP", "7.00 GB", "55.0 s",
        "jax", "0123abcd",
    ):  # fmt: skip
        assert expected in text


def test_the_page_shows_which_category_is_in_which_number_format(run: Path):
    text = page_in(run).text
    assert "format size whose unused 45.0 GiB saved activations 34.0 GiB" in text
    assert "bf16 2.00 GiB saved activations 2.00 GiB" in text


def test_the_page_needs_nothing_from_elsewhere(run: Path):
    page = page_in(run)
    assert all(link.startswith("#") for link in page.links)
    assert not page.names & {"script", "link", "img", "iframe", "object", "base"}
    style = (run / "report.html").read_text("utf-8").partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_what_the_model_wrote_is_text_not_markup(run: Path):
    page = page_in(run)
    assert "<script>alert(1)</script>\n" in page.words


def test_the_same_folder_gives_the_same_bytes(run: Path):
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_an_empty_folder_gives_a_page_that_says_what_is_missing(tmp_path: Path):
    text = page_in(tmp_path).text
    assert tmp_path.name in text
    assert "weighing.json is not there" in text


@pytest.mark.parametrize(
    "name", ["config.json", "weighing.json", "metrics.jsonl", "measurement.json", "reconciliation.json"]
)
def test_each_file_can_be_missing(run: Path, name: str):
    (run / name).unlink()
    assert f"{name} is not there" in page_in(run).text


def test_a_run_that_was_killed_is_shown_as_far_as_it_went(run: Path):
    for name in ("measurement.json", "reconciliation.json"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    text = page_in(run).text
    assert "no whole entry on line 7" in text
    assert "5.750 → 4.250" in text


ONE_CPU = {"name": "1xCPU", "chip": "CPU", "domain": "host", "num_domains": 1}


def text_with(run: Path, **changes) -> str:
    """The text of the page after changes to the saved weighing."""
    weighing = json.loads((run / "weighing.json").read_text())
    weighing["ledger"]["memory"] |= changes.pop("memory", {})
    (run / "weighing.json").write_text(json.dumps({**weighing, **changes}))
    return page_in(run).text


def test_a_program_that_does_not_fit_says_by_how_much_and_what_helps(run: Path, weighing):
    text = text_with(run, memory={"usable_bytes": 40 * GIB})
    assert "DOES NOT FIT: 48.8 GiB of 40.0 GiB per device, 8.75 GiB (21.9 %) too much" in text
    page = Page(page_of(weighing(memory={"usable_bytes": 40 * GIB})))
    assert "--set remat=full" in page.text


def test_without_usable_memory_there_is_no_verdict_and_the_reason(run: Path):
    assert "a simulated CPU device has no memory of its own" in text_with(
        run, memory={"usable_bytes": None}, fleet=ONE_CPU
    )


def test_a_run_on_simulated_devices_opens_with_its_curve(run: Path):
    text = text_with(run, memory={"usable_bytes": None}, fleet=ONE_CPU)
    assert text.index("Loss") < text.index("Predicted time of one step") < text.index("NO VERDICT")


def test_an_unknown_chip_memory_is_no_verdict_either(run: Path):
    assert "the catalog does not know" in text_with(run, memory={"usable_bytes": None})


def test_a_simulated_program_is_marked(run: Path):
    assert "SIMULATED ON CPU" in text_with(run, source="simulated on CPU")


def test_no_prediction_is_said_with_its_reason(run: Path):
    assert "none: nothing is known" in text_with(run, prediction=None, no_prediction="nothing is known")


def test_a_saved_weighing_of_another_version_is_refused_in_words_and_the_rest_is_shown(run: Path):
    text = text_with(run, schema=WEIGHING_SCHEMA - 1)
    assert "weighing.json cannot be read: it is of another version of Meshwright" in text
    assert "FITS" not in text
    assert "5.750 → 4.250" in text


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"layout": 3}, "this is not a weighing: layout: Input should be a valid string"),
        ({"ledger": None}, "this is not a weighing: ledger: Input should be"),
    ],
)
def test_a_saved_weighing_that_cannot_be_read_is_named_and_the_rest_is_shown(run: Path, damage, words: str):
    text = text_with_damage(run, damage)
    assert f"weighing.json cannot be read: {words}" in text
    assert "5.750 → 4.250" in text


def text_with_damage(run: Path, damage: dict) -> str:
    weighing = json.loads((run / "weighing.json").read_text())
    (run / "weighing.json").write_text(json.dumps({**weighing, **damage}))
    return page_in(run).text


def test_a_weighing_alone_is_a_page_with_its_timeline_and_findings(weighing):
    finding = Finding(kind="k", what="a <large> argument", source_line="model.py:7", fix="split it")
    text = Page(page_of(weighing(findings=(finding,), unpriced=("sort(f32[8])",)))).text
    for expected in (
        "Memory through the step", "Largest buffers at the peak",
        "a <large> argument (model.py:7). Fix: split it.",
        "Unpriced: no rule counts these sort(f32[8])", "layers", "made in the forward pass (named)",
        "attention's own products",
    ):  # fmt: skip
        assert expected in text
    assert "Not whole" not in text


def test_the_sum_by_hand_stands_beside_what_is_compiled(run: Path):
    weighing = json.loads((run / "weighing.json").read_text())
    weighing["rule_of_thumb"]["rows"][2]["why"] = "twice <some>"
    text = text_with(run, rule_of_thumb=weighing["rule_of_thumb"])
    for expected in (
        "The sum by hand",
        "tokens x width x layers",
        "gradients 29.9 GiB 3.74 GiB 0 B twice <some>",
    ):
        assert expected in text


def test_flops_by_module_are_executed_and_in_the_model(weighing):
    flops = {"by_module": {"up": 110 * 10**15}, "model_by_module": {"up": 105 * 10**15, "loss": 10**15}}
    text = Page(page_of(weighing(flops={**flops, "bubble": 12 * 10**15}))).text
    assert "up 110 PFLOP 105 PFLOP 50.0 % of executed" in text
    assert "loss 0.00 FLOP 1.00 PFLOP 0.0 % of executed" in text
    assert "in the bubble 12.0 PFLOP" in text


def test_traffic_names_its_links_and_separates_loops(weighing):
    first, *others = weighing().ledger.traffic
    placed = dataclasses.replace(first, link_name="ICI 3D torus", dimensions=("x", "z"))
    text = Page(page_of(weighing(traffic=(placed, *others)))).text
    assert "all-gather fsdp (8) inside x+z ICI 3D torus in a loop 64 8.00 GB 7.00 GB 60 of 64" in text
    assert "all-gather fsdp (8) inside NVLink 4 once 2 1.60 GB 1.40 GB 0 of 2" in text


def test_the_page_says_where_the_time_goes_and_what_would_make_it_faster(weighing):
    text = Page(page_of(weighing())).text
    assert "compute 80.0 %, exposed communication 20.0 %" in text
    assert "What would make it faster" in text
    assert "no waiting for collectives over fsdp at most 11.0 s 20.0 % bound: all of them hidden" in text


def colours_in(page: str) -> dict[str, set[str]]:
    """By the words of each legend in a page, without their figures: the colours that stand beside them."""
    found: dict[str, set[str]] = {}
    for colour, words in re.findall(r'<li><b style="background:(#\w+)"></b>([^<]*)</li>', page):
        found.setdefault(words.partition(",")[0], set()).add(colour)
    return found


def test_a_category_has_one_colour_on_all_pages_and_a_picture_no_colour_twice(run: Path):
    whole = write_report(run).read_text("utf-8")
    answer = json.loads((run / "weighing.json").read_text())
    memory = answer["ledger"]["memory"]
    memory["by_category"] = dict(reversed(memory["by_category"].items())) | {"params": 2**30, "x": 2**30}
    (run / "weighing.json").write_text(json.dumps(answer))
    other = write_report(run).read_text("utf-8")
    for words, colours in colours_in(whole + other).items():
        assert len(colours) == 1, words
    assert {"saved activations", "matmul", "forward", "training", "params"} <= set(colours_in(other))
    for page in (whole, other):
        for picture in re.findall(r"<ul class=legend>.*?</ul>", page):
            used = re.findall(r"background:(#\w+)", picture)
            assert len(used) == len(set(used))
        for drawn in re.findall(r"<div class=bar.*?</div>", page):
            used = re.findall(r"background:(#\w+)", drawn)
            assert len(used) == len(set(used)) > 1


def test_the_time_of_a_step_and_its_timeline_come_first(run: Path):
    page = write_report(run).read_text("utf-8")
    places = [page.index(f">{title}<") for title in (
        "step, measured median", "Predicted time of one step", "Memory through the step", "Loss",
        "Predicted beside measured", "Memory of one device", "FLOPs of one step, all devices",
    )]  # fmt: skip
    assert places == sorted(places)


def test_the_time_of_a_step_the_run_and_its_cost_are_the_first_figures(weighing):
    text = Page(page_of(weighing(num_steps=3750, price=1.8))).text
    assert "55.0 s predicted step, between 44.0 s and 66.0 s" in text
    assert "2.39 days 15B tokens in 3,750 steps, between 1.91 days and 2.86 days" in text
    assert "825 cost in your currency (660 to 990): 458 device-hours (367 to 550) at 1.80" in text
    assert "The whole run: 15B tokens in 3,750 steps take 2.39 days" in text
    assert text.index("55.0 s") < text.index("Predicted time of one step")


def test_the_page_is_made_for_narrow_screens_too(run: Path):
    page = write_report(run).read_text("utf-8")
    assert "@media (max-width: 40rem)" in page
    assert page.count('<svg class="wide"') == page.count('<svg class="narrow"') > 0
    assert "overflow-wrap: anywhere" not in page.partition("pre {")[0]


def test_a_small_program_is_drawn_alone_and_the_device_said_to_be_far(run: Path):
    assert "usable, 480 GiB: far to the right" not in text_with(run, memory={"usable_bytes": 480 * GIB})
    assert "usable, 800 GiB: far to the right" in text_with(run, memory={"usable_bytes": 800 * GIB})


def test_the_bar_reaches_as_far_as_its_parts(weighing):
    page = page_of(weighing())
    drawn = page[page.index('aria-label="memory of one device by category"') :].partition("</div>")[0]
    assert re.findall(r"width:([\d.]+)%", drawn) == ["45.000", "10.000", "5.000", "0.938"]
    assert '<u style="left:100.000%"></u>' in drawn
    assert "free, 31.2 GiB, 39.1 %" in page


def test_file_names_stay_whole_paths_break_at_slashes_and_rows_can_be_cards(weighing):
    finding = Finding(kind="k", what="in layers/up", source_line="my-model.py:297", fix="3 / 4 of </b>")
    page = page_of(weighing(findings=(finding,)))
    assert (
        "<b>in layers/<wbr>up</b> (<span class=file>my-model.py:297</span>). Fix: 3 / 4 of &lt;/b&gt;" in page
    )
    assert '<td data-head="made by">' in page
    assert "<td>--" not in page


def test_notices_are_listed_and_of_many_the_last(run: Path):
    assert "What happened" not in page_in(run).text
    lines = [{"step": n, "kind": "spike", "message": f"the <loss> {n}."} for n in range(60)]
    (run / "notices.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = page_in(run).text
    assert "What happened The first 10 are left out; notices.jsonl has all." in text
    assert "spike the <loss> 59." in text
    assert "the <loss> 9." not in text


def test_seconds_by_phase_add_up(run: Path):
    text = page_in(run).text
    assert "Goodput 75.0 %: the share of 4.00 s spent in steps." in text
    assert "compile 1.00 s 25.0 %" in text


def test_each_held_out_metric_beside_the_loss_has_its_curve(run: Path):
    assert "accuracy by step" not in write_report(run).read_text("utf-8")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0, "held_out_accuracy": 0.1}\n{"step": 1, "accuracy": 0.2}\n')
    page = write_report(run).read_text("utf-8")
    assert 'aria-label="accuracy by step"' in page
    assert 'aria-label="loss by step"' in page


def test_changes_are_a_table_on_their_page():
    change = Change(
        arguments="--set remat=full", effect="", reserved_bytes=GIB, saved_bytes=GIB, fits=True,
        extra_executed_flops=0, step_seconds=None, extra_seconds=None, failed="",
    )  # fmt: skip
    assert "--set remat=full 1.00 GiB -1.00 GiB yes 0" in Page(page_of(Changes((change,)))).text


def test_an_empty_folder_is_read_and_each_missing_file_named(tmp_path: Path):
    run = read_run(tmp_path)
    assert (run.weighing, run.metrics, run.measurement, run.reconciliation) == (None, (), None, None)
    assert [note.split()[0] for note in run.notes] == [
        "config.json", "weighing.json", "metrics.jsonl", "measurement.json", "reconciliation.json",
    ]  # fmt: skip


def test_a_half_written_last_line_is_named_and_the_rest_kept(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5}\n{"step": 2, "loss": 4}\n{"step": 3, "lo')
    run = read_run(tmp_path)
    assert run.series("loss") == ([1, 2], [5.0, 4.0])
    assert "metrics.jsonl: no whole entry on line 3; the rest is shown." in run.notes


def test_many_broken_lines_are_not_all_listed(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("[]\n" * 9)
    assert "line 1, 2, 3, 4, 5, ...;" in read_run(tmp_path).notes[2]


def test_broken_files_are_named_with_the_reason(tmp_path: Path):
    (tmp_path / "weighing.json").write_text('{"schema": ')
    (tmp_path / "measurement.json").write_text("{}")
    (tmp_path / "config.json").mkdir()
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe")
    notes = {note.split()[0].rstrip(":"): note for note in read_run(tmp_path).notes}
    for name in ("weighing.json", "measurement.json", "config.json", "metrics.jsonl"):
        assert "cannot be read" in notes[name]


def test_steps_are_in_order_and_the_last_word_counts(tmp_path: Path):
    lines = [
        {"step": 2, "loss": 4},
        {"step": 1, "loss": 5},
        {"step": 1, "held_out_loss": 6},
        {"step": 2, "loss": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    run = read_run(tmp_path)
    assert run.series("loss") == ([1, 2], [5.0, 3.0])
    assert run.series("held_out_loss") == ([1], [6.0])


def a_sweep(tmp_path: Path, *losses, value="1e-3"):
    runs = []
    for number, loss in enumerate(losses, start=1):
        folder = tmp_path / f"{number:04d}-x"
        folder.mkdir()
        lines = [{"step": step, "loss": 5.0 - step} for step in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(
            SweepRun(
                values={"optimizer.learning_rate": f"{number}e-3" if number > 1 else value},
                folder=folder,
                steps=3,
                held_out_loss=loss,
                loss=loss,
                step_seconds=0.1,
                tokens_per_second=10.0,
                failed="" if loss else "the loss is <nan>",
                earlier=False,
            )
        )
    return Sweep(
        name="nano",
        fleet="1xCPU",
        folder=tmp_path,
        keys=("optimizer.learning_rate",),
        runs=tuple(runs),
        not_run=0,
        stopped=False,
    )


def test_the_page_of_a_sweep_has_table_pictures_and_what_failed(tmp_path):
    page = a_sweep(tmp_path, 2.5, 2.25, None).to_html()
    assert "Best: learning_rate=2e-3, held-out loss 2.2500" in page
    assert page.index("2.2500</td>") < page.index("2.5000</td>")
    assert page.count("<svg") == 2 * 2  # each for a wide and for a narrow page
    assert "the loss is &lt;nan&gt;" in page
    assert "http" not in page.replace("http-equiv", "")  # needs nothing from elsewhere


def test_values_of_a_sweep_are_escaped(tmp_path):
    page = a_sweep(tmp_path, 2.5, value="<script>").to_html()
    assert "<script>" not in page


def test_a_sweep_without_a_finished_run_has_no_picture(tmp_path):
    sweep = dataclasses.replace(a_sweep(tmp_path, None))
    page = sweep.to_html()
    assert "<svg" not in page
    assert "Not finished" in page


def test_a_long_word_takes_no_longer_than_its_letters(tmp_path):
    """Searching a file's name from each letter of this one took minutes."""
    assert "x" * 10**6 in a_sweep(tmp_path, 2.5, value="x" * 10**6).to_html()
