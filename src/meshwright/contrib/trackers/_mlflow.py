"""Report a run to MLflow. Its own variables decide where: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.extras import check_installed

if TYPE_CHECKING:
    from ._reporting import TrackedRun

NUMBER = "meshwright.run"
AT_ONCE, LONGEST = 100, 6000  # parameters of a batch, and letters of one, that MLflow takes
STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker:
    """One run of MLflow; a resumed run continues it by a tag with its number."""

    _client: Any
    _entities: Any
    _run_id: str

    def begin(self, run: TrackedRun) -> None:
        """Begin or continue a run, with its configuration as parameters and its weighing as an artifact.

        Raises:
            InputError: it is not installed.
        """
        check_installed("mlflow", ["mlflow"], "reporting to mlflow")
        client = self._client = import_module("mlflow").MlflowClient()
        self._entities = import_module("mlflow.entities")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "meshwright")
        known = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if known is None else known.experiment_id
        found = client.search_runs([experiment], f"tags.`{NUMBER}` = '{run.number}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {NUMBER: run.number, **{f"meshwright.tag{at}": tag for at, tag in enumerate(run.tags)}}
            self._run_id = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
            params = [self._entities.Param(key, text[:LONGEST]) for key, text in _flat(run.config)]
            for at in range(0, len(params), AT_ONCE):
                client.log_batch(self._run_id, params=params[at : at + AT_ONCE])
        for path in run.files:
            if path.exists():
                client.log_artifact(self._run_id, str(path))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keep figures of a step."""
        at = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, at, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, state: str) -> None:
        """End the session."""
        self._client.set_terminated(self._run_id, STATES[state])


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys of nested sections, joined by a dot, with their values as text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", str(value)
