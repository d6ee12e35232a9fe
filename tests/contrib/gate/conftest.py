from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.config import Layout, RunConfig
from meshwright.contrib.gate import Gate, Reading, gate
from meshwright.hardware import Fleet
from meshwright.results import Weighing


@cache
def real() -> Weighing:
    return mw.weigh("linear", on="8xH100")


@dataclass
class Asked:
    """Takes the place of `weigh`: remembers what it is asked to weigh, and answers with real figures.

    `fitting`: whether the first, second, ... thing fits; the last stands for all that follow.
    """

    step_seconds: float = 1.0
    fitting: tuple[bool, ...] = (True,)
    config: RunConfig | None = None
    fleet: Fleet | None = None
    layout: str | None = None
    times: int = 0

    def __call__(self, config: RunConfig, *, on: Fleet, layout: str | None = None) -> Weighing:
        self.config, self.fleet, self.layout = config, on, layout
        fits = self.fitting[min(self.times, len(self.fitting) - 1)]
        self.times += 1
        made = real()
        assert made.figures is not None
        assert made.prediction is not None
        memory = replace(made.figures.memory, usable_bytes=2**40 if fits else 2**20)
        step = replace(made.prediction.step_seconds, expected=self.step_seconds, low=None, high=None)
        return replace(
            made,
            name=config.name,
            config=config,
            fleet=on,
            layout=Layout.parse(layout or config.layout).resolve(on.num_devices),
            figures=replace(made.figures, memory=memory),
            prediction=replace(made.prediction, step_seconds=step),
            tokens_per_step=config.batch.tokens_per_step,
            num_steps=config.steps,
        )


@dataclass
class Gated:
    """Gates files of a folder, by their names and texts."""

    folder: Path

    def write(self, files: dict[str, str]) -> Path:
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        return self.folder / next(iter(files))

    def __call__(
        self, files: dict[str, str], asked: Asked | None = None, **options: Any
    ) -> tuple[Gate, Asked]:
        """Gate the first file; options that `Reading` has are those of it."""
        asked = asked or Asked()
        said = {key: options.pop(key) for key in ("model", "ignore", "program", "options") if key in options}
        path = self.write(files)
        return gate(path, weigher=asked, reading=Reading(**said), **options), asked


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Gate, Asked]]:
    monkeypatch.chdir(tmp_path)
    return Gated(tmp_path)
