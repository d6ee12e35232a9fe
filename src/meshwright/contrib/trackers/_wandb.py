"""Report a run to Weights & Biases. Its own variables say where: WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.errors import InputError
from meshwright.extras import check_installed

if TYPE_CHECKING:
    from ._reporting import TrackedRun

STEP = "train/global_step"


class WandbTracker:
    """One run of Weights & Biases; a resumed run continues it by its number."""

    _run: Any

    def begin(self, run: TrackedRun) -> None:
        """Begin or continue a run, with its weighing as an artifact.

        Raises:
            InputError: it is not installed, or nobody is logged in.
        """
        check_installed("wandb", ["wandb"], "reporting to wandb")
        wandb: Any = import_module("wandb")
        settings = wandb.Settings(console="off", silent=True)
        is_online = os.environ.get("WANDB_MODE", "online") == "online"
        if is_online and not wandb.api.api_key:  # it would ask for one on the terminal
            raise InputError("nobody is logged in to wandb", hint="`wandb login`, or WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "meshwright"),
            id=run.number,
            name=run.name,
            config=dict(run.config),
            tags=[tag[:64] for tag in run.tags],
            resume="allow",
            settings=settings,
        )
        # Steps that a resumed run repeats are smaller than the last one, which wandb's own step refuses.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        artifact = wandb.Artifact(f"weighing-{run.number}", type="weighing")
        for path in run.files:
            if path.exists():
                artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep figures of a step."""
        self._run.log({**values, STEP: step})

    def end(self, state: str) -> None:
        """End the session."""
        self._run.finish(exit_code=int(state == "failed"))
