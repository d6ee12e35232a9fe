"""Define the base of every section: strictness, types of fields, and several problems as one error.

The text below a key documents it: a summary, further remarks, and what follows `Effect:` (on what is weighed
or trained), `Unit:` (of every number) and `Default:` (if it is computed). `_key_texts` reads these texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from meshwright.errors import InputError

PROBLEMS = "meshwright_problems"  # the type of the pydantic error that carries Meshwright's problems


class Section(BaseModel):
    """A frozen record; unknown keys and values of another type are errors."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", validate_default=True)


def is_table(value: object) -> TypeGuard[dict[str, Any]]:
    """Return whether `value` is a TOML or JSON table, whose keys are always text."""
    return isinstance(value, dict)


def none_word(value: object) -> object:
    """Return None for "none", by which a file or an override unsets an optional figure: TOML has no null."""
    return None if value == "none" else value


LARGEST = 2**31 - 1
"""The largest count or dimension: XLA and JAX index an array, and Optax counts steps, in 32 bits."""

Positive = Annotated[int, Field(ge=1, le=LARGEST)]
NotNegative = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastOne = Annotated[float, Field(ge=1, allow_inf_nan=False)]
NotNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]  # a probability or a decay that never reaches one
Share = Annotated[float, Field(ge=0, le=1)]
OptionalPositive = Annotated[
    Positive | None, BeforeValidator(none_word, json_schema_input_type=Positive | None | Literal["none"])
]
OptionalNotNegative = Annotated[
    NotNegative | None,
    BeforeValidator(none_word, json_schema_input_type=NotNegative | None | Literal["none"]),
]
OptionalPositiveFloat = Annotated[
    PositiveFloat | None,
    BeforeValidator(none_word, json_schema_input_type=PositiveFloat | None | Literal["none"]),
]

Problem = tuple[str, str, str]
"""Dotted path below the record that finds it ("" for itself), what is wrong, what to do."""


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise all of `problems` as one pydantic error, which the loader turns into an `InputError`."""
    if problems:
        text = "; ".join(f"{path} {what}".strip() for path, what, _ in problems)
        context: dict[str, Any] = {"text": text, "problems": list(problems)}
        raise PydanticCustomError(PROBLEMS, "{text}", context)


_TRIED = 2**16  # enough to find all divisors of any number that a config may hold


def near_divisors(number: int, wanted: int) -> list[int]:
    """Return the largest divisor of `number` that is at most `wanted`, and the smallest above it, if any.

    For a `number` above 2**32, divisors are found only if they or their cofactors are at most 2**16.

    >>> near_divisors(768, 5)
    [4, 6]
    """
    small = [d for d in range(1, min(math.isqrt(number), _TRIED) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d <= wanted]
    above = [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def near_multiples(step: int, wanted: int) -> list[int]:
    """Return the multiples of `step` on both sides of `wanted`, without zero.

    >>> near_multiples(3, 10)
    [9, 12]
    """
    below = wanted - wanted % step
    return [n for n in (below, below + step) if n]


def or_list(numbers: Iterable[int]) -> str:
    """Return numbers joined for a sentence: "4", "4 or 8"."""
    return " or ".join(str(n) for n in numbers)


def input_error(where: str, problems: Sequence[Problem]) -> InputError:
    """Return one error for all `problems` of `where`, the name of a preset or a file."""
    lines = [f"{path} {what}".strip() for path, what, _ in problems]
    if len(problems) == 1:
        return InputError(f"{where}: {lines[0]}", hint=problems[0][2])
    message = f"{where}: {len(problems)} things are wrong" + "".join(f"\n  {line}" for line in lines)
    hints = (f"{path}: {hint}" if path else hint for path, _, hint in problems)
    return InputError(message, hint="; ".join(hints))
