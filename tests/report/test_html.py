from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.reconcile import Reconciliation, Row
from meshwright.report import write_report, write_weighing

VOID = {"meta", "br"}
LINKING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "background"}


class Page(HTMLParser):
    """Checks that tags nest, and keeps the text, the links and the names of elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.links += [value for name, value in attrs if name in LINKING]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


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
    text = " ".join(page.words)
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
    text = " ".join(page_of(tmp_path).words)
    assert tmp_path.name in text
    assert "weighing.json is not there" in text


@pytest.mark.parametrize(
    "name", ["config.json", "weighing.json", "metrics.jsonl", "measurement.json", "reconciliation.json"]
)
def test_each_file_can_be_missing(run: Path, name: str):
    (run / name).unlink()
    assert f"{name} is not there" in " ".join(page_of(run).words)


def test_a_run_that_was_killed_is_shown_as_far_as_it_went(run: Path):
    for name in ("measurement.json", "reconciliation.json"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    text = " ".join(page_of(run).words)
    assert "no whole entry on line 7" in text
    assert "5.750 → 4.250" in text


def changed(run: Path, **changes) -> str:
    answer = json.loads((run / "weighing.json").read_text())
    memory = changes.pop("memory", {})
    answer["ledger"]["memory"] |= memory
    (run / "weighing.json").write_text(json.dumps({**answer, **changes}))
    return " ".join(page_of(run).words)


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


def test_a_weighing_alone_is_a_page_with_its_timeline_and_findings(run: Path, tmp_path: Path):
    weighing = json.loads((run / "weighing.json").read_text())
    weighing["ledger"]["findings"] = [
        {"kind": "k", "what": "a <large> argument", "source_line": "model.py:7", "mend": "split it"}
    ]
    path = tmp_path / "alone.html"
    write_weighing(path, weighing)
    page = Page(path.read_text("utf-8"))
    text = " ".join(page.words)
    for expected in ("Through the step", "Largest at the peak", "a <large> argument", "split it", "layers"):
        assert expected in text
    assert "Not whole" not in text


def test_a_page_that_cannot_be_written_is_said(run: Path, tmp_path: Path):
    weighing = json.loads((run / "weighing.json").read_text())
    with pytest.raises(InputError, match=r"cannot write .*no/page\.html: No such file or directory"):
        write_weighing(tmp_path / "no/page.html", weighing)


def test_the_sum_by_hand_stands_beside_what_is_compiled(run: Path, tmp_path: Path):
    weighing = json.loads((run / "weighing.json").read_text())
    row = {"quantity": "gradients", "whole_bytes": 2048, "device_bytes": 256.0, "compiled_bytes": 512}
    weighing["hand_sum"] = {"rule": "batch x width x layers", "rows": [{**row, "why": "twice <some>"}]}
    write_weighing(tmp_path / "alone.html", weighing)
    text = " ".join(Page((tmp_path / "alone.html").read_text("utf-8")).words)
    for expected in ("The sum by hand", "batch x width x layers", "2.00 KiB", "256 B", "twice <some>"):
        assert expected in text
