"""Runs of the smallest Transformer that several tests look at: made once, they compile for seconds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Layout, RunConfig, load_config
from meshwright.hardware import Fleet
from meshwright.reconciliation import Measurement
from meshwright.training import Event, _run
from meshwright.training._run import Asked, train

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


def trained(folder: Path, fleet: str, layout: str) -> Trained:
    events: list[Event] = []
    on = Fleet.parse(fleet)
    mesh = Layout.parse(layout).resolve(on.num_devices)
    asked = Asked(config=NANO, fleet=on, layout=mesh, folder=folder, steps=STEPS, tell=events.append)
    measurement, state = train(asked)
    return Trained(config=NANO, folder=folder, measurement=measurement, state=state, events=events)


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("one"), "1xCPU", "data=-1")


@pytest.fixture(scope="session")
def one_device_again(tmp_path_factory: pytest.TempPathFactory, one_device: Trained) -> Trained:
    return trained(tmp_path_factory.mktemp("again"), "1xCPU", "data=-1")


@pytest.fixture(scope="session")
def eight_devices(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("eight"), "8xCPU", "data=2,fsdp=2,tensor=2")
