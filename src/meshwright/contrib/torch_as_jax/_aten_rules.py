"""Find the JAX function of an ATen operation.

A rule takes the operation's arguments in the order and by the names of its schema, without devices and memory
layouts, and formats as text. Its result has the shape that PyTorch's has; `GraphRunner` casts it to PyTorch's
format. A rule that handles a part of an operation raises NotImplementedError for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._array_rules import ARRAYS
from ._elementwise import ELEMENTWISE
from ._layers import LAYERS
from ._layers import Attention as Attention
from ._layers import plain_attention as plain_attention
from ._reductions import REDUCTIONS

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {**ELEMENTWISE, **ARRAYS, **REDUCTIONS, **LAYERS}


def has_rule(name: str, overload: str) -> bool:
    """Return whether an operation has a rule. `name`, `overload`: "aten::add", "Tensor"."""
    return f"{name}.{overload}" in RULES or name in RULES


def rule_of(name: str, overload: str) -> Rule:
    """Return the rule for an operation's overload, or for all its overloads."""
    return RULES.get(f"{name}.{overload}") or RULES[name]
