"""The pages in a real browser: complete offline, whole without scripts, sorted on a click, nothing cut off.

Each page is loaded in frames of two widths, under a policy that forbids everything the page does not hold
itself, and in a third frame where no script runs. A script around the frames notes what they show. (With
scripts switched off for the whole browser, a headless Chromium prints nothing and takes no picture.)
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from meshwright.contrib.pages import page_of

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(BROWSER is None, reason=f"no browser here: none of {', '.join(NAMES)}"),
]
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--v=0",
)  # fmt: skip
MOST_SECONDS = 60
WIDTHS = {"wide": 1280, "narrow": 400}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

# What the frames show, as one object. Places are in pixels of the frame.
PROBE = """
const box = (element) => {
  const { left, top, right, bottom } = element.getBoundingClientRect();
  return [left, top, right, bottom];
};
const shown = (element) => element.getClientRects().length > 0;
const texts = (row) => [...row.cells].map((cell) => cell.textContent);

function look(frame) {
  const page = frame.contentDocument, root = page.documentElement;
  const all = (words) => [...page.querySelectorAll(words)].filter(shown);
  const hints = (words) => all(words).map((element) => element.querySelector("title")?.textContent ?? "");
  return {
    width: frame.contentWindow.innerWidth,
    scrollWidth: root.scrollWidth,
    beyond: all("main *").filter((element) => !element.closest(".scroll, svg"))
      .filter((element) => box(element)[2] > root.clientWidth + 1)
      .map((element) => element.outerHTML.slice(0, 200)),
    requests: frame.contentWindow.performance.getEntriesByType("resource").map((entry) => entry.name),
    rows: [...page.querySelectorAll("table.sorts tbody tr")].map(texts),
    buttons: all("th[role=button]").length,
    dots: hints("circle"),
    columns: hints("svg.lane g"),
    pictures: all("svg").map((svg) => ({
      label: svg.getAttribute("aria-label"), box: box(svg),
      texts: [...svg.querySelectorAll("text")].map((text) => [text.textContent, ...box(text)]),
    })),
    ticks: all(".ticks").map((axis) => ({
      box: box(axis), texts: [...axis.children].map((tick) => [tick.textContent, ...box(tick)]),
    })),
  };
}

function sort(frame) {
  const page = frame.contentDocument, found = {};
  const rows = () => [...page.querySelectorAll("table.sorts tbody tr")].map(texts);
  const heads = [...page.querySelectorAll("table.sorts th")];
  const head = (name) => heads.find((cell) => cell.textContent === name);
  for (const name of ["memory", "layout"]) {
    head(name)?.click();
    found[name] = { rows: rows(), marked: head(name)?.getAttribute("aria-sort") };
  }
  const enter = new frame.contentWindow.KeyboardEvent("keydown", { key: "Enter", bubbles: true });
  head("memory")?.click();
  head("memory")?.dispatchEvent(enter);
  found.again = { rows: rows(), marked: head("memory")?.getAttribute("aria-sort") };
  return found;
}

function pointed(frame) {
  const page = frame.contentDocument;
  return [...page.querySelectorAll("svg.wide circle")].map((dot) => {
    const [left, top, right, bottom] = box(dot);
    return page.elementFromPoint((left + right) / 2, (top + bottom) / 2)?.tagName ?? "";
  });
}

addEventListener("load", () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) found[frame.id] = look(frame);
  const frame = document.getElementById("wide");
  found.pointed = pointed(frame);
  found.sorted = sort(frame);
  const kept = document.createElement("pre");
  kept.id = "found";
  kept.textContent = JSON.stringify(found);
  document.body.append(kept);
});
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[str, list[str]]]:
    """Run the browser on a file: what it prints, and the lines that the page wrote to its console."""
    profile = tmp_path_factory.mktemp("profile")

    def make(path: Path, *options: str) -> tuple[str, list[str]]:
        assert BROWSER is not None
        done = subprocess.run(
            [BROWSER, *QUIET, f"--user-data-dir={profile}", *options, path.as_uri()],
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]

    return make


@pytest.fixture(scope="module", params=["plan", "weighing"])
def page(request, plan, weighing, program_folder) -> tuple[str, str]:
    """The name and the text of a page."""
    result = plan if request.param == "plan" else weighing(folder=program_folder)
    return request.param, page_of(result)


@pytest.fixture(scope="module")
def found(page, run, tmp_path_factory) -> dict[str, Any]:
    """What the browser shows of the page: wide, narrow, without scripts, pointed at and sorted."""
    _, text = page
    guarded = text.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{POLICY}">')
    frames = [
        f'<iframe id="{name}" width="{width}" height="6000" srcdoc="{escape(guarded)}"></iframe>'
        for name, width in WIDTHS.items()
    ]
    no_script = f'sandbox="allow-same-origin" srcdoc="{escape(text)}"'
    frames.append(f'<iframe id="still" width="{WIDTHS["wide"]}" height="6000" {no_script}></iframe>')
    path = tmp_path_factory.mktemp("pages") / "frames.html"
    around = '<!doctype html><meta charset="utf-8"><style>iframe { border: 0 }</style>'
    path.write_text(f"{around}<script>{PROBE}</script>{''.join(frames)}", "utf-8")
    printed, said = run(path, "--window-size=1400,6000", "--virtual-time-budget=10000", "--dump-dom")
    kept = re.search(r'<pre id="found">(.*?)</pre>', printed, re.S)
    assert kept, f"the script around the frames did not end: {said}"
    return {**json.loads(unescape(kept[1])), "said": said}


@pytest.fixture(params=list(WIDTHS))
def frame(request, found) -> dict[str, Any]:
    """What one of the frames with scripts shows."""
    assert found[request.param]["width"] == WIDTHS[request.param]
    return found[request.param]


def overlapping(texts):
    """Pairs of words that lie on each other by more than a pixel."""
    for place, (one, left, top, right, bottom) in enumerate(texts):
        for other, *its in texts[place + 1 :]:
            if min(right, its[2]) - max(left, its[0]) > 1 and min(bottom, its[3]) - max(top, its[1]) > 1:
                yield one, other


def test_it_asks_for_nothing_and_complains_of_nothing(found, frame):
    assert frame["requests"] == []
    blocked_script = "frame is sandboxed and the 'allow-scripts' permission is not set"
    assert [line for line in found["said"] if blocked_script not in line] == []


def test_nothing_reaches_beyond_the_window(frame):
    assert frame["scrollWidth"] <= frame["width"]
    assert frame["beyond"] == []


def test_the_words_of_pictures_are_whole_and_do_not_touch(frame):
    for picture in (*frame["pictures"], *frame["ticks"]):
        left, top, right, bottom = picture["box"]
        for words, *its in picture["texts"]:
            inside = its[0] >= left - 1 and its[2] <= right + 1 and its[1] >= top - 1 and its[3] <= bottom + 1
            assert inside, (words, its, picture["box"])
        assert list(overlapping(picture["texts"])) == []


def test_the_lanes_of_a_step_say_what_is_done_when(frame):
    first, *others = frame["columns"]
    assert re.match(r"0 to [\d.]+ ms: matmul \d+ %", first), first
    assert any("waiting for all-gather" in words for words in others)
    assert any("waiting for all-reduce" in words for words in others)


def test_a_table_is_sorted_by_what_is_clicked_and_by_the_keyboard(page, found, plan):
    if page[0] != "plan":
        assert found["wide"]["buttons"] == 0
        return
    assert found["wide"]["buttons"] == 8
    sizes = {f"{c.needed_bytes / 2**30:.1f} GiB": c.needed_bytes for c in plan.candidates if not c.failed}
    rows = {name: [row[5] for row in each["rows"]] for name, each in found["sorted"].items()}
    by_size = sorted(sizes, key=lambda words: sizes[words])
    assert [words for words in rows["memory"] if words != "-"] == by_size
    assert [words for words in rows["again"] if words != "-"] == by_size[::-1]
    layouts = [row[0] for row in found["sorted"]["layout"]["rows"]]
    assert layouts == sorted(layouts)
    marked = {name: each["marked"] for name, each in found["sorted"].items()}
    assert marked == {"memory": "ascending", "layout": "ascending", "again": "descending"}


def test_each_dot_says_what_it_is_when_pointed_at(page, found, frame, plan):
    compiled = [c for c in plan.ranked if not c.failed] if page[0] == "plan" else []
    assert len(frame["dots"]) == len(compiled)
    for candidate in compiled:
        assert any(words.startswith(f"{candidate.layout}, {candidate.settings}: ") for words in frame["dots"])
    assert found["pointed"] == ["circle"] * len(compiled)


def test_without_scripts_the_page_shows_the_same_in_the_ranked_order(page, found, plan):
    still = found["still"]
    assert still["buttons"] == 0
    changed = {"buttons", "requests"}
    assert {k: v for k, v in still.items() if k not in changed} == {
        k: v for k, v in found["wide"].items() if k not in changed
    }
    if page[0] == "plan":
        assert [row[0] for row in still["rows"]] == [candidate.layout for candidate in plan.ranked]


def test_it_opens_as_a_file(page, run, tmp_path):
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(page[1], "utf-8")
    _, said = run(path, "--window-size=1280,3000", f"--screenshot={picture}")
    assert said == []
    assert len(picture.read_bytes()) > 50_000  # of an empty page it has a tenth
