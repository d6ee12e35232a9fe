"""A Chromium for the tests of the page, and the command that serves it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Return a browser of this machine; in the gate there is one, for .ci/run installs it."""
    from playwright.sync_api import sync_playwright

    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None and not os.environ.get("CI"):
        pytest.skip(f"none of {', '.join(NAMES)} is installed; Debian's package is chromium")
    assert path is not None, "the gate has no Chromium: .ci/run installs it"
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield made
        made.close()


@pytest.fixture
def page(browser) -> Iterator[Any]:
    """Return a page that notes what goes wrong in it, in `page.wrong`, and where it asks, in `page.asked`."""
    opened = browser.new_page(viewport={"width": 1280, "height": 900})
    opened.wrong, opened.asked = [], []
    opened.on("console", lambda message: opened.wrong.append(f"console: {message.type}: {message.text}"))
    opened.on("pageerror", lambda error: opened.wrong.append(f"error: {error}"))
    opened.on("dialog", lambda dialog: opened.wrong.append(f"dialog: {dialog.message}"))
    opened.on("request", lambda request: opened.asked.append(request.url))
    yield opened
    opened.close()


@contextlib.contextmanager
def serving(*words: str, folder: Path) -> Iterator[str]:
    """Run `meshwright watch` in a folder, and yield the address of its page."""
    command = [sys.executable, "-m", "meshwright", "watch", *words, "--no-browser", "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " at http://127.0.0.1:" in line, process.communicate()
            yield line.split(" at ")[1].strip()
        finally:
            process.send_signal(2)
            process.communicate(timeout=60)
    assert process.returncode == 130, "as any command that Ctrl-C ends"
