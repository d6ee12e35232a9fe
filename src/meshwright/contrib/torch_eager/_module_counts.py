"""Count what a rank's step costs by the modules that run it; equal entries of lists count together.

This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch

from meshwright.eager import ModuleCount
from meshwright.ledger import FlopLedger

from ._eager_step import EagerStep
from ._watch import BACKWARD, FORWARD, RECOMPUTED

NUMBER = re.compile(r"\d+")
WRAPPED = re.compile(r"(^|\.)(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)(?=\.|$)")


class Scopes:
    """Name the paths of a module as scopes: without wrappers, and with the numbers of lists left open.

    The entries of a `Sequential` of several classes are no list, and keep their numbers.

    >>> from torch import nn
    >>> scopes = Scopes(nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]), nn.ReLU()))
    >>> scopes.of("0._checkpoint_wrapped_module.0"), scopes.of("1"), scopes.of(None)
    ('0/*', '1', '')
    """

    def __init__(self, module: torch.nn.Module, *, is_replicated: bool = False) -> None:
        self._sequences = {
            path
            for path, part in module.named_modules()
            if isinstance(part, torch.nn.Sequential) and len({type(entry) for entry in part}) > 1
        }
        self._is_replicated = is_replicated  # by DDP, whose own child is the module

    def of(self, path: str | None) -> str:
        """Return the scope of a path; "" for work outside of all modules."""
        plain = WRAPPED.sub("", path or "").strip(".")
        if self._is_replicated:
            plain = plain.removeprefix("module").removeprefix(".")
        parts = plain.split(".")
        return "/".join(
            "*" if NUMBER.fullmatch(part) and ".".join(parts[:place]) not in self._sequences else part
            for place, part in enumerate(parts)
        )


def scopes_of(module: torch.nn.Module, step: EagerStep) -> Scopes:
    """Return the scopes of the user's module, for the paths of a step that has wrapped it."""
    is_replicated = isinstance(step.module, torch.nn.parallel.DistributedDataParallel)
    return Scopes(module, is_replicated=is_replicated)


def module_counts(module: torch.nn.Module, step: EagerStep, saved_by: EagerStep) -> tuple[ModuleCount, ...]:
    """Return the costs of each scope of a module with all that is inside, in the module's order.

    Args:
        module: the user's own.
        step: of one rank, after it has run. `saved_by`: the step whose memory counts.
    """
    scopes = scopes_of(module, step)
    parts: dict[str, list[Any]] = {}
    for path, part in module.named_modules():
        parts.setdefault(scopes.of(path), []).append(part)
    sums = Counter[tuple[str, str]]()
    saved = {("saved", path): size for path, size in saved_by.saved_by_module.items()}
    for (kind, path), count in (*step.watch.flops.items(), *saved.items()):
        for outer in _with_outer(None if path is None else scopes.of(path)):
            sums[kind, outer] += count
    found = dict.fromkeys((*parts, *(scope for (_, scope), count in sums.items() if count)))
    return tuple(
        ModuleCount(
            scope=scope,
            kind=", ".join(dict.fromkeys(type(part).__name__ for part in parts.get(scope, ()))),
            num_modules=len(parts.get(scope, ())),
            num_parameters=sum(_num_parameters(part) for part in parts.get(scope, ())),
            flops_by_phase={phase: sums[phase, scope] for phase in (FORWARD, BACKWARD, RECOMPUTED)},
            saved_activation_bytes=sums["saved", scope],
        )
        for scope in found
    )


def flops_of_ranks(module: torch.nn.Module, step: EagerStep, num_ranks: int) -> FlopLedger:
    """Return the FLOPs of all ranks, which are those of one times the ranks."""
    scopes = scopes_of(module, step)
    by_phase, by_module, model_by_module = Counter[str](), Counter[str](), Counter[str]()
    for (phase, path), count in step.watch.flops.items():
        scope = scopes.of(path)
        by_phase[phase] += num_ranks * count
        by_module[scope] += num_ranks * count
        if phase in (FORWARD, BACKWARD):
            model_by_module[scope] += num_ranks * count
    recomputed = by_phase.pop(RECOMPUTED, 0)
    by_line: dict[str, dict[str, int]] = {}
    for (line, name), count in step.watch.by_line.most_common():
        by_line.setdefault(line, {})[name] = num_ranks * count
    return FlopLedger(
        model=by_phase[FORWARD] + by_phase[BACKWARD],
        executed=by_phase.total() + recomputed,
        recomputed=recomputed,
        by_phase={phase: n for phase, n in {**by_phase, "recompute": recomputed}.items() if n},
        by_format={name: num_ranks * count for name, count in step.watch.by_format.most_common()},
        by_module=dict(by_module.most_common()),
        model_by_module=dict(model_by_module.most_common()),
        waste_by_module={},
        rule_6nd=None,
        by_line=by_line,
    )


def _with_outer(scope: str | None) -> list[str]:
    """Return a scope after its outer scopes: "a/b" -> "", "a", "a/b"; empty for None, outside all modules."""
    if scope is None:
        return []
    parts = scope.split("/") if scope else []
    return ["/".join(parts[:length]) for length in range(len(parts) + 1)]


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
