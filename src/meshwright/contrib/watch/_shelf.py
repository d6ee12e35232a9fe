"""Hold the runs that are watched: find them in folders, follow them, and answer what a page asks of them.

Imports: `_live_run`, `contrib.runs`. Used by: `_server`, `_watch_page`, `_screen`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.contrib.runs import Buckets, Have, RunRecord, all_named, found_runs
from meshwright.errors import InputError
from meshwright.files import MOST_JSON_BYTES, parsed_json

from ._live_run import Fields, Kept, LiveRun
from ._values import clean, number_at

RUN_FILES = ("config.json", "metrics.jsonl", "weighing.json")
MOST_RUNS = 1000
SEARCH_SECONDS = 3.0  # between two looks for new runs
WANTED_SECONDS = 30.0  # for which a run that is read to its end is followed after a page last drew it
FIRST_CHUNKS = 4  # of all runs that are read while a page waits: 4 MiB of metrics, 40 ms
BUCKETS_OF_ALL = 24_000  # that one answer holds at most; a picture of 100 runs has 240 of each
FEWEST_BUCKETS, MOST_DRAWN = 100, 600

Asked = Mapping[str, Mapping[str, Have]]
"""By run and kind of line, what a page has already."""


class Shelf:
    """The runs below some folders.

    Args:
        paths: folders of runs, folders that hold some, and folders of sweeps.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._runs: dict[str, LiveRun] = {}
        self._sweeps: dict[Path, Kept] = {}
        self._wanted: dict[str, float] = {}
        self._searched = float("-inf")
        self._lock = threading.Lock()  # a page asks while the reader's thread reads
        self.refresh()

    @property
    def runs(self) -> list[LiveRun]:
        """The runs, in the order in which they were found."""
        return list(self._runs.values())

    def run(self, name: str) -> LiveRun | None:
        """Return the run of an id."""
        return self._runs.get(name)

    def refresh(self) -> bool:
        """Look for new runs and for changes of each; return whether there are any."""
        changed = False
        if time.monotonic() - self._searched >= SEARCH_SECONDS:
            self._searched = time.monotonic()
            changed = self._search()
        with self._lock:
            changed |= any([run.refresh() for run in self.runs])
        return any([sweep.refresh() for sweep in self._sweeps.values()]) or changed

    def _search(self) -> bool:
        before = len(self._runs)
        for folder, name in _found(self._paths, self._sweeps):
            run = LiveRun(folder, name)
            if run.id not in self._runs and len(self._runs) < MOST_RUNS:
                self._runs[run.id] = run
        return len(self._runs) > before

    def read_on(self) -> bool:
        """Read what is new of the runs that a page draws, and a piece of one that is not read to its end yet.

        Returns:
            Whether there is more to read.
        """
        now, unread = time.monotonic(), list[LiveRun]()
        for name, last in list(self._wanted.items()):
            run = self._runs[name]
            if not run.metrics.is_whole:
                unread.append(run)
            elif now - last > WANTED_SECONDS:
                del self._wanted[name]
            else:
                with self._lock:
                    run.version += run.metrics.read()
        for run in unread[:1]:  # one after the other, so that the first is soon whole
            with self._lock:
                run.metrics.read()
                run.version += run.metrics.is_whole
        return bool(unread)

    def rows(self) -> list[Fields]:
        """Return a row for each run."""
        with self._lock:
            return [run.row() for run in self.runs]

    def curves(
        self,
        names: Iterable[str],
        *,
        low: int | None = None,
        high: int | None = None,
        have: Asked | None = None,
    ) -> Fields:
        """Return the curves of some runs, of all their steps or of those from `low` to `high`.

        Args:
            have: by run and kind of line, what the page has already (`Buckets.window`).
        """
        chosen = [run for name in names if (run := self._runs.get(name)) is not None]
        most = min(MOST_DRAWN, max(FEWEST_BUCKETS, BUCKETS_OF_ALL // max(1, len(chosen))))
        answer: Fields = {}
        unread = FIRST_CHUNKS
        for run in chosen:
            self._wanted[run.id] = time.monotonic()
            with self._lock:
                if not run.metrics.offset:
                    run.metrics.read(0)  # takes what the cache has of it
                while unread and not run.metrics.is_whole and run.metrics.read():
                    unread -= 1
                answer[run.id] = _curves(run, most, low, high, (have or {}).get(run.id, {}))
        return answer

    def read_whole(self) -> None:
        """Read the metrics of all runs to their ends."""
        for run in self.runs:
            run.metrics.read_whole()

    def sweeps(self) -> list[Fields]:
        """Return each sweep: its swept keys, and the values and the result of each run."""
        ids = {os.path.realpath(run.folder): run.id for run in self.runs}
        made = (_sweep(path, kept.value, ids) for path, kept in self._sweeps.items())
        return [sweep for sweep in made if sweep is not None]


def _curves(run: LiveRun, most: int, low: int | None, high: int | None, have: Mapping[str, Have]) -> Fields:
    metrics = run.metrics
    tracks: dict[str, Buckets] = dict(metrics.tracks)
    if not metrics.is_whole:
        tracks["train"] = metrics.preview()
    windows: Fields = {}
    for kind, track in tracks.items():
        if track.keys:
            made = track.window(most, low=low, high=high, have=have.get(kind)).to_dict()
            windows[kind] = {**made, "curves": {clean(key): rows for key, rows in made["curves"].items()}}
    return {"version": run.version, "read": metrics.share, "tracks": windows}


def _found(paths: Sequence[Path], sweeps: dict[Path, Kept]) -> Iterator[tuple[Path, str]]:
    """Yield the folders of runs with their names; note the sweeps among them."""
    for path in paths:
        if _is_run(path):
            yield path, path.name or path.resolve().name
            continue
        _note_sweep(path, sweeps)
        for child in _folders(path):
            if _is_run(child):
                yield child, child.name
                continue
            _note_sweep(child, sweeps)
            yield from ((each, f"{child.name}/{each.name}") for each in _folders(child) if _is_run(each))


def _note_sweep(path: Path, sweeps: dict[Path, Kept]) -> None:
    file = path / "sweep.json"
    if path not in sweeps and file.is_file():
        sweeps[path] = Kept(file, parsed_json, MOST_JSON_BYTES)


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


def _folders(path: Path) -> list[Path]:
    """Return the folders in a folder, the one that changed last first."""
    try:
        found = [entry for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith(".")]
        return [Path(entry.path) for entry in sorted(found, key=lambda entry: -entry.stat().st_mtime)]
    except OSError:
        return []


def _sweep(path: Path, fields: Any, ids: Mapping[str, str]) -> Fields | None:
    """Return what a parallel plot shows of a sweep; None if its file is none."""
    if not isinstance(fields, dict) or not isinstance(fields.get("runs"), list):
        return None
    runs: list[Fields] = []
    keys: dict[str, None] = {}
    for entry in fields["runs"][:MOST_RUNS]:
        if not isinstance(entry, dict) or not isinstance(values := entry.get("values"), dict):
            continue
        folder = path / Path(str(entry.get("folder", ""))).name
        texts = {clean(key): clean(value) for key, value in values.items()}
        keys |= dict.fromkeys(texts)
        loss = number_at(entry, "held_out_loss")
        runs.append({"id": ids.get(os.path.realpath(folder), ""), "values": texts, "held_out_loss": loss})
    return {"name": clean(path.name), "keys": list(keys), "runs": runs}


def folders_of(words: Sequence[str]) -> list[Path]:
    """Return the folders that the words name; without words, runs/ of the working directory.

    A word is a folder that holds runs, or the id, the name or a tag of known runs: all that have it.

    Raises:
        InputError: a word names no run, or one whose folder is not here.
    """
    known: Sequence[RunRecord] | None = None
    folders: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_dir() and any(True for _ in _found([path], {})):
            folders.append(path)
            continue
        known = found_runs().runs if known is None else known
        named = all_named(word, known)
        if not named:
            what = "holds no run" if path.is_dir() else "is no folder"
            hint = "`meshwright runs` lists them; name a run, or a folder of runs; or start the run first"
            raise InputError(f"{word} {what}, and no run has that id, name or tag", hint=hint)
        here = [run.folder for run in named if run.state != "gone"]
        if not here:
            raise InputError(
                f"{word} is not here: {named[0].words}", hint="name the folder that it is in now"
            )
        folders += here
    return folders or [Path("runs")]


def as_json(fields: object) -> str:
    """Return JSON that can stand in a page's script element: no text in it ends the element."""
    text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
