"""Define what is weighed: a training step that can be compiled or accounted for on a fleet.

Each kind of program is one class of `Program` in a file of its own. The verbs know no kind: they ask a
program for its weighing, or for the candidates of a plan.

Imports: `config`, `hardware`, `predict`, `results`. Used by: the kinds, and `api`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from meshwright.config import Overrides, override_texts
from meshwright.errors import InputError
from meshwright.hardware import Fleet, split_reserve
from meshwright.predict import checked_price, steps_for
from meshwright.results import Operated, Phase, Weighing, ignore
from meshwright.units import parse_count

if TYPE_CHECKING:
    from ._candidates import Candidates


OPTIONS = {"layout": "layout", "overrides": "overrides (--set)", "simulate": "simulate"}
"""Settings in words, for those who write Python and those who write commands."""


class RunFacts(TypedDict):
    """Facts that a caller gives of a program without a configuration: tokens of a step, steps of a run."""

    tokens_per_step: int | None
    num_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """Length of the whole run, and price of a device-hour.

    Args:
        tokens: of the whole run, 15e9 or "15B"; those of a configuration's `steps` if not given.
        tokens_per_step: tokens, or samples, in a step of a program that is no configuration: 524288 or "2M".
        price_per_device_hour: in your currency; the fleet's own if not given.
        operations: how the run is operated, for when it is finished; published figures if not given.

    >>> RunLength(tokens="1B", tokens_per_step=500_000).facts("steps.py:program")
    {'tokens_per_step': 500000, 'num_steps': 2000}
    """

    tokens: float | str | None = None
    tokens_per_step: float | str | None = None
    price_per_device_hour: float | str | None = None
    operations: Operated | None = None

    def operated(self, made: Weighing) -> Weighing:
        """Return a weighing that says when its run is finished, if its tokens or its operations are given."""
        if self.tokens is None and self.operations is None:
            return made
        from meshwright.registry import room  # with what it loads: most weighings ask for no day

        unknown: Callable[[], Operated] = room("finishing").Operations
        return dataclasses.replace(made, operations=self.operations or unknown())

    def priced(self, fleet: Fleet) -> Fleet:
        """Return a fleet with this price, if there is one.

        Raises:
            InputError: it is no price.
        """
        if self.price_per_device_hour is None:
            return fleet
        return dataclasses.replace(fleet, price_per_device_hour=checked_price(self.price_per_device_hour))

    def facts(self, name: str) -> RunFacts:
        """Return the tokens of a step and the number of steps of a program that is no configuration.

        Raises:
            InputError: `tokens_per_step` is no whole number above zero; or it is missing, and tokens or a
                price are given.
        """
        if self.tokens_per_step is not None:
            count = parse_count(str(self.tokens_per_step))
            if count < 1:
                raise InputError(f"{count} tokens per step", hint="write those of one step: 524288")
            steps = None if self.tokens is None else steps_for(self.tokens, count)
            return {"tokens_per_step": count, "num_steps": steps}
        for what, given in (("tokens", self.tokens), ("a price", self.price_per_device_hour)):
            if given is not None:
                raise InputError(
                    f"{name} is not a configuration, and the number of tokens in its step is not known: "
                    f"{what} of {given} cannot be turned into the cost of a run",
                    hint="state it: RunLength(tokens_per_step=524288), on the command line "
                    "--tokens-per-step 524288",
                )
        return {"tokens_per_step": None, "num_steps": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a weighing, as the caller of `weigh` gives them."""

    layout: str | None = None
    overrides: Overrides = ()
    run: RunLength = RunLength()
    simulate: bool = False
    on_event: Callable[[Phase], None] = ignore

    def refuse(self, what: str, *names: str, hint: str = "") -> None:
        """Raise if a setting is given that a kind of program does not have.

        Args:
            what: the kind, in words: "a script".
            names: of the settings that it lacks.

        Raises:
            InputError: one of them is given.
        """
        for name in names:
            if getattr(self, name) not in (None, (), {}, [], False):
                words = OPTIONS[name]
                raise InputError(f"{what} takes no {words}", hint=hint or f"leave {words} out")


def step_facts(run: RunLength, name: str) -> RunFacts:
    """Return the facts of a program that is planned: a price alone is allowed, for it prices a step.

    Raises:
        InputError: as `RunLength.facts`, for its tokens.

    >>> step_facts(RunLength(price_per_device_hour=2), "model.py:build")
    {'tokens_per_step': None, 'num_steps': None}
    """
    return dataclasses.replace(run, price_per_device_hour=None).facts(name)


class Program(ABC):
    """A training step that can be weighed.

    `is_command`: a shell runs it, with arguments of its own in place of a layout and settings.
    """

    is_command: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that results show."""

    @abstractmethod
    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Compile its step for a fleet, or account for it, and return the result.

        Raises:
            InputError: a setting is wrong, or means nothing for this kind of program.
            CompileError: the compiler failed; the error quotes its message.
        """

    def candidates(self, fleet: Fleet, search: Mapping[str, Sequence[str]], settings: Settings) -> Candidates:
        """Return what a plan can choose from on a fleet.

        Args:
            search: the values that a knob may have, by its name, as text.

        Raises:
            InputError: this kind of program is not planned, or nothing is legal.
        """
        raise InputError(
            f"{self.name} has no settings that a plan could choose",
            hint="weigh it in the layouts of your choice, and compare",
        )

    def check_same_step(self, sizes: Collection[int], overrides: Overrides) -> None:  # noqa: B027
        """Raise if the step is another one on fleets of these numbers of devices, and cannot be compared.

        Raises:
            InputError: it is, with the reason.
        """


def knobs_of(overrides: Overrides) -> dict[str, str]:
    """Return the arguments of a user's function, as text: {"remat": "full"} or ["remat=full"].

    Raises:
        InputError: a text has no "=", or an argument is given twice.
    """
    if isinstance(overrides, Mapping):
        return {name: str(value) for name, value in overrides.items()}
    knobs: dict[str, str] = {}
    for text in override_texts(overrides):
        name, equals, value = text.partition("=")
        if not equals or name.strip() in knobs:
            problem = "is given twice" if equals else "has no value"
            raise InputError(f"{name.strip()!r} {problem}", hint="write each knob once, as remat=full")
        knobs[name.strip()] = value.strip()
    return knobs


def name_of(step: Any) -> str:
    """Return the name of a function, of a module's class, or of a call that JAX has traced."""
    return getattr(step, "__qualname__", None) or getattr(step, "fun_name", None) or type(step).__name__


def run_length_of(run: RunLength | None) -> RunLength:
    """Return the length of a run, which says nothing if None is given.

    Raises:
        InputError: it is another object.
    """
    if run is not None and not isinstance(run, RunLength):
        what = f"run = {run!r} is no length of a run"
        raise InputError(what, hint='write run=mw.RunLength(tokens="15B")')
    return RunLength() if run is None else run


def fleet_of(on: str | Fleet | None) -> Fleet:
    """Return the fleet that a text names; "local" names the attached devices, perhaps with a reserve.

    Raises:
        InputError: no fleet is named, or it cannot be read.
    """
    if on is None:
        raise InputError("no fleet is named", hint='on="8xH100"; `meshwright fleets` lists chips')
    if isinstance(on, Fleet):
        return on
    named, reserve = split_reserve(on)
    if named != "local":
        return Fleet.parse(on)
    from meshwright.trainer.loop import local_fleet  # imports jax to query the attached devices

    return local_fleet().reserving(reserve) if reserve else local_fleet()
