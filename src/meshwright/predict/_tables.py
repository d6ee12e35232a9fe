"""Read the files of rates: rates.toml, fitted to tables of kernels, and runs.toml, from runs and reports."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def runs() -> Mapping[str, Any]:
    """Return runs.toml: figures from published runs and others' reports, shared by all predictions."""
    return tomllib.loads(files("meshwright.predict").joinpath("runs.toml").read_text(encoding="utf-8"))


@cache
def fitted() -> Mapping[str, Any]:
    """Return rates.toml: coefficients fitted to public tables of kernels."""
    return tomllib.loads(files("meshwright.predict").joinpath("rates.toml").read_text(encoding="utf-8"))


def provenance() -> str:
    """Return the source of the coefficients and the date of their fit."""
    return f"{fitted()['source']}, fitted {fitted()['date']}"
