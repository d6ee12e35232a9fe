"""Rules of users for custom calls of their own: what a kernel that XLA cannot look into does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import InputError

Shape = tuple[str, tuple[int, ...]]  # element type as XLA names it ("bf16"), and dimensions on one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Multiply-adds of one kind in one instruction; `format` is that of the first operand.

    `recompute_flops`: the part of `flops` that repeats work of the forward pass.
    """

    kind: str  # matmul | convolution | attention
    flops: int
    format: str
    recompute_flops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A custom call as the compiled program has it, on one device; tuples are flattened."""

    target: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    backend_config: str


Rule = Callable[[Call], Work]
_RULES: dict[str, Rule] = {}


def register_call(target: str, rule: Rule) -> None:
    """Count the custom calls whose target begins with `target` by a rule of your own, from now on.

    It goes before the rules that are built in. The ledger's executed FLOPs are counted by it, and time
    predicted from them; the traced program's model FLOPs still list the call as unpriced.

    Args:
        target: the beginning of `custom_call_target`, as the ledger's `unpriced` names it.
        rule: from the call's shapes to its `Work` on one device.

    Raises:
        InputError: the target is empty, or `rule` is no function.
    """
    if not target:
        raise InputError("a rule for a custom call without a name", hint="name the beginning of its target")
    if not callable(rule):
        raise InputError(
            f"the rule for {target!r} is no function: {rule!r}", hint="give a function of a Call"
        )
    _RULES[target] = rule


def registered(target: str) -> Rule | None:
    """The user's rule for a target: that of the longest beginning."""
    found = [beginning for beginning in _RULES if target.startswith(beginning)]
    return _RULES[max(found, key=len)] if found else None
