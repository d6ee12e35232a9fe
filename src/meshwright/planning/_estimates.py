"""Estimate the memory and the time of many candidates at once, by the closed form (`Form`)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from meshwright.config import RunConfig
from meshwright.predict import Machine

from ._closed_form import Form
from ._space import SETTINGS, Candidates

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Columns, a row for each candidate: bytes of one device and seconds of a step.

    `memory_bound` and `seconds_bound` are never above the compiled program's reserved bytes and predicted
    seconds; `memory` and `seconds` are near them. `seconds_fitting`: the seconds if the program fits,
    whatever `memory` says; where it says more than a device has, `seconds` are those of one that does not.
    """

    memory_bound: Numbers
    memory: Numbers
    seconds_bound: Numbers
    seconds: Numbers
    seconds_fitting: Numbers


def estimate(config: RunConfig, machine: Machine, candidates: Candidates) -> Estimates:
    """Return bounds and estimates of all candidates; about 100,000 a second.

    Args:
        config: the resolved run.
        machine: the rates of the fleet's devices, from `predict.machine_of`.

    Raises:
        InputError: the devices span a link for which the catalog has no rate.
    """
    columns = {field.name: np.empty(len(candidates)) for field in fields(Estimates)}
    precisions = candidates.settings["precision"]
    for place in np.unique(precisions):
        rows = precisions == place
        of_precision = config.model_copy(update={"precision": SETTINGS["precision"][place]})
        form = Form(of_precision, machine, candidates[rows])
        for name, column in columns.items():
            column[rows] = getattr(form, name)()
    return Estimates(**columns)
