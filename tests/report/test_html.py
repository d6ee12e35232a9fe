from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.reconciliation import Reconciliation, Row
from meshwright.report import write_report
from meshwright.report._html import weighing_page

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
    made = weighing()
    answer = {
        "schema": 1,
        "config": "mine<b>",
        "run_config": None,
        "layout": "fsdp=8",
        "sequence_length": 8192,
        "tokens_per_step": 4 * 10**6,
        "num_parameters": 8 * 10**9,
        "fleet": {"name": "8xH100", "chip": "H100", "num_devices": 8},
        "source": "target compiler",
        "fits": True,
        "ledger": made.ledger.to_dict(),
        "prediction": dataclasses.asdict(made.prediction),
        "no_prediction": "",
        "compile": {
            "seconds": 10.3,
            "cached": False,
            "compiler": "XLA",
            "options": {},
            "fingerprint": "0123abcd",
        },
    }
    row = Row(quantity="step seconds", unit="seconds", predicted=0.012, measured=0.016, how="the <clock>")
    compared = Reconciliation(same_program=True, rows=(row,), not_compared={"MFU": "no peak"})
    metrics = [{"step": n, "loss": loss} for n, loss in measurement().losses.items()]
    metrics += [{"step": n, "held_out_loss": loss} for n, loss in measurement().held_out_losses.items()]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "weighing.json").write_text(json.dumps(answer))
    sample = "<script>alert(1)</script>\n"
    (tmp_path / "measurement.json").write_text(measurement(sample=sample).to_json())
    (tmp_path / "reconciliation.json").write_text(compared.to_json())
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return tmp_path


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text("utf-8"))


def test_the_page_is_well_formed_and_shows_what_the_files_say(run: Path):
    page = page_of(run)
    text = page.text
    for expected in (
        "mine<b>", "Fits, 31.2 GiB (39.1 %) to spare", "5.750 → 4.250", "4.375", "16.0 ms", "32K",
        "12.0 ms", "-25.0 %", "the <clock>", "no peak", "36.0 GiB", "210 PFLOP", "7.00 GB", "55.0 s",
        "jax", "0123abcd",
    ):  # fmt: skip
        assert expected in text


def test_the_page_shows_which_category_is_in_which_number_format(run: Path):
    page = write_report(run).read_text("utf-8")
    assert "<tr><th>category</th><th class=number>unused</th><th class=number>bf16</th>" in page
    assert "<tr><td>parameters</td><td class=number>3.00 GiB</td><td class=number></td>" in page
    weighing = json.loads((run / "weighing.json").read_text())
    del weighing["ledger"]["memory"]["by_format"]  # as an earlier version wrote it
    (run / "weighing.json").write_text(json.dumps(weighing))
    assert "Number formats" not in write_report(run).read_text("utf-8")


def test_the_page_needs_nothing_from_elsewhere(run: Path):
    page = page_of(run)
    assert all(link.startswith("#") for link in page.links)
    assert not page.names & {"script", "link", "img", "iframe", "object", "base"}
    style = (run / "report.html").read_text("utf-8").partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_what_the_model_wrote_is_text_not_markup(run: Path):
    page = page_of(run)
    assert "<script>alert(1)</script>\n" in page.words


def test_the_same_folder_gives_the_same_bytes(run: Path):
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_an_empty_folder_gives_a_page_that_says_what_is_missing(tmp_path: Path):
    text = page_of(tmp_path).text
    assert tmp_path.name in text
    assert "weighing.json is not there" in text


@pytest.mark.parametrize(
    "name", ["config.json", "weighing.json", "metrics.jsonl", "measurement.json", "reconciliation.json"]
)
def test_each_file_can_be_missing(run: Path, name: str):
    (run / name).unlink()
    assert f"{name} is not there" in page_of(run).text


def test_a_run_that_was_killed_is_shown_as_far_as_it_went(run: Path):
    for name in ("measurement.json", "reconciliation.json"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    text = page_of(run).text
    assert "no whole entry on line 7" in text
    assert "5.750 → 4.250" in text


def changed(run: Path, **changes) -> str:
    answer = json.loads((run / "weighing.json").read_text())
    memory = changes.pop("memory", {})
    answer["ledger"]["memory"] |= memory
    (run / "weighing.json").write_text(json.dumps({**answer, **changes}))
    return page_of(run).text


def test_a_program_that_does_not_fit_says_by_how_much(run: Path):
    assert "Does not fit, 8.75 GiB (21.9 %) too much" in changed(
        run, fits=False, memory={"usable_bytes": 40 * 2**30}
    )


def test_without_usable_memory_there_is_no_verdict_and_the_reason(run: Path):
    fleet = {"name": "1xCPU", "chip": "CPU", "num_devices": 1}
    assert "a simulated CPU device has no memory of its own" in changed(
        run, fits=None, memory={"usable_bytes": None}, fleet=fleet
    )


def test_an_unknown_chip_memory_is_no_verdict_either(run: Path):
    assert "the catalog does not know" in changed(run, fits=None, memory={"usable_bytes": None})


def test_a_simulated_program_is_marked(run: Path):
    assert "simulated on CPU" in changed(run, source="simulated on CPU")


def test_no_prediction_is_said_with_its_reason(run: Path):
    assert "None: nothing is known" in changed(run, prediction=None, no_prediction="nothing is known")


def test_a_weighing_alone_is_a_page_with_its_timeline_and_findings(run: Path):
    weighing = json.loads((run / "weighing.json").read_text())
    weighing["ledger"]["findings"] = [
        {"kind": "k", "what": "a <large> argument", "source_line": "model.py:7", "mend": "split it"}
    ]
    page = Page(weighing_page(weighing))
    text = page.text
    for expected in (
        "Memory through the step",
        "Largest at the peak",
        "a <large> argument",
        "split it",
        "layers",
    ):
        assert expected in text
    assert "Not whole" not in text


def test_the_sum_by_hand_stands_beside_what_is_compiled(run: Path):
    weighing = json.loads((run / "weighing.json").read_text())
    row = {"quantity": "gradients", "whole_bytes": 2048, "device_bytes": 256.0, "compiled_bytes": 512}
    weighing["hand_sum"] = {"rule": "batch x width x layers", "rows": [{**row, "why": "twice <some>"}]}
    text = Page(weighing_page(weighing)).text
    for expected in ("The sum by hand", "batch x width x layers", "2.00 KiB", "256 B", "twice <some>"):
        assert expected in text


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
        "Predicted beside measured", "Memory of one device, predicted", "FLOPs of one step, all devices",
    )]  # fmt: skip
    assert places == sorted(places)


def test_the_time_of_a_step_the_run_and_its_cost_are_the_first_figures(run: Path, total):
    weighing = json.loads((run / "weighing.json").read_text())
    weighing["run_total"] = dataclasses.asdict(total(price=1.8))
    page = Page(weighing_page(weighing))
    assert "55.0 s predicted step, between 44.0 s and 66.0 s" in page.text
    assert "2.39 days 15B tokens in 3,750 steps, between 45.8 h and 2.86 days" in page.text
    assert "825 cost (660 to 990): 458 device-hours (367 to 550) at 1.80" in page.text
    assert "The whole run: 15B tokens in 3,750 steps take 2.39 days" in page.text
    assert page.text.index("55.0 s") < page.text.index("Predicted time of one step")


def test_the_page_is_made_for_narrow_screens_too(run: Path):
    page = write_report(run).read_text("utf-8")
    assert "@media (max-width: 40rem)" in page
    assert page.count('<svg class="wide"') == page.count('<svg class="narrow"') > 0
    assert "overflow-wrap: anywhere" not in page.partition("pre {")[0]


def test_a_small_program_is_drawn_alone_and_the_device_said_to_be_far(run: Path):
    assert "usable, 480 GiB: far to the right" not in changed(run, memory={"usable_bytes": 480 * 2**30})
    assert "usable, 800 GiB: far to the right" in changed(run, memory={"usable_bytes": 800 * 2**30})
