"""The page in a real Chromium: a session with runs that live, and texts that attack it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.contrib.watch import Shelf, static_page
from tests.contrib.watch.conftest import serving
from tests.contrib.watch.made_runs import CONFIG, RUN, line, make_run

pytestmark = pytest.mark.once
PICTURES = os.environ.get("MESHWRIGHT_PICTURES")  # a folder to keep pictures of the pages in, to look at


def keep_picture(page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


def wait_until(page, condition: str) -> None:
    """Wait until JavaScript is true. The page's policy forbids what Playwright's own function does."""
    for _ in range(1200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"it is still not so that {condition}")


def is_drawn(page) -> None:
    page.wait_for_selector("body[data-drawn]", state="attached")


def test_a_session_a_run_moves_is_compared_with_another_and_is_stopped(page, tmp_path):
    mw.train("linear", on="1xCPU", steps=30, folder=tmp_path / "runs/earlier")
    command = [sys.executable, "-m", "meshwright", "train", "linear", "--on", "1xCPU", "--steps", "1000000"]
    command += ["--folder", "runs/now"]
    with serving(folder=tmp_path) as address:
        page.goto(address)
        page.wait_for_selector("#list li:has-text('earlier') .finished")
        is_drawn(page)
        wait_until(page, "document.title === 'earlier'")
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run:
            try:
                page.wait_for_selector("#list li:has-text('now') .running", timeout=120_000)
                page.click("#list li:has-text('now')")
                page.check("#list li:has-text('now') input")
                wait_until(page, "document.title.match(/^[0-9]+ of 1000000, now$/) !== null")
                before = page.title()
                wait_until(page, f"document.title !== {before!r}")
                page.wait_for_selector("figure:has-text('Loss')")
                assert "2 drawn" in page.text_content("#status")
                label = page.get_attribute("figure:has-text('Loss') canvas[role=img]", "aria-label")
                assert label.startswith("Loss of 2 runs: ")
                assert "predicted" in page.text_content(".cards")
                page.wait_for_selector("#details h2:has-text('Where the time goes, so far')")
                page.wait_for_selector("#details td:has-text('the gap')")
                assert "compiling linear for 1 x cpu" in page.text_content("#log")
                keep_picture(page, "session-running")
            finally:
                run.send_signal(signal.SIGINT)
            assert run.wait(60) == 130
        page.wait_for_selector("#list li:has-text('now') .stopped", timeout=30_000)
        wait_until(page, "document.querySelector('#facts').textContent.includes('stopped (')")
        page.wait_for_selector("#details h2:has-text('Where the time went')")
        keep_picture(page, "session-stopped")
    assert page.wrong == []


def test_keys_do_what_the_help_says(page, tmp_path):
    for number in (1, 2):
        lines = [line(step, loss=number + 100 / step) for step in range(1, 201)]
        make_run(tmp_path / f"runs/run{number}", lines)
    page.set_viewport_size({"width": 420, "height": 800})
    page.emulate_media(color_scheme="dark")
    (tmp_path / "page.html").write_text(static_page(Shelf([tmp_path / "runs"])))
    page.goto((tmp_path / "page.html").as_uri())
    is_drawn(page)
    keep_picture(page, "static-420")
    assert page.evaluate("document.documentElement.scrollWidth") == 420, "nothing is wider than a phone"
    assert page.evaluate("document.documentElement.className") == "dark"
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.className") == ""
    page.keyboard.press("?")
    assert page.is_visible("dialog")
    page.keyboard.press("Escape")
    assert not page.is_visible("dialog")

    def here() -> str:
        return page.text_content("#list .here b")

    first = here()
    page.keyboard.press("j")
    assert here() != first
    page.keyboard.press("k")
    assert here() == first
    page.keyboard.press("x")
    assert not page.is_checked("#list .here input")
    page.keyboard.press("a")
    assert page.is_checked("#list .here input")
    page.keyboard.press("l")
    assert page.get_attribute("#key-l", "aria-pressed") == "true"
    page.keyboard.press("/")
    page.keyboard.type("run2")
    assert page.text_content("#list b") == "run2"
    assert page.locator("#list li").count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press("o")
    wait_until(page, "!document.querySelector('#status').textContent.includes('drawn')")
    assert page.wrong == []


HACK = "window.hacked=(window.hacked||0)+1"
TEXTS = [
    f"<script>{HACK}</script>",
    f"</script><script>{HACK}</script>",
    f"<img src=x onerror={HACK}>",
    f"<svg onload={HACK}>",
    f"<svg><script>{HACK}</script></svg>",
    f"<iframe srcdoc='<script>parent.{HACK}</script>'>",
    f"<body onload={HACK}>",
    f"<a href='javascript:{HACK}' autofocus onfocus={HACK}>go</a>",
    "<style>@import 'http://evil.example/x';*{background:url(http://evil.example/y)}</style>",
    "<link rel=stylesheet href=http://evil.example/z>",
    f"<meta http-equiv=refresh content='0;url=javascript:{HACK}'>",
    "<base href=http://evil.example/><form action=http://evil.example><button>x",
    f"<object data='data:text/html,<script>{HACK}</script>'>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={HACK}>",
    f"<!--><script>{HACK}</script>",
    f"]]><script>{HACK}</script>",
    f'"onmouseover={HACK} x="',
    f"'onclick={HACK} x='",
    f"`;{HACK};`",
    f"${{{HACK}}}",
    f"{{{{constructor.constructor('{HACK}')()}}}}",
    f"javascript:{HACK}",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;",
    "\\u003cscript\\u003ealert(1)\\u003c/script\\u003e",
    f"<details open ontoggle={HACK}>",
    f"<video><source onerror={HACK}></video>",
    f"<input autofocus onfocus={HACK}>",
    f"<marquee onstart={HACK}>",
    f"<template><script>{HACK}</script></template>",
    f"<noscript><p title='</noscript><img src=x onerror={HACK}>'>",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[H\x9b31m",
    "\r\roverwritten",
    "\u202egnp.exe",
    "\u2066\u2067hidden\u2069",
    "\u200f\u200erun\u061c",
    "a\u2028b\u2029c",
    "zero\x01one\x02",
    "\ufeffbom\u200b",
    "__proto__",
    "constructor",
    "toString",
    'data: {"runs": []}\n\n',
    "\n\nevent: evil\ndata: x\n\n",
    "%3Cscript%3E",
    "..\\..\\etc",
    "A" * 3000,
    "<!-- foot --><!-- head -->",
    f"<x contenteditable onblur={HACK} tabindex=1 id=list>lose",
]


def hostile_runs(folder: Path) -> None:
    """Write a run for each text, which stands wherever a run has one."""
    for number, text in enumerate(TEXTS):
        name = (
            "".join(letter for letter in text if letter not in "/\0").encode()[:120].decode("utf-8", "ignore")
        )
        notice = {"step": 1, "kind": text, "message": text, "hint": text}
        path = make_run(
            folder / f"{number:02d}{name}",
            [line(1), line(2), json.dumps({"step": 3, "loss": 1.0, text: 2.0}), text],
            notices_jsonl=f"{json.dumps(notice)}\n{text}\n",
            log_txt=f"10:00:00 {text}\n{text}\n",
            config_json=json.dumps({**CONFIG, "name": text, text: {text: text}}),
            run_json=json.dumps({**RUN, **dict.fromkeys(("name", "fleet", "layout", "batch_unit"), text)}),
        )
        (path / "reconciliation.json").write_text(text)
        (path / "measurement.json").write_text(json.dumps({"schema": text, text: text}))
        (path / "tags.json").write_text(json.dumps({"tags": [text]}))
    sweep = [{"values": {text: text}, "folder": text, "held_out_loss": 1.0} for text in TEXTS]
    (folder / "sweep.json").write_text(json.dumps({"runs": sweep, "keys": TEXTS}))


SAFE = """() => {
    const all = [...document.querySelectorAll("*")];
    const handles = (each) => each.getAttributeNames().some((name) => name.startsWith("on"));
    return {
        hacked: window.hacked,
        elements: [...new Set(all.map((each) => each.localName))],
        handlers: all.filter(handles).length,
        text: document.body.innerText,
    };
}"""
ALLOWED = """b bdi body button canvas dialog details div figcaption figure form h1 h2 head header html input
kbd li line link main meta nav p path pre script section small span style summary svg table tbody td text th
thead title tr ul"""
ODD = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"


def check_safe(page) -> None:
    for _ in TEXTS:
        page.keyboard.press("j")
    page.keyboard.press("a")
    page.wait_for_timeout(700)
    found = page.evaluate(SAFE)
    assert found["hacked"] is None
    assert found["handlers"] == 0
    assert re.findall(ODD, found["text"]) == []
    assert set(found["elements"]) <= set(ALLOWED.split())
    assert page.wrong == []


def test_fifty_hostile_texts_are_shown_and_run_nothing(page, tmp_path):
    assert len(TEXTS) >= 50
    hostile_runs(tmp_path / "runs")
    with serving(folder=tmp_path) as address:
        page.goto(address)
        is_drawn(page)
        assert page.locator("#list li").count() == len(TEXTS)
        check_safe(page)
        assert page.evaluate("document.scripts.length") == 1
        keep_picture(page, "hostile")
    assert {url.split("/")[2] for url in page.asked if not url.startswith("data:")} == {address.split("/")[2]}


def test_the_page_as_a_file_runs_nothing_hostile_and_asks_for_nothing(page, tmp_path):
    hostile_runs(tmp_path / "runs")
    (tmp_path / "page.html").write_text(static_page(Shelf([tmp_path / "runs"])), "utf-8")
    page.goto((tmp_path / "page.html").as_uri())
    is_drawn(page)
    assert page.locator("#list li").count() == len(TEXTS)
    check_safe(page)
    assert page.evaluate("document.scripts.length") == 2
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
