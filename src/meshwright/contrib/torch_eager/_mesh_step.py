"""Account a training step of a PyTorch module on a mesh: run its first and last rank, and sum up.

A rank runs as it would run there: the user's `parallelize`, FSDP2's hooks, DTensor's redistributions, on fake
tensors and in a process group that moves nothing. Its figures are its own; FLOPs are those of the first rank
times the ranks.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from meshwright.config import Layout
from meshwright.eager import EagerAccount, RankCount
from meshwright.errors import InputError
from meshwright.hardware import Fleet
from meshwright.ledger import Ledger, MemoryLedger
from meshwright.predict import NUM_SPANS, Machine, busy_of, launched_one_by_one, machine_of, prediction_of
from meshwright.units import format_bytes

from ._allocator import segments_expand
from ._attention_kernels import AS_WRITTEN, compiled_paths, kernels_of
from ._autocast import CPU, cudas_autocast
from ._eager_step import ALWAYS, EagerStep, surroundings
from ._fakes import as_given, check_parts
from ._flex import NO_LOWER_END, WHOLE
from ._host import NO_TIME, copying_to_host, pinning_nothing, shards_on_host
from ._launches import Launches, watching_streams
from ._mesh import (
    Plan,
    check_plan,
    fake_world,
    holding_loss_parallel,
    is_even,
    refusing_pipelines,
    spread,
    watching_dtensors,
    watching_fsdp,
)
from ._module_counts import flops_of_ranks, module_counts
from ._rank_traffic import merged, traffic_of
from ._timeline import history_of, ledger_name, memory_of, reserved_bytes, workspace_bytes
from ._watch import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTED

ON_A_MESH = (
    "The inputs are those of one rank. FLOPs are those of the first rank times the ranks, so that work which "
    "several ranks repeat counts for each.",
)
ATTENTION = "flash-2"  # the kernels that PyTorch has built in
UPPER_BOUND = "upper bound: weighed without torch.compile"
PARTLY = (
    "upper bound: the modules that torch.compile compiles are weighed as Inductor compiles them (a model), "
    "functions that are compiled by themselves without torch.compile"
)
# The errors are those of benchmarks/torch_compiled.py.
MODELLED = "weighed as Inductor compiles it (a model: -11 to +2 % on the peaks of five public scripts)"
BY_INDUCTOR = (
    "Memory is of Inductor's kernels: its partitioner decides what is saved, its scheduler what is fused "
    "and where results take over the memory of operands. FLOPs and messages are those of the module as it "
    "was written."
)
FUNCTIONS_AS_WRITTEN = "Functions that torch.compile compiles by themselves count as they were written."
COMPILED = "parts are compiled by torch.compile, whose kernels are not predicted"


def account_on_mesh(
    module: Any,
    inputs: tuple[Any, ...],
    keyword_inputs: dict[str, Any],
    *,
    name: str,
    fleet: Fleet,
    layout: Layout,
    parallelize: Plan | None = None,
    optimizer: Any = None,
    loss: Any = None,
    autocast: Any = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> EagerAccount:
    """Return the account of one training step on each rank of a mesh.

    Args:
        module, inputs, keyword_inputs, optimizer, loss, autocast: as for `mw.torch_step`, of one rank.
        name: to show it by.
        fleet: the devices; their number is that of the layout.
        layout: the mesh's axes, resolved.
        parallelize: called with a copy of the module and the mesh; None for the default plan.
        on_phase: called with the name of each part of the work.

    Raises:
        InputError: the module cannot run on fake tensors, or fails on its inputs; an axis needs a plan, or
            the plan fails.
    """
    started = time.process_time()
    paths = compiled_paths(module)
    module = as_given(module)
    check_parts(module, (inputs, keyword_inputs), optimizer, loss, autocast)
    check_plan(layout.axes, parallelize)
    machine, why_not = _machine(fleet)
    parts = {"loss": loss, "autocast": autocast, "optimizer": optimizer}

    ran = partial(_ran, module, inputs, keyword_inputs, parts, fleet, layout, parallelize, paths)
    steps: list[EagerStep] = []
    for rank in dict.fromkeys((0, layout.num_devices - 1)):
        if rank and parallelize is None and is_even(steps[0].module):
            break  # its shards are as large as those of the first
        on_phase(f"running rank {rank}")
        timed = None if machine is None or rank else Launches(machine, layout.num_devices)
        steps.append(ran(rank, launches=timed))
    compiled = bool(steps[0].regions) or AS_WRITTEN in steps[0].notes
    kept, basis = steps, ""
    if compiled:
        on_phase("compiling by a model of Inductor")
        kept, basis = _by_inductor(steps, fleet, lambda rank: ran(rank, by_inductor=True), layout)
    on_phase("reckoning")
    account = _summed(steps, kept, basis, module, name, fleet, layout, started)
    return _with_time(account, steps[0], layout.num_devices, COMPILED if compiled else why_not)


def _ran(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    keyword_inputs: dict[str, Any],
    parts: dict[str, Any],
    fleet: Fleet,
    layout: Layout,
    parallelize: Plan | None,
    compiled: tuple[str, ...],
    rank: int,
    *,
    launches: Launches | None = None,
    by_inductor: bool = False,
) -> EagerStep:
    """Return the step of one rank after it has run, perhaps as Inductor compiles it."""
    has_host = fleet.chip.platform != "cpu"  # whose memory is that of the ranks
    with (
        surroundings(),
        fake_world(layout.axes, rank) as mesh,
        holding_loss_parallel(),
        pinning_nothing(),
    ):
        notes: list[str] = []
        step = EagerStep(
            module,
            inputs,
            keyword_inputs,
            lambda each: spread(each, mesh, parallelize, notes.append),
            layout.axes,
            shards_on_host if has_host else lambda each: (),
            compiled,
        )
        step.notes += notes
        step.watch.launches, step.watch.workspace_bytes = launches, workspace_bytes(fleet, layout)
        with (
            watching_fsdp(step.storages),
            watching_dtensors(step.watch),
            refusing_pipelines(),
            watching_streams(launches),
            kernels_of(fleet.chip, step.notes.append),
            cudas_autocast() if has_host and step.device == CPU else contextlib.nullcontext(),
            copying_to_host(step.watch) if has_host else contextlib.nullcontext(),
        ):
            step.run(**parts, regions=_regions(step) if by_inductor else None)
    return step


def _regions(step: EagerStep) -> Any:
    """Return the context in which a step's compiled modules run as Inductor compiles them."""
    from ._compiled import compiled_regions  # which loads Inductor

    return compiled_regions(step.regions, step.watch, step.mode)


def _by_inductor(
    steps: list[EagerStep], fleet: Fleet, ran: Callable[[int], EagerStep], layout: Layout
) -> tuple[list[EagerStep], str]:
    """Return steps that keep what they keep when compiled, and what their bytes are of.

    They are the steps as they were written, whose bytes are an upper bound, where a part cannot be modelled.
    """
    why = "a CPU is not modelled" if fleet.chip.platform == "cpu" else ""
    if not why and not steps[0].regions:
        why = "only functions are compiled, each by itself"
    if not why:
        try:
            ranks = (0, layout.num_devices - 1)[: len(steps)]
            kept = [ran(rank) for rank in ranks]
        except Exception as failed:  # of PyTorch's compiler, which may raise anything
            from ._compiled import reason_of

            why = reason_of(failed)
        else:
            for step in kept:
                words = [FUNCTIONS_AS_WRITTEN] * bool(step.phases_as_written)
                step.notes = [note for note in step.notes if note != AS_WRITTEN] + [BY_INDUCTOR, *words]
            return kept, PARTLY if any(map(_is_partly_written, kept)) else MODELLED
    for step in steps:
        step.notes += [AS_WRITTEN, f"No model of Inductor was used: {why}."]
    return steps, UPPER_BOUND


def _machine(fleet: Fleet) -> tuple[Machine | None, str]:
    """Return the rates of the fleet's devices, or why there are none."""
    if fleet.chip.platform == "cpu":
        return None, "no rates are known of PyTorch's kernels on a CPU"
    try:
        return launched_one_by_one(machine_of(fleet, None, ATTENTION), fleet.num_devices), ""
    except InputError as unknown:
        return None, unknown.message


def _with_time(account: EagerAccount, first: EagerStep, num_devices: int, why_not: str) -> EagerAccount:
    """Return the account with the predicted time of the first rank's step."""
    launches = first.watch.launches
    if launches is not None and first.storages.host_peak_bytes:
        why_not = why_not or NO_TIME
    why_not = why_not or ("" if launches is None else launches.why_not)
    if launches is None or why_not:
        return dataclasses.replace(account, no_prediction=why_not)
    walked = launches.finish()
    if not walked.seconds:
        return dataclasses.replace(account, no_prediction="the step runs no kernel")
    prediction = prediction_of(
        launches.machine,
        walked,
        account.ledger,
        num_devices=num_devices,
        tokens_per_step=None,
        also=("eager",),
        no_lower_end=NO_LOWER_END if WHOLE in first.notes else "",
    )
    busy = busy_of(walked.events, walked.seconds, NUM_SPANS)
    return dataclasses.replace(account, prediction=prediction, busy=busy)


def _is_partly_written(step: EagerStep) -> bool:
    """Return whether functions that ran as they were written may have raised a step's peak.

    Those that the optimizer calls did not where the peak is elsewhere.
    """
    aside = {"", OPTIMIZER} if step.storages.peak_phase != OPTIMIZER else set[str]()
    return not step.phases_as_written <= aside


def _summed(
    steps: list[EagerStep],
    kept: list[EagerStep],
    basis: str,
    module: torch.nn.Module,
    name: str,
    fleet: Fleet,
    layout: Layout,
    started: float,
) -> EagerAccount:
    """Return the account of all ranks.

    Args:
        steps: of the ranks, as they were written: their FLOPs and messages.
        kept: those whose memory counts, and `basis`: what it is of.
    """
    memories = [_memory(step, fleet, layout, basis) for step in kept]
    most = max(range(len(steps)), key=lambda place: memories[place].reserved_bytes)
    fullest = steps[most]
    traffic, unpriced = traffic_of(fullest.watch.messages, fleet)
    without_rule = (f"{what}, {times} times" for what, times in sorted(fullest.watch.unknown.items()))
    ranks = dict.fromkeys((0, layout.num_devices - 1))
    notes = [*dict.fromkeys(kept[most].notes), *fullest.kernel_notes(), *ON_A_MESH]
    if fleet.chip.platform != "cpu" and segments_expand():
        notes.append("The allocator's segments expand, as its variable in the environment says.")
    if host_bytes := memories[most].host_bytes:
        notes.append(
            f"{format_bytes(host_bytes)} of each rank are in the host's memory, not in the device's."
        )
    if most:
        notes.append(f"Memory and traffic are those of rank {layout.num_devices - 1}, which needs the most.")
    ledger = Ledger(
        memory=memories[most],
        flops=flops_of_ranks(module, steps[0], layout.num_devices),
        traffic=traffic,
        unpriced=(*without_rule, *(f"{what}, {times} times" for what, times in unpriced.items())),
        assumptions=tuple(words.removesuffix(".") for words in (*notes, *ALWAYS)),
    )
    return EagerAccount(
        name=name,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        ledger=ledger,
        messages=merged(message for message, _, _ in fullest.watch.messages),
        ranks=tuple(
            _rank_count(rank, step, each, memory)
            for rank, step, each, memory in zip(ranks, steps, kept, memories, strict=False)
        ),
        modules=module_counts(module, steps[0], kept[0]),
        torch_version=torch.__version__,
        by_inductor=kept is not steps,
        seconds=time.process_time() - started,
    )


def _memory(step: EagerStep, fleet: Fleet, layout: Layout, basis: str) -> MemoryLedger:
    """Return the memory of a rank; on GPUs its allocator reserves more than is alive."""
    storages = step.storages
    reserved = None if fleet.chip.platform == "cpu" else reserved_bytes(storages.changes)
    memory = memory_of(history_of(storages.changes), storages.instant, fleet, layout, reserved)
    return dataclasses.replace(
        memory,
        host_bytes=storages.host_peak_bytes,
        basis=basis,
        is_upper_bound=basis in (UPPER_BOUND, PARTLY),
    )


def _rank_count(rank: int, step: EagerStep, kept: EagerStep, memory: MemoryLedger) -> RankCount:
    by_phase = Counter[str]()
    for (phase, _), count in step.watch.flops.items():
        by_phase[phase] += count
    assert memory.peak_bytes is not None, "a step's peak is known"
    return RankCount(
        rank=rank,
        parameters_bytes=kept.storages.held_bytes("parameters"),
        gradients_bytes=kept.gradients_bytes,
        optimizer_state_bytes=kept.optimizer_state_bytes,
        saved_activation_bytes=kept.saved_activation_bytes,
        peak_bytes=memory.peak_bytes,
        reserved_bytes=memory.reserved_bytes,
        flops_by_phase={phase: by_phase[phase] for phase in (FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER)},
        buffers_bytes=kept.storages.held_bytes("buffers"),
        inputs_bytes=kept.storages.held_bytes("inputs"),
        peak_phase=kept.storages.peak_phase,
        bytes_by_format={ledger_name(kind): formats for kind, formats in kept.by_format.items()},
        flops_by_operation=dict(step.watch.by_operation.most_common()),
    )
