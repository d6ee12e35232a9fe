"""Trackers for tests, registered as an installed package registers its own: by entry points."""

from __future__ import annotations

import importlib
import sys

import pytest

SOURCE = '''
import sys, threading

RELEASED = threading.Event()
SESSIONS = []


class Good:
    """Keeps everything."""
    def begin(self, run):
        self.run, self.lines, self.state = run, [], None
        self.found = [path.name for path in run.files if path.exists()]
        SESSIONS.append(self)

    def log(self, step, values):
        self.lines.append((step, dict(values)))

    def end(self, state):
        self.state = state


class NoNetwork(Good):
    def begin(self, run):
        raise ConnectionError("the network is down")


class Exits(Good):
    def begin(self, run):
        sys.exit("not today")


class Raises(Good):
    def log(self, step, values):
        raise OSError(28, "No space left on device")


class Hangs(Good):
    def log(self, step, values):
        RELEASED.wait()
'''
ENTRIES = """[meshwright.trackers]
exits = fake_trackers:Exits
good = fake_trackers:Good
hangs = fake_trackers:Hangs
lost = no_such_module:Tracker
no-network = fake_trackers:NoNetwork
raises = fake_trackers:Raises
"""


@pytest.fixture
def trackers(tmp_path, monkeypatch):
    """The module of the trackers; what hangs is let go at the end."""
    package = tmp_path / "packages"
    info = package / "fake_trackers-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-trackers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    (package / "fake_trackers.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(package)
    monkeypatch.setattr("meshwright.contrib.trackers._reporting.END_SECONDS", 1.0)
    importlib.invalidate_caches()
    made = importlib.import_module("fake_trackers")
    yield made
    made.RELEASED.set()
    sys.modules.pop("fake_trackers", None)
