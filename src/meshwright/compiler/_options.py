"""Choose the options that a step is compiled with, in the spelling that the installed compiler accepts.

XLA renames and removes options between releases, and refuses a program with an unknown option. So a request
lists *purposes* (`requested_options`), and the process that compiles asks its compiler which spelling of each
it accepts (`accepted_options`). A purpose without an accepted spelling is left out of the options. Its
consequence is then reported next to the figures that it changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

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
    # Start collectives early and overlap them with computation (docs/adr/0002).
    "latency hiding": CompilerOption(
        spellings=(("xla_gpu_enable_latency_hiding_scheduler", True),),
        without="collectives are scheduled where they stand, so more of their time is exposed",
    ),
    # Reduce a layer's gradients over `data` while the next layer is computed. Pipelined gathers and
    # double-buffered loops hide more, but near the memory limit XLA then repeats matmuls (docs/adr/0002).
    "pipelined all-reduces": CompilerOption(
        spellings=(
            ("xla_gpu_enable_pipelined_all_reduce", True),  # 0.10
            ("xla_gpu_pipeline_all_reduce", "COLLECTIVE_PIPELINING_MODE_ON"),  # 0.11 and 0.12
        ),
        without="all-reduces of gradients wait for the end of each layer, so more of their time is exposed",
    ),
    # XLA would compile small all-reduces to Triton kernels, and crash on a scalar over several hosts ("size
    # mismatch when packing elements for LLVM struct"). This value selects NCCL, which 0.10 uses without it.
    "all-reduces by NCCL": CompilerOption(
        spellings=(("xla_gpu_experimental_use_collective_kernels", ""),),  # 0.11 and 0.12
        without="",
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
COMMUNICATION = ("latency hiding", "pipelined all-reduces", "all-reduces by NCCL")
DETERMINISM = ("no operation of undefined order", "deterministic operations")
REFUSALS = ("No such compile option", "While setting option")


def requested_options(platform: str, num_devices: int, deterministic: bool = False) -> tuple[str, ...]:
    """Return the purposes to request from the compiler, as keys of `OPTIONS`, for weighing and for running.

    A program for one device communicates nothing. One for a CPU or TPU is deterministic without any option.

    >>> requested_options("cuda", 8)
    ('latency hiding', 'pipelined all-reduces', 'all-reduces by NCCL')
    >>> requested_options("cpu", 8)
    ()
    """
    if platform != "cuda":
        return ()
    return (*(DETERMINISM if deterministic else ()), *(COMMUNICATION if num_devices > 1 else ()))


def accepted_options(purposes: Iterable[str], identity: Lowered) -> AcceptedOptions:
    """Return the spelling of each purpose that the installed compiler accepts.

    Args:
        purposes: keys of `OPTIONS`.
        identity: a program that compiles quickly, such as `jax.jit(lambda x: x).lower(0.0)`. It is compiled
            once for each spelling that is tried, in some 10 ms.

    Raises:
        RuntimeError: the compiler failed for a reason other than the option.
    """
    options: dict[str, OptionValue] = {}
    without: list[str] = []
    for purpose in purposes:
        option = OPTIONS[purpose]
        accepted = next((each for each in option.spellings if _accepts(identity, *each)), None)
        if accepted is not None:
            options.update([accepted])
        elif option.without:
            names = " or ".join(name for name, _ in option.spellings)
            without.append(f"this release of XLA has no option {names}: {option.without}")
    return AcceptedOptions(options=options, without=tuple(without))


def _accepts(identity: Lowered, name: str, value: OptionValue) -> bool:
    try:
        identity.compile(compiler_options={name: value})
    except RuntimeError as refused:  # jax's JaxRuntimeError is one
        if any(words in str(refused) for words in REFUSALS):
            return False
        raise
    return True
