"""Define the base of every section: strictness, types of fields, and several problems as one error.

The base of every kind of model stands here too: its counts, its sizes, its limits, which other packages ask
of a model before it is built.

The text below a key documents it: a summary, further remarks, and what follows `Effect:` (on what is weighed
or trained), `Unit:` (of every number) and `Default:` (if it is computed). `_key_texts` reads these texts.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

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


MOST_UNROLLED = 10_000
"""Layers that are written out one by one; more would fill the memory before the compiler sees them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that other packages read, whatever its kind.

    `input_shape`: that of one row or image; empty for one token. `num_token_ids`: 0 without tokens.
    `split_dims`: sizes by the named dimension that the axes of its rule split (`PARAMETER_RULES`), each with
    the key that sets it, or words where no key does. `layer_outputs`: numbers in the outputs of all layers
    but the last, per row, image or token; `layer_outputs_rule` says how they are counted.
    `widest_activation`: the most numbers in one activation per row, image or token, without attention's
    scores. `scores`: the number of attention scores per position of the sequence.
    """

    input_shape: tuple[int, ...]
    num_token_ids: int = 0
    split_dims: Mapping[str, Mapping[str, int]]
    layer_outputs: int
    layer_outputs_rule: str
    widest_activation: int
    scores: int = 0


class ModelKind(Section):
    """The base of every kind: what other packages ask of a model before it is built."""

    takes: ClassVar[Literal["rows", "images", "sequences"]]
    """The entries of a batch: rows of numbers, square images, or sequences of token ids."""
    has_blocks: ClassVar[bool] = False
    """True for a stack of blocks, whose saved activations `remat` and `offload` choose."""
    has_answer: ClassVar[bool] = True
    """False if the targets of synthetic rows do not follow from the inputs."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters, each counted once."""

    @property
    @abstractmethod
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply every row, token or position of an image."""

    @property
    @abstractmethod
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""

    @property
    def has_fp8_products(self) -> bool:
        """True if the layers' products can run in eight bits."""
        return False

    def length_problems(self, length: int) -> Iterator[Problem]:
        """Yield the problems with `batch.sequence_length`; paths start at the run."""
        yield from ()
