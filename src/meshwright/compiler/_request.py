"""What a compile worker is asked: names and data, nothing pickled. And the key it is cached under."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform as python_platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ._record import SCHEMA

# What decides the program, beside the request itself.
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cudnn-cu13",
    "libtpu",
    "optax",
    "numpy",
)
SOURCES = ("compiler", "config", "models", "sharding", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One program to compile for one fleet. Exactly one of `config` and `function` is given."""

    name: str
    fleet: str
    platform: str  # of the compiler: cuda | tpu | cpu
    source: str  # "target compiler" | "simulated on CPU"
    topology: dict[str, Any]  # the arguments of `get_topology_desc`; empty for the CPU
    num_devices: int
    mesh_axes: tuple[tuple[str, int], ...]
    options: tuple[str, ...]  # purposes, as `requested_options` returns them
    config: dict[str, Any] | None = None  # a RunConfig
    function: str | None = None  # "package.module:function"
    search_path: tuple[str, ...] = ()  # where the function's module is looked for first

    def to_json(self) -> str:
        """As the worker reads it."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Request:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        fields["mesh_axes"] = tuple((name, size) for name, size in fields["mesh_axes"])
        fields["options"] = tuple(fields["options"])
        fields["search_path"] = tuple(fields["search_path"])
        return Request(**fields)

    def key(self, lowered: str = "") -> str:
        """The cache key: the request, versions, and our own source; for a foreign step its lowered text."""
        parts = [str(SCHEMA), self.to_json(), json.dumps(installed_versions()), _source_digest(), lowered]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def installed_versions() -> dict[str, str]:
    """Versions of everything that decides the program; a package that is absent is left out."""
    versions = {"python": python_platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def _source_digest() -> str:
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def fingerprint_of(program: str) -> str:
    """A digest of an optimised program's text, without what does not change it: source positions,
    the module's name and the scheduler's own note of an earlier fingerprint."""
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d.*\n)*", "\n", program)
    text = re.sub(r",? metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*\}", "", text)
    text = re.sub(r"fingerprint_before_lhs=\"\w*\"", "", text)
    text = re.sub(r"^HloModule [^,]*", "HloModule", text)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
