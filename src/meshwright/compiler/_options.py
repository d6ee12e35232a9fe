"""Choose the compiler's options for a program, and load what a card found by timing kernels.

XLA renames and removes options between releases, and refuses a program with an unknown one. So a request
lists *purposes* (`requested_options`), and the process that compiles asks its compiler which spelling of each
it accepts (`accepted_options`). A purpose without an accepted spelling is left out of the options. Its
consequence is then reported next to the figures that it changes.

Autotuning: with a GPU at hand, XLA times kernels for a matrix product and takes the fastest. It can write its
choices to a file, and compile by such a file without the GPU (`autotune_results` of a config;
docs/dev/adr/0011).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from meshwright.errors import InputError
from meshwright.files import read_text, reason

OptionValue = bool | str


class Lowered(Protocol):
    """A program to compile with options, such as a `jax.stages.Lowered`; this module imports no jax."""

    def compile(self, *, compiler_options: dict[str, Any]) -> Any:
        """Compile the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerOption:
    """An effect that is requested from the compiler, with every name and value that XLA has had for it.

    `without`: the figure that changes where the compiler has no spelling; empty where none changes.
    """

    spellings: tuple[tuple[str, OptionValue], ...]
    without: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedOptions:
    """Options in the form that `compile` takes, and the consequence of each purpose without a spelling."""

    options: dict[str, OptionValue]
    without: tuple[str, ...]


# Releases seen: jaxlib 0.10.2, 0.11.2 and 0.12.0.1. They accept every option without a remark.
OPTIONS = {
    # Start collectives early and overlap them with computation (docs/dev/adr/0002).
    "latency hiding": CompilerOption(
        spellings=(("xla_gpu_enable_latency_hiding_scheduler", True),),
        without="collectives are scheduled where they stand, so more of their time is exposed",
    ),
    # Reduce a layer's gradients over `data` while the next layer is computed. Pipelined gathers and
    # double-buffered loops hide more, but near the memory limit XLA then repeats matmuls (docs/dev/adr/0002).
    "pipelined all-reduces": CompilerOption(
        spellings=(
            ("xla_gpu_enable_pipelined_all_reduce", True),  # 0.10
            ("xla_gpu_pipeline_all_reduce", "COLLECTIVE_PIPELINING_MODE_ON"),  # 0.11 and 0.12
        ),
        without="all-reduces of gradients wait for the end of each layer, so more of their time is exposed",
    ),
    # Run a message beside one over another axis, such as the gather of weights over `fsdp` beside that of
    # activations over `tensor`. XLA does so only for groups that share at most one device, which cannot wait
    # for each other; messages over one axis run in turn (docs/dev/adr/0002).
    "two messages at once": CompilerOption(
        spellings=(("xla_gpu_experimental_parallel_collective_overlap_limit", "2"),),
        without="messages over different axes run in turn, so more of their time is exposed",
    ),
    # XLA would compile small all-reduces to Triton kernels, and crash on a scalar over several hosts ("size
    # mismatch when packing elements for LLVM struct"). This value selects NCCL, which 0.10 uses without it.
    "all-reduces by NCCL": CompilerOption(
        spellings=(("xla_gpu_experimental_use_collective_kernels", ""),),  # 0.11 and 0.12
        without="",
    ),
    # Call cuBLAS for matrix products. Without a device XLA cannot time its Triton kernels and takes untuned
    # ones, with prologues and epilogues that a card would not run (docs/dev/adr/0011).
    "products by cuBLAS": CompilerOption(
        spellings=(("xla_gpu_enable_triton_gemm", False),),
        without="matrix products are Triton kernels that the compiler did not tune",
    ),
    # Leave fusions as XLA emits them. With a GPU it would time some as Triton kernels, and take other ones
    # than were weighed.
    "fusions untimed": CompilerOption(
        spellings=(("xla_gpu_experimental_enable_fusion_autotuner", False),),
        without="on a GPU the compiler may run some fusions as other kernels than were weighed",
    ),
    # Refuse a kernel of which the file of results says nothing, instead of taking one that nobody tuned.
    "results of a card for all": CompilerOption(
        spellings=(("xla_gpu_require_complete_aot_autotune_results", True),),
        without="kernels without a result in `autotune_results` are such that the compiler did not tune",
    ),
    # Keep results by a GPU's description and a kernel's text, so that they are found without the GPU. The new
    # format keeps them by digests of both, and the description has the versions of the driver's libraries.
    "results by description": CompilerOption(
        spellings=(("xla_gpu_use_new_autotune_cache_format", False),),  # 0.11 and 0.12; 0.10 has no other
        without="",
    ),
    # XLA would join small products that share an operand, in 16 bits, and so undo their eight bits.
    "products apart": CompilerOption(
        spellings=(("xla_gpu_dot_merger_threshold_mb", "0"),),
        without="small products that share an operand run in 16 bits",
    ),
    # Make repeated runs on one machine bitwise equal. The compiler replaces or refuses scatters, reductions
    # and library kernels that add in no fixed order, and it chooses no kernel by timing.
    "no operation of undefined order": CompilerOption(
        spellings=(("xla_gpu_exclude_nondeterministic_ops", True),),
        without="the compiler may choose operations whose results differ between runs",
    ),
    "deterministic operations": CompilerOption(
        spellings=(("xla_gpu_deterministic_ops", True),),
        without="the compiler may choose kernels whose results differ between runs",
    ),
}
Autotuning = Literal["off", "load", "write"]
"""Call cuBLAS for all products, take kernels by a file, or time them on the GPU and write a file."""
PRODUCTS: dict[Autotuning, tuple[str, ...]] = {
    "off": ("products by cuBLAS", "fusions untimed"),
    "load": ("results of a card for all", "results by description", "fusions untimed"),
    "write": ("results by description", "fusions untimed"),
}
EIGHT_BITS = ("products apart",)
COMMUNICATION = ("latency hiding", "pipelined all-reduces", "all-reduces by NCCL")
SEVERAL_AXES = ("two messages at once",)
OF_WEIGHTS = {"data", "fsdp"}  # axes over which no activations are sent
DETERMINISM = ("no operation of undefined order", "deterministic operations")
HOW_TO_WRITE = (
    "name a file that does not exist: `meshwright train` on that GPU writes it; "
    "or leave autotune_results out, for products by cuBLAS"
)
GPU_OF_RESULT = re.compile(r'\bdevice: "([^"]*)"')
DESCRIPTION = re.compile(
    r"(?P<model>CUDA: [\d.]+), Cores: (?P<cores>\d+), .*Memory bandwidth: (?P<rate>\d[\d.]*) GB/s"
)
SAME_RATE = 0.05  # catalog and driver differ by less, an H100 and an H200 by more
# Names in XLA_FLAGS of what changes no program: how many devices a host has, dumps, and time limits.
UNCHANGING = ("xla_force_host_platform_device_count", "xla_dump", "xla_cpu_collective_timeout_seconds")
REFUSALS = ("No such compile option", "While setting option")


def requested_options(
    platform: str,
    mesh_axes: Iterable[tuple[str, int]],
    *,
    deterministic: bool = False,
    eight_bits: bool = False,
    autotuning: Autotuning = "off",
) -> tuple[str, ...]:
    """Return the purposes to request from the compiler, as keys of `OPTIONS`, for weighing and for running.

    A program for one device communicates nothing. One for a CPU or TPU is deterministic without any option.

    Messages over `data` and `fsdp` are of weights and gradients alone, and hide as well one after the other.

    Args:
        mesh_axes: name and size of each axis of the mesh.

    >>> requested_options("cuda", [("data", 1)])
    ('products by cuBLAS', 'fusions untimed')
    >>> requested_options("cpu", [("fsdp", 4), ("tensor", 2)])
    ()
    """
    if platform != "cuda":
        return ()
    products = (*PRODUCTS[autotuning], *(EIGHT_BITS if eight_bits else ()))
    split = {name for name, size in mesh_axes if size > 1}
    messages = COMMUNICATION if split else ()
    if len(split) > 1 and not split <= OF_WEIGHTS:
        messages += SEVERAL_AXES
    return (*products, *(DETERMINISM if deterministic else ()), *messages)


def accepted_options(purposes: Iterable[str], identity: Lowered) -> AcceptedOptions:
    """Return the spelling of each purpose that the installed compiler accepts.

    An option that the user's `XLA_FLAGS` sets is left as it is there, and reported with the missing ones.

    Args:
        purposes: keys of `OPTIONS`.
        identity: a program that compiles quickly, such as `jax.jit(lambda x: x).lower(0.0)`. It is compiled
            once for each spelling that is tried, in some 10 ms.

    Raises:
        RuntimeError: the compiler failed for a reason other than the option.
    """
    options: dict[str, OptionValue] = {}
    without: list[str] = []
    set_by_user = user_flags()
    for purpose in purposes:
        option = OPTIONS[purpose]
        if theirs := [name for name, _ in option.spellings if name in set_by_user]:
            without.append(f"XLA_FLAGS sets {theirs[0]} to {set_by_user[theirs[0]]}")
            continue
        accepted = next((each for each in option.spellings if _accepts(identity, *each)), None)
        if accepted is not None:
            options.update([accepted])
        elif option.without:
            names = " or ".join(name for name, _ in option.spellings)
            without.append(f"this release of XLA has no option {names}: {option.without}")
    return AcceptedOptions(options=options, without=tuple(without))


def user_flags() -> dict[str, str]:
    """Return the options in `XLA_FLAGS` that may change a program, by name; without a value they are true."""
    flags = (flag.lstrip("-").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name: value or "true" for name, _, value in flags if not name.startswith(UNCHANGING)}


def _accepts(identity: Lowered, name: str, value: OptionValue) -> bool:
    try:
        identity.compile(compiler_options={name: value})
    except RuntimeError as refused:  # jax's JaxRuntimeError is one
        if any(words in str(refused) for words in REFUSALS):
            return False
        raise
    return True


def read_autotune_results(path: str | None, platform: str, description: str) -> str:
    """Return the text of a config's file of autotuning results; empty if it names none.

    XLA finds a result by the GPU's description, which has the version of its cuDNN and the memory's rate as
    the driver reports it. They are replaced by those of `description`, the target's.

    Raises:
        InputError: the file cannot be read, it is of another GPU, or the program is not for GPUs.
    """
    if path is None:
        return ""
    if platform != "cuda":
        what = f"autotune_results = {path!r}, but this program is compiled for a {platform.upper()}"
        raise InputError(what, hint="leave it out: only NVIDIA's GPUs have such results")
    try:
        text = read_text(path)
    except (OSError, ValueError) as broken:
        why = reason(broken) if isinstance(broken, OSError) else "it is not text"
        raise InputError(f"cannot read autotune_results = {path!r}: {why}", hint=HOW_TO_WRITE) from broken
    if not text.strip():
        raise InputError(f"autotune_results = {path!r} is an empty file", hint=HOW_TO_WRITE)
    if "hlo_fingerprint" in text:
        what = f"autotune_results = {path!r} has XLA's new format, in which no GPU is described"
        raise InputError(f"{what}: only that GPU finds its results", hint=HOW_TO_WRITE)
    for other in set(GPU_OF_RESULT.findall(text)):
        if not _is_like(other, description):
            what = f"autotune_results = {path!r} is of another GPU: {other}"
            raise InputError(f"{what}; the step is for {description}", hint=HOW_TO_WRITE)
    return GPU_OF_RESULT.sub(lambda found: found[0].replace(found[1], description), text)


def _is_like(words: str, description: str) -> bool:
    """Return whether two descriptions have the same capability and cores, and about the same memory."""
    first, second = DESCRIPTION.search(words), DESCRIPTION.search(description)
    if first is None or second is None:
        return False
    rates = float(first["rate"]), float(second["rate"])
    alike = first["model"] == second["model"] and first["cores"] == second["cores"]
    return alike and abs(rates[0] / rates[1] - 1) <= SAME_RATE


def loading_results(path: Path) -> dict[str, OptionValue]:
    """Return the option with which the compiler takes kernels by a file of autotuning results."""
    return {"xla_gpu_load_autotune_results_from": str(path)}


def writing_results(path: Path) -> dict[str, OptionValue]:
    """Return the option that makes the compiler write the kernels it chose by timing, which needs a GPU."""
    return {"xla_gpu_dump_autotune_results_to": str(path)}


def check_refused_results(failed: Exception) -> None:
    """Raise an `InputError` if a compilation failed because of the file of autotuning results."""
    words = str(failed)
    if re.search("parse autotune|version mismatch in autotune", words, re.IGNORECASE):
        what = "XLA cannot read the file of autotune_results; another release may have written it"
        raise InputError(f"{what}: {words.splitlines()[0]}", hint=HOW_TO_WRITE) from failed
    missing = re.search(r"No cached config found for HLO instr: (%\S+) = ", words)
    if missing:
        count = re.search(r"Failed to get configs for: (\d+) out of (\d+)", words)
        how_many = f"{count[1]} of {count[2]} kernels" if count else "1 kernel"
        what = f"the file of autotune_results has no result for {how_many} of this step, as for {missing[1]}"
        raise InputError(
            f"{what}: its results are of another step, GPU or release", hint=HOW_TO_WRITE
        ) from failed
