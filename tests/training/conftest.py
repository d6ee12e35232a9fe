"""Runs of the smallest Transformer that several tests look at: made once, they compile for seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Layout, RunConfig, load_config
from meshwright.hardware import Fleet
from meshwright.measure import Measurement
from meshwright.trainer.data import open_data
from meshwright.trainer.loop import Event, RunFolder, RunRequest, devices_of, run_training
from meshwright.trainer.loop import _training_run as _run

NANO = load_config("bytes-nano", ["evaluation.every_steps=3", "evaluation.batches=2"])
STEPS = 7


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that is over."""

    config: RunConfig
    folder: Path
    measurement: Measurement
    state: Any
    events: list[Event]


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """The second run of one config on one mesh takes the first one's programs; both have one fingerprint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "compile_programs", functools.cache(_run.compile_programs))
        yield


def _request(
    config: RunConfig,
    folder: Path,
    *,
    steps: int | None = None,
    resume: bool = False,
    fleet: str = "1xCPU",
    layout: str = "data=-1",
    **more: Any,
) -> RunRequest:
    """A request as `mw.train` makes it, but that its folder is not locked."""
    on = Fleet.parse(fleet)
    mesh, held = Layout.parse(layout).resolve(on.num_devices), RunFolder(folder, resume=resume)
    folder.mkdir(exist_ok=True)
    known = {"config": config, "fleet": on, "layout": mesh, "devices": devices_of(on, mesh), "folder": held}
    more = {"dataset": open_data(config), **more}
    return RunRequest(**known, steps=steps or config.steps, **more)


def _train(config: RunConfig, folder: Path, **fields: Any) -> tuple[Measurement, Any]:
    """The measurement and the final state of a run, whose folder is then free for another."""
    request = _request(config, folder, **fields)
    with closing(request.folder) as held:
        held.validate_resume(config)
        held.create()
        return run_training(request)


def trained(folder: Path, fleet: str, layout: str) -> Trained:
    events: list[Event] = []
    measurement, state = _train(NANO, folder, steps=STEPS, fleet=fleet, layout=layout, on_event=events.append)
    return Trained(config=NANO, folder=folder, measurement=measurement, state=state, events=events)


@pytest.fixture(scope="session")
def request_for() -> Callable[..., RunRequest]:
    return _request


@pytest.fixture(scope="session")
def train() -> Callable[..., tuple[Measurement, Any]]:
    return _train


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("one"), "1xCPU", "data=-1")


@pytest.fixture(scope="session")
def one_device_again(tmp_path_factory: pytest.TempPathFactory, one_device: Trained) -> Trained:
    return trained(tmp_path_factory.mktemp("again"), "1xCPU", "data=-1")


@pytest.fixture(scope="session")
def eight_devices(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("eight"), "8xCPU", "data=2,fsdp=2,tensor=2")
