"""Where the seconds of a traced train step go, by class of work: ours, and PyTorch's grouped alike.

The classes: `matmul` is the matrix products of blocks and head, and their gradients; `attention` what lies
between its projections (scores, softmax, weighted values, and what a backward pass repeats of them);
`optimizer` clipping and the update; `memory-bound` all else that computes, such as norms, rotations,
activations, residuals and the loss; `other` the time in which nothing of these runs.

Ours are the events of jax.profiler, which name instructions of the weighed program; theirs the operators of
torch.profiler, each less those that it calls.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import meshwright as mw
from meshwright.contrib.calibration import traced_step, xplane_events
from meshwright.hlo import FREE, Instruction, module_of, phase_of
from meshwright.ledger import executions_in
from meshwright.measure import calibration_for
from meshwright.predict import classes_of_instructions

CLASSES = ("matmul", "attention", "memory-bound", "optimizer", "other")
STEPS = 3  # traced; the one of median length counts
LEAST_MATCHED = 0.99  # of the seconds, or the program that ran is not the weighed one
CONTAINERS = ("while", "conditional", "call")  # their events hold those of others
OPTIMIZER = "optimizer"
# By class, how the names of PyTorch's operators begin, after `aten::`; others are memory-bound.
OPERATORS = {
    "attention": ("_scaled_dot_product", "scaled_dot_product"),
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"),
}


def our_seconds_by_class(weighing: mw.Weighing, step: Callable[[], Any]) -> dict[str, float]:
    """Trace steps of the weighed program, each waited for, and return the seconds of one by class."""
    fleet = weighing.fleet
    executions = executions_in(weighing.folder, weighing.compiled)
    kinds = classes_of_instructions(executions, weighing.compiled, fleet, calibration_for(fleet))
    program = executions.program
    instructions = {each.name: each for _, each in program.instructions()}
    classes = {name: _class_of(instructions[name], kind) for name, kind in kinds.items()}
    others = [name for name, each in instructions.items() if each.opcode in FREE or each.opcode in CONTAINERS]
    once = [each.name for each in program.entry.instructions if each.name in classes]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                step()
        traced = traced_step(xplane_events(Path(folder)), classes, others, once)
    if traced.matched < LEAST_MATCHED:
        raise SystemExit(f"only {traced.matched:.0%} of the trace is of the weighed program")
    return _in_order(Counter(traced.exposed_by_class))


def _class_of(instruction: Instruction, kind: str) -> str:
    """Return the class of an instruction, of which a prediction knows the kind of kernel."""
    if phase_of(instruction.op_name, "") == OPTIMIZER:
        return OPTIMIZER
    return "attention" if module_of(instruction.op_name).endswith("/attention") else kind


def torch_seconds_by_class(step: Callable[[], Any]) -> dict[str, float]:
    """Trace PyTorch's steps one by one, and return the seconds of the one of median length by class.

    A step marks its clipping and update as `optimizer` with `torch.profiler.record_function`.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    found = []
    for _ in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
            step()
        found.append(_of_profile(profiler.events()))
    return sorted(found, key=lambda seconds: sum(seconds.values()))[STEPS // 2]


def _of_profile(events: Any) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for event in events:
        seconds[_class_of_operator(event)] += event.self_cpu_time_total * 1e-6
    return _in_order(seconds)


def _class_of_operator(event: Any) -> str:
    """Return the class of an operator or mark; what calls operators and is none itself is `other`."""
    caller = event
    while caller is not None:
        if caller.name == OPTIMIZER:
            return OPTIMIZER
        caller = caller.cpu_parent
    if not event.name.startswith("aten::"):
        return "other"
    name = event.name.removeprefix("aten::")
    for kind, beginnings in OPERATORS.items():
        if name in beginnings or (kind == "attention" and name.startswith(beginnings)):
            return kind
    return "memory-bound"


def _in_order(seconds: Counter[str]) -> dict[str, float]:
    """Return the seconds of `CLASSES`; those of any other name are `other`."""
    known = {name: seconds[name] for name in CLASSES[:-1]}
    return known | {CLASSES[-1]: sum(seconds.values()) - sum(known.values())}
