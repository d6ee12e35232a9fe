"""Describe a compile request, its cache key, and the record that a compilation leaves.

`Request` is the input of a compile worker: names and data, nothing pickled. `Compiled` is a folder of plain
files with everything that a compiler reported about one program. Its layout (text files are gzip-compressed):
    compiled.json             the fields of `Compiled`
    program.hlo.txt.gz        the optimised, scheduled program, as the compiler dumped it
    buffer-assignment.txt.gz  allocations, and the values placed in them
    live-range.txt.gz         the live range of each value
    manifest.json             sha256 of each of the above, written last
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import math
import os
import platform as python_platform
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.files import MOST_SOURCE_BYTES, reason
from meshwright.files import read_text as read_file
from meshwright.json_records import EXACT, read_record
from meshwright.units import format_bytes

from ._options import user_flags

SCHEMA = 1
Shape = tuple[str, tuple[int, ...]]  # element type as XLA names it ("bf16"), and dimensions on one device
QUESTION, ANSWER = "question-", "-answer"  # files by which a worker asks its caller while it compiles
PID_FILE, STATUS_FILE, STDERR_FILE = "guard", "status", "stderr"  # in a worker's folder
TEXTS = ("program.hlo.txt", "buffer-assignment.txt", "live-range.txt")


class CorruptFolder(Exception):
    """A `Compiled` folder that is truncated or altered; the cache rebuilds it."""


class TakesNoMesh(InputError):
    """A program's function takes no mesh: it is called where `jax.devices()` answers as the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One array argument of the program: its global shape, and the bytes of one device's shard."""

    path: str  # the compiler's name: "state['params']['embedding']"
    # parameters | optimizer_state | model_state | keys | step | batch; in a foreign step the argument's name
    role: str
    shape: tuple[int, ...]
    dtype: str
    device_bytes: int
    replicated: bool  # no dimension is split over any mesh axis
    host: bool = False  # lives in host memory
    moment: str = ""  # for optimizer state: the moment's name ("mu", "nu", "trace")
    axes: tuple[str, ...] | None = None  # mesh axes that split it; None in programs of older releases


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKernel:
    """A kernel of a traced program: its call, and the FLOPs of one run on one device.

    `kind`: matmul | attention. `source`: where the FLOPs come from, in words. `format`: the number format in
    which it multiplies. `head_size`, `length`: of attention, 0 for others.
    """

    name: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    flops: int
    recompute_flops: int
    kind: str
    format: str
    source: str
    head_size: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedFlops:
    """FLOPs of the program as written (global shapes, before the compiler), by phase.

    Phases: forward, backward, recompute, optimizer, other. For attention marked causal, only the needed half
    is counted. `unpriced`: calls without a rule, with their shapes. `kernels`: calls that the compiler cannot
    look into, each once. `assumptions`: how their FLOPs were counted, in words. `by_source`: whether work
    outside any scope has the function and line of its source for a module.
    """

    by_phase: dict[str, int]
    unpriced: tuple[str, ...]
    attention: int  # the part from attention's own matmuls
    by_module: dict[str, int] = field(default_factory=dict[str, int])  # without recomputation
    # Phase -> module, with recomputation. Empty in programs compiled before it was counted.
    by_phase_and_module: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    kernels: tuple[NamedKernel, ...] = ()
    assumptions: tuple[str, ...] = ()
    by_source: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Hold how a model sends tokens to experts, which its compiled program does not show.

    `load`: the tokens of the device that gets most, over the mean of all; 1.0 if they are balanced.
    `ways`: devices that divide the experts; no load is above it. None: not known.
    `is_capped`: experts have buffers of a fixed size, and the load changes nothing.
    `domains`: the fast domains to each of which the program sends a token's row once; 1: a row by choice.
    """

    num_experts: int
    num_chosen: int  # of a token
    load: float = 1.0
    ways: int | None = None
    is_capped: bool = False
    domains: int = 1

    def reached(self, parts: int) -> float:
        """Return the probability that a given one of `parts` equal parts holds any of a token's experts.

        Choices are independent and uniform, as a forced balance makes them.

        >>> round(15 * Routing(num_experts=128, num_chosen=8).reached(16), 1)  # 15 other devices
        6.2
        """
        elsewhere = self.num_experts - self.num_experts // parts
        return 1 - math.comb(elsewhere, self.num_chosen) / math.comb(self.num_experts, self.num_chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One compiled program: its source, its target, its compiler, and the compiler's reports."""

    __pydantic_config__ = EXACT
    schema: int
    name: str  # preset, file, or module:function
    source: str  # "target compiler" or "simulated on CPU"
    fleet: str  # in the form that `Fleet.parse` reads
    platform: str  # cuda | tpu | cpu: the compiler's platform
    num_devices: int
    mesh_axes: tuple[tuple[str, int], ...]  # name and size, outermost first; device ids run in this order
    compiler: str  # "XLA of jaxlib 0.10.2, jax-cuda13-pjrt 0.10.2"
    versions: dict[str, str]
    options: dict[str, bool | str]  # as XLA spells them
    arguments: tuple[Argument, ...]
    traced_flops: TracedFlops
    num_parameters: int | None
    num_matmul_parameters: int | None  # None also if some parameters are frozen
    tokens_per_step: int | None
    sequence_length: int | None
    # Sums over the compiler's buffer assignment, as its memory_analysis has them: argument, output, alias,
    # temp, and host_argument and so on. For TPUs the analysis itself, with peak_memory, where there is one.
    reported_bytes: dict[str, int]
    compile_seconds: float  # by the clock, trace to executable
    fingerprint: str  # of the optimised program, without source positions
    # For TPUs: each device's place in its slice's torus (x, y, z, core), in the mesh's order; else empty.
    coordinates: tuple[tuple[int, ...], ...] = ()
    # For several TPU slices: libtpu's number of each device, in the mesh's order; else empty.
    device_ids: tuple[int, ...] = ()
    # The figures that change because this release of XLA lacks a requested option.
    without_options: tuple[str, ...] = ()
    # Of a run of ours with experts; None of any other program. No part of the compiled program.
    routing: Routing | None = None

    def save(self, folder: Path, texts: dict[str, str]) -> None:
        """Write the folder, the manifest last. `texts` holds the raw content of each name in `TEXTS`."""
        folder.mkdir(parents=True, exist_ok=True)
        contents = {"compiled.json": json.dumps(dataclasses.asdict(self), indent=1).encode()}
        contents |= {f"{name}.gz": gzip.compress(texts[name].encode(), 6, mtime=0) for name in TEXTS}
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        (folder / "manifest.json").write_text(json.dumps(digests, indent=1))

    @staticmethod
    def load(folder: Path) -> Compiled:
        """Read a folder, and verify the hash of every file.

        Raises:
            CorruptFolder: a file is missing, truncated or altered, or of another schema.
        """
        try:
            digests = json.loads((folder / "manifest.json").read_text())
            for name in ("compiled.json", *(f"{t}.gz" for t in TEXTS)):
                if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digests[name]:
                    raise CorruptFolder(f"{folder / name} does not have the hash its manifest states")
            fields = (folder / "compiled.json").read_text()
            compiled = read_record(Compiled, fields, name="a compiled program", hint="weigh again")
            if compiled.schema != SCHEMA:
                raise CorruptFolder(f"{folder} has schema {compiled.schema}, this version reads {SCHEMA}")
            return compiled
        except (OSError, ValueError, KeyError, TypeError, RecursionError, InputError) as broken:
            raise CorruptFolder(f"{folder}: {broken}") from broken


def read_text(folder: os.PathLike[str] | str, name: str) -> str:
    """Return the content of one of `TEXTS` in a `Compiled` folder."""
    return gzip.decompress((Path(folder) / f"{name}.gz").read_bytes()).decode()


# The packages that determine the program, in addition to the request.
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "libtpu")
PACKAGES += ("optax", "numpy")
TARGET_COMPILER, SIMULATED = "target compiler", "simulated on CPU"  # the values of `Compiled.source`
STEP_ROOMS = (
    "adafactor", "context_attention", "eight_bit_states", "experts", "further_tokens", "latent_attention",
    "lora", "muon", "offload", "pipelines", "state_mixers", "toy_models",
)  # fmt: skip
"""Rooms outside the core of which a run's step may have a part."""
_STEP_FOLDERS = ("compiler", "config", "hlo", "sharding.py", "trainer/models", "trainer/step", "worker")
SOURCES = (*_STEP_FOLDERS, *(f"contrib/{name}" for name in (*STEP_ROOMS, "jax_steps", "linear_algebra")))
"""Folders and files of this package that decide what is compiled of a request, and what is recorded of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesFile:
    """A Python file that registers rules for kernels, as it was read."""

    path: str
    text: str

    @staticmethod
    def read(path: str | Path) -> RulesFile:
        """Read a file.

        Raises:
            InputError: there is no such file, or it is no text.
        """
        try:
            return RulesFile(path=str(path), text=read_file(path, MOST_SOURCE_BYTES))
        except (OSError, ValueError) as failed:
            raise InputError(
                f"the rules in {path} cannot be read: {reason(failed)}",
                hint="name a Python file that calls meshwright.register_kernel(name, rule)",
            ) from failed

    def register(self) -> None:
        """Run the file in this process.

        Raises:
            InputError: it fails.
        """
        try:
            exec(compile(self.text, self.path, "exec"), {"__name__": "rules", "__file__": self.path})
        except Exception as failed:
            raise InputError(
                f"the rules in {self.path} failed: {type(failed).__name__}: {failed}",
                hint="it is a Python file that calls meshwright.register_kernel(name, rule)",
            ) from failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to compile one program for one fleet, by exactly one of `config`, `function`, `digest`."""

    name: str
    fleet: str
    platform: str  # the compiler's: cuda | tpu | cpu
    source: str  # "target compiler" | "simulated on CPU"
    topology: dict[str, Any]  # the arguments of `get_topology_desc`; empty for the CPU
    num_devices: int
    mesh_axes: tuple[tuple[str, int], ...]
    options: tuple[str, ...]  # purposes, as `requested_options` returns them
    autotune_results: str = ""  # text of a file that XLA wrote on a card; empty for products by cuBLAS
    config: dict[str, Any] | None = None  # a RunConfig
    function: str | None = None  # "package.module:function"
    search_path: tuple[str, ...] = ()  # folders in which the function's module is searched first
    knobs: dict[str, str] = field(default_factory=dict[str, str])  # the function's keyword arguments, as text
    digest: str = ""  # of a program lowered by the caller, whose text is in the worker's folder
    rules: RulesFile | None = None  # for kernels of the function's program
    describes: bool = False  # answer with what the function declares (`Declared`) instead of compiling

    def to_json(self) -> str:
        """Return the JSON text that the worker reads."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Request:
        """Read the text that `to_json` writes."""
        return read_record(Request, text, name="a compile request", hint="report it: Meshwright wrote it")

    def key(self, lowered: str = "") -> str:
        """Return the cache key.

        It is made of the request, versions, our source, the user's flags of XLA, and a foreign step's
        lowered text.
        """
        around = json.dumps([installed_versions(), sorted(user_flags().items())])
        parts = [str(SCHEMA), self.to_json(), around, _source_digest(), lowered]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Hold what a user's function declares: its mesh axes, and its knobs with their values as text.

    The default of a knob comes first.
    """

    axes: tuple[str, ...]
    knobs: dict[str, tuple[str, ...]]


@cache
def installed_versions() -> dict[str, str]:
    """Return the versions of everything that determines the program, without packages that are absent."""
    versions = {"python": python_platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@cache
def _source_digest() -> str:
    return digest_of_sources(SOURCES, (".py",))


@cache
def digest_of_sources(names: tuple[str, ...], suffixes: tuple[str, ...] = (".py", ".toml")) -> str:
    """Return a digest of Meshwright's own files of these kinds.

    `names`: folders and files, relative to the package: ("ledger", "units.py").

    Raises:
        FileNotFoundError: there is no folder or file of that name.
    """
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for name in names:
        (root / name).stat()
        for path in (root / name, *sorted((root / name).rglob("*"))):
            if path.suffix in suffixes and path.is_file():
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A program that XLA refused because a device has too little memory, and what is known of it.

    `needed_bytes` and `usable_bytes`: XLA's figures of one device, to the digits that it prints. `words`: the
    sentence of XLA. `argument_bytes_by_role`: what the step's arguments take on one device, by their shapes.
    """

    needed_bytes: int
    usable_bytes: int
    words: str
    compiler: str
    seconds: float = 0.0
    mesh_axes: tuple[tuple[str, int], ...] = ()
    num_parameters: int | None = None
    tokens_per_step: int | None = None
    argument_bytes_by_role: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def line(self) -> str:
        """XLA's figures in words."""
        needed, usable = format_bytes(self.needed_bytes), format_bytes(self.usable_bytes)
        beyond = self.needed_bytes - self.usable_bytes
        share = f"{100 * beyond / self.usable_bytes:.1f} %"
        return f"{needed} of {usable} per device, {format_bytes(beyond)} ({share}) too much"
