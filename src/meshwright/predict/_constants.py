"""The tables of constants that come with the package, as their files have them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def runs() -> Mapping[str, Any]:
    """runs.toml: what published runs and others' reports say, shared by all predictions."""
    return _read_toml("runs.toml")


@cache
def fitted() -> Mapping[str, Any]:
    """rates.toml: coefficients fitted to public tables of kernels."""
    return _read_toml("rates.toml")


def _read_toml(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("meshwright.predict").joinpath(name).read_text(encoding="utf-8"))
