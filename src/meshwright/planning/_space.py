"""Enumerate the layouts and settings that a run could have on a fleet, as columns of numbers.

A *candidate* is a layout (the size of each axis, and which axis lies innermost), the sequences of a
microbatch, and the settings of `RunConfig` that change the step's memory and time but not its result:
rematerialisation, ZeRO-1, offload, the pipeline's schedule, and the precision if asked for. The global batch
stays that of the run.

The rules of `check_layout` and of `RunConfig` are applied to whole columns here, because checking tens of
thousands of configurations one by one would take minutes. A test holds both to the same answers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.config import (
    ACTIVATION_RULES,
    AXES,
    AXIS_ALIASES,
    EXPERT_DIMS,
    NAMED_REMAT,
    OFFLOADED,
    PARAMETER_RULES,
    RESULTS,
    SEARCHED_REMAT,
    Layout,
    RunConfig,
    TransformerModel,
    block_policies,
    check_precision,
    resolve_batch,
    results_of,
    saved_results,
)
from meshwright.errors import InputError, nearest_name
from meshwright.hardware import Fleet
from meshwright.ledger import allowance, usable_bytes

from ._remat_values import NUM_NAMED, RematValues, joined, keeps, kinds

Column = NDArray[np.int64]

STAGE, DATA, FSDP, CONTEXT, EXPERT, TENSOR = range(len(AXES))
SETTINGS: Mapping[str, Sequence[str]] = {
    "remat": RematValues(),
    "zero1": ("false", "true"),
    "offload": tuple(OFFLOADED),
    "pipeline": ("1f1b", "gpipe"),
    "pipeline_chunks": tuple(str(count) for count in range(1, 33)),
    "precision": ("fp32", "bf16", "fp16", "fp8"),
}
"""The settings that a candidate has, and their values in the order of the columns' numbers."""
# Unless `fix` or `vary` names others. The list keeps attention and its products, and repeats the MLP.
# More policies would leave too many kinds of candidates to try: with six, and estimates that are off by 15 %
# for each kind, twenty compilations missed the best by 4 % on average, with these four by 1 %.
MICROBATCH, INNER = "microbatch", "inner"
KNOBS = (*AXES, MICROBATCH, *SETTINGS, INNER)
"""Everything that `fix` and `vary` may name."""
_OTHER_NAMES = {"batch.microbatch_sequences": MICROBATCH, "microbatch_sequences": MICROBATCH, **AXIS_ALIASES}
MOST_CANDIDATES = 4_000_000
SEARCHED_OFFLOAD = ("none", "optimizer", "activations", "both")  # parameters wait where nothing else fits
PARTS = ("moments", "parameters", "activations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates as columns of equal length.

    `sizes` [candidates, 6]: the sizes of `AXES`. `inner`: the place in `AXES` of the axis that lies
    innermost; the others keep their order. `microbatch`: sequences of one replica in one pass. `settings`:
    for each of `SETTINGS`, the place of its value.
    """

    sizes: Column
    inner: Column
    microbatch: Column
    settings: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, rows: Any) -> Candidates:
        """Return some of the candidates, chosen by a mask or by their numbers."""
        settings = {name: column[rows] for name, column in self.settings.items()}
        return Candidates(
            sizes=self.sizes[rows],
            inner=self.inner[rows],
            microbatch=self.microbatch[rows],
            settings=settings,
        )

    def size(self, axis: int) -> Column:
        """Return the sizes of one axis."""
        return self.sizes[:, axis]

    @property
    def num_replicas(self) -> Column:
        """Return data x fsdp x expert, over which the rows of the batch are split."""
        return self.sizes[:, DATA] * self.sizes[:, FSDP] * self.sizes[:, EXPERT]

    def strides(self) -> Column:
        """Return the devices between neighbours along each axis, [candidates, 6]."""
        strides = np.ones_like(self.sizes)
        for axis in range(len(AXES) - 2, -1, -1):
            strides[:, axis] = strides[:, axis + 1] * self.sizes[:, axis + 1]
        inner_size = np.take_along_axis(self.sizes, self.inner[:, None], axis=1)
        further_in = np.arange(len(AXES))[None, :] > self.inner[:, None]
        strides = np.where(further_in, strides * inner_size, strides)
        np.put_along_axis(strides, self.inner[:, None], 1, axis=1)
        return strides

    @property
    def chunks(self) -> Column:
        """Return the chunks of layers on each stage."""
        return self.settings["pipeline_chunks"] + 1

    def layout(self, row: int) -> Layout:
        """Return the layout of one candidate, without axes of size 1."""
        order = [axis for axis in range(len(AXES)) if axis != self.inner[row]] + [int(self.inner[row])]
        axes = tuple((AXES[axis], int(self.sizes[row, axis])) for axis in order if self.sizes[row, axis] > 1)
        return Layout(axes=axes or (("data", 1),))

    def overrides(self, row: int) -> dict[str, Any]:
        """Return the changes to a run that make it this candidate, as `load_config` takes them."""
        chosen: dict[str, Any] = {"layout": str(self.layout(row))}
        for name, column in self.settings.items():
            value = SETTINGS[name][int(column[row])]
            chosen[name] = value == "true" if name == "zero1" else value
        chosen["pipeline_chunks"] = int(self.chunks[row])
        chosen["batch.microbatch_sequences"] = int(self.microbatch[row])
        return chosen

    def words(self, row: int) -> str:
        """Return everything but the layout in words: "microbatch 1, remat full, zero1"."""
        words = settings_words(self.overrides(row))
        one_precision = len(np.unique(self.settings["precision"])) == 1
        return words if one_precision else f"{words}, {self.overrides(row)['precision']}"

    def properties(self) -> NDArray[np.float64]:
        """Return the features of the search's effects, [candidates, properties]: 1, then kinds of candidates.

        An axis counts by whether it is there and by the logarithm of its size.
        """
        sizes = self.sizes.astype(float)
        columns = [np.ones(len(self))]
        for axis in range(len(AXES)):
            columns += [(sizes[:, axis] > 1).astype(float), np.log2(sizes[:, axis]) / 4]
        for name, values in SETTINGS.items():
            if name == "pipeline_chunks":
                continue
            column = kinds(self.settings[name]) if name == "remat" else self.settings[name]
            num_kinds = NUM_NAMED + 1 if name == "remat" else len(values)
            columns += [(column == place).astype(float) for place in range(1, num_kinds)]
        columns += [np.log2(self.chunks.astype(float)) / 4]
        columns += [np.log2(self.microbatch.astype(float)) / 4]
        columns += [(self.inner != TENSOR).astype(float)]
        return np.stack(columns, axis=1)

    def families(self) -> Column:
        """Return a number for each candidate: the same for those with the same axes, policy and offload."""
        family = np.zeros(len(self), np.int64)
        for axis in (STAGE, CONTEXT, EXPERT, TENSOR):
            family = 2 * family + (self.sizes[:, axis] > 1)
        family = family * len(SETTINGS["remat"]) + self.settings["remat"]
        return family * len(SETTINGS["offload"]) + self.settings["offload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The legal candidates of a run on a fleet, and what was left out.

    `num_layouts`: ways to divide the devices over the axes. `illegal`: by rule, the layouts and settings that
    it removed; a layout counts once. `num_considered`: legal layouts with each of their settings, before any
    of them is compared.
    """

    candidates: Candidates
    num_layouts: int
    illegal: Mapping[str, int]

    @property
    def num_considered(self) -> int:
        """Number of legal candidates."""
        return len(self.candidates)

    def row_of(self, config: RunConfig, layout: Layout) -> int | None:
        """Return the candidate that a run on a resolved layout is; None if it is none of them."""
        found, batch = self.candidates, config.batch
        replicas = max(layout.num_replicas, 1)
        microbatch = batch.microbatch_sequences or batch.sequences // replicas
        same = (found.sizes == [layout.size(axis) for axis in AXES]).all(axis=1)
        same &= found.microbatch == microbatch
        if str(config.pipeline_chunks) not in SETTINGS["pipeline_chunks"]:
            return None
        for name, values in SETTINGS.items():
            same &= found.settings[name] == values.index(str(getattr(config, name)).lower())
        named = Layout(axes=tuple(axis for axis in layout.axes if axis[1] > 1) or (("data", 1),))
        rows = (int(row) for row in same.nonzero()[0])
        return next((row for row in rows if found.layout(row) == named), None)


def candidates_of(runs: Sequence[RunConfig]) -> Candidates:
    """Return runs as candidates, whether or not a plan would try them; each has a layout of its whole fleet.

    >>> from meshwright.config import load_config
    >>> changes = ["layout=fsdp=4,tensor=2", "batch.microbatch_sequences=2", "remat=full"]
    >>> candidates_of([load_config("llama3-8b", changes)]).words(0)
    'microbatch 2, remat full'
    """
    layouts = [Layout.parse(run.layout) for run in runs]
    micro = [
        run.batch.microbatch_sequences or run.batch.sequences // max(layout.num_replicas, 1)
        for run, layout in zip(runs, layouts, strict=True)
    ]
    inner = [
        AXES.index(layout.axes[-1][0])
        if [axis for axis, _ in layout.axes] != [axis for axis in AXES if layout.size(axis) > 1]
        else TENSOR
        for layout in layouts
    ]
    return Candidates(
        sizes=np.array([[layout.size(axis) for axis in AXES] for layout in layouts], np.int64),
        inner=np.array(inner, np.int64),
        microbatch=np.array(micro, np.int64),
        settings={
            name: np.array([values.index(str(getattr(run, name)).lower()) for run in runs], np.int64)
            for name, values in SETTINGS.items()
        },
    )


def settings_words(overrides: Mapping[str, Any]) -> str:
    """Return the settings of a candidate, from `Candidates.overrides`, in words.

    >>> settings_words({"layout": "fsdp=8", "batch.microbatch_sequences": 1, "remat": "full", "zero1": False,
    ...                 "offload": "none", "pipeline": "1f1b"})
    'microbatch 1, remat full'
    """
    words = [f"microbatch {overrides['batch.microbatch_sequences']}", f"remat {overrides['remat']}"]
    words += ["zero1"] if overrides["zero1"] else []
    words += [f"offload {overrides['offload']}"] if overrides["offload"] != "none" else []
    if "stage=" in overrides["layout"]:
        chunks = overrides.get("pipeline_chunks", 1)
        words += [overrides["pipeline"]] + ([f"{chunks} chunks"] if chunks > 1 else [])
    words += ["layers unrolled"] if overrides.get("layer_loop") == "unroll" else []
    return ", ".join(words)


def space_of(config: RunConfig, fleet: Fleet, fix: Mapping[str, Sequence[str]] | None = None) -> Space:
    """Return the legal candidates of a resolved run on a fleet.

    Args:
        config: with `batch.sequences` set; what is not a knob stays as it is here.
        fix: values that a knob may have, from `parsed_knobs`; a knob that is not named has all its values,
            but for `precision`, which is the run's own, and `remat`, which is one of `SEARCHED_REMAT` or
            the run's own.

    Raises:
        InputError: there are more than four million candidates.

    >>> from meshwright.config import load_config
    >>> space = space_of(load_config("llama3-8b"), Fleet.parse("8xH100"))
    >>> space.num_layouts, space.num_considered > 100
    (56, True)
    """
    allowed = dict(fix or {})
    layouts = _layouts(fleet.num_devices, allowed)
    illegal: dict[str, int] = {}
    legal = np.ones(len(layouts), bool)
    for rule, mask in _layout_rules(config, layouts).items():
        if removed := int((legal & ~mask).sum()):
            illegal[rule] = removed
        legal &= mask
    candidates = _with_settings(config, fleet, layouts[legal], allowed)
    keep = np.ones(len(candidates), bool)
    for rule, mask in _setting_rules(config, fleet, candidates).items():
        if removed := int((keep & ~mask).sum()):
            illegal[rule] = removed
        keep &= mask
    return Space(candidates=candidates[keep], num_layouts=len(layouts), illegal=illegal)


def parsed_knobs(given: Sequence[str] | Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the values by knob of `fix` and `vary`: "tensor=1,2,4", or {"tensor": [1, 2, 4]}.

    Raises:
        InputError: an unknown knob or value, or a size that is no positive number.

    >>> parsed_knobs(["tp=1,2", "remat=full"])
    {'tensor': ('1', '2'), 'remat': ('full',)}
    """
    knobs: dict[str, tuple[str, ...]] = {}
    for name, values in values_by_knob(given).items():
        knob = name if name in KNOBS else _OTHER_NAMES.get(name, name)
        if knob not in KNOBS:
            raise InputError(
                f"{name!r} is nothing that the planner chooses",
                hint=f"{nearest_name(name, KNOBS)}; other keys of the run: --set {name}=...",
            )
        words = tuple(value.lower() if knob == "zero1" else value for value in values)
        if knob in knobs:
            raise InputError(f"{knob} is given twice", hint=f"write all its values once: {knob}=1,2")
        knobs[knob] = _checked_values(knob, words)
    return knobs


def knobs_of_run(
    config: RunConfig, fleet: Fleet, named: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the value of each knob that a run has on a fleet, without those in `named`.

    If an axis is named, the axis of size -1 in the run's layout, or else its largest, stays free, so that the
    sizes can still multiply to the devices. The microbatch stays free if the run states none and the number
    of its replicas is not known.

    Raises:
        InputError: the run's layout does not cover the fleet.

    >>> from meshwright.config import load_config
    >>> run, fleet = load_config("llama3-8b", ["layout=fsdp=-1,tensor=2"]), Fleet.parse("8xH100")
    >>> knobs = knobs_of_run(run, fleet, {"microbatch": ("1", "2")})
    >>> knobs["fsdp"], knobs["tensor"], knobs["remat"], "microbatch" in knobs
    (('4',), ('2',), ('dots-attention',), False)
    """
    layout = Layout.parse(config.layout).resolve(fleet.num_devices)
    sizes = {axis: layout.size(axis) for axis in AXES}
    axes_move = any(axis in named for axis in AXES)
    if axes_move:
        open_axes = [axis for axis in AXES if f"{axis}=-1" in config.layout and axis not in named]
        largest = max((axis for axis in AXES if axis not in named), key=lambda axis: sizes[axis])
        del sizes[open_axes[0] if open_axes else largest]
    knobs = {axis: (str(size),) for axis, size in sizes.items()}
    last = layout.axes[-1][0]
    is_usual = [axis for axis, _ in layout.axes] == [axis for axis in AXES if layout.size(axis) > 1]
    knobs[INNER] = ("tensor" if is_usual else last,)
    for name in SETTINGS:
        value = getattr(config, name)
        knobs[name] = (str(value).lower() if name == "zero1" else str(value),)
    batch = (config if axes_move else resolve_batch(config, layout)).batch
    if batch.microbatch_sequences is not None:
        knobs[MICROBATCH] = (str(batch.microbatch_sequences),)
    elif not axes_move:
        knobs[MICROBATCH] = (str(config.batch.sequences // layout.num_replicas),)
    return {name: values for name, values in knobs.items() if name not in named}


def values_by_knob(given: Sequence[str] | Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the values of `fix` or `vary` as text, by the name that was given.

    Raises:
        InputError: a text is not of the form name=value, or a name is given twice.

    >>> values_by_knob({"remat": [True, False]})
    {'remat': ('True', 'False')}
    """
    if isinstance(given, Mapping):
        lists = {name: value if isinstance(value, list | tuple) else [value] for name, value in given.items()}
        return {name: tuple(str(value) for value in values) for name, values in lists.items()}
    knobs: dict[str, tuple[str, ...]] = {}
    for text in [given] if isinstance(given, str) else given:
        name, values = _split(text)
        if name in knobs:
            raise InputError(f"{name} is given twice", hint=f"write all its values once: {name}=1,2")
        knobs[name] = tuple(value.strip() for value in values)
    return knobs


def _split(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise InputError(f"cannot read {text!r}", hint="write it as tensor=8, or with commas: tensor=1,2,4,8")
    several = values.split(",")
    return name.strip(), joined(several) if name.strip() == "remat" else several


def _checked_values(knob: str, values: tuple[str, ...]) -> tuple[str, ...]:
    known = SETTINGS.get(knob, AXES if knob == INNER else ())
    for value in values:
        if known and value not in known:
            unknown = [name for name in saved_results(value) or () if name not in RESULTS]
            if knob == "remat" and unknown:
                what = f"{knob} = {value!r}: no result is called {unknown[0]!r}"
                raise InputError(what, hint=nearest_name(unknown[0], RESULTS))
            raise InputError(f"{knob} = {value!r} is not known", hint=nearest_name(value, known))
        if not known and not (value.isascii() and value.isdigit() and 0 < int(value[:15]) < 10**12):
            raise InputError(f"{knob} = {value!r} is not a positive number", hint=f"use {knob}=1 or more")
    return tuple(dict.fromkeys(values))


def _layouts(num_devices: int, allowed: Mapping[str, Sequence[str]]) -> Column:
    """Return all ways to write `num_devices` as a product over the axes, [layouts, 6]."""
    rows: list[list[int]] = [[]]
    for axis in AXES[:-1]:
        rows = [
            [*row, size]
            for row in rows
            for size in _divisors(num_devices // math.prod(row))
            if axis not in allowed or str(size) in allowed[axis]
        ]
    complete = [[*row, num_devices // math.prod(row)] for row in rows]
    kept = [row for row in complete if "tensor" not in allowed or str(row[-1]) in allowed["tensor"]]
    return np.array(kept, np.int64).reshape(-1, len(AXES))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _layout_rules(config: RunConfig, sizes: Column) -> dict[str, NDArray[np.bool_]]:
    """Return for each rule of `check_layout` that looks at sizes alone, which layouts keep it."""
    model, batch = config.model, config.batch
    dims = dict(model.sizes.split_dims)
    length, takes_sequences = batch.sequence_length, model.takes == "sequences"
    if takes_sequences:
        dims["residual_sequence"] = {"batch.sequence_length": length}
    stage, context, tensor = (sizes[:, axis] for axis in (STAGE, CONTEXT, TENSOR))
    replicas = sizes[:, DATA] * sizes[:, FSDP] * sizes[:, EXPERT]
    of_experts = sizes[:, experts_spread(config, sizes)[0]].prod(axis=1)
    unrolled = isinstance(model, TransformerModel) and model.unroll
    rules = {
        "stage needs stacked layers": (stage == 1) | (not unrolled),
        "context splits nothing of the model": (context == 1) | takes_sequences,
        "the batch does not divide": batch.sequences % replicas == 0,
        "expert_domains does not divide the devices": of_experts % (config.expert_domains or 1) == 0,
    }
    both = {**ACTIVATION_RULES, **PARAMETER_RULES}
    layers, kv_heads = dims.pop("layers", None), dims.pop("kv_heads", {})
    vocabulary = dims.pop("vocab", {})
    if layers is None:
        rules["stage splits nothing of the model"] = stage == 1
    else:
        rules["stage is more than the model's layers"] = stage <= min(layers.values())
    for axis, place in (("expert", EXPERT), ("tensor", TENSOR), ("fsdp", FSDP)):
        its = [dim for dim in dims if axis in both[dim] and ("fsdp" in both[dim]) == (axis == "fsdp")]
        split = [size for dim in its for size in dims[dim].values()]
        ways = sizes[:, place] * (sizes[:, EXPERT] if axis == "fsdp" else 1)
        if axis == "expert":
            ways = of_experts
        divides = _all_divisible(split, ways)
        if axis == "tensor":
            divides &= _divide_or_repeat(kv_heads.values(), tensor)
        rules[f"{axis} does not divide the model's sizes"] = divides
        if not split:
            rules[f"{axis} splits nothing of the model"] = sizes[:, place] == 1
    for rows in vocabulary.values():
        by_columns = _all_divisible(dims["embed"].values(), sizes[:, FSDP] * sizes[:, EXPERT] * tensor)
        rules["fsdp and tensor divide no side of the tables"] = (rows % (stage * tensor) == 0) | by_columns
    if takes_sequences:
        pieces = context * np.lcm(2, tensor)
        rules["context does not divide the sequence"] = (context == 1) | (length % pieces == 0)
    if isinstance(model, TransformerModel) and model.latent_rank is not None:
        rules["attention over context lacks the model's"] = context == 1
    return rules


def experts_spread(config: RunConfig, sizes: Column) -> tuple[list[int], NDArray[np.float64]]:
    """Return the axes that spread whole experts, and the devices along them by layout, without `tensor`."""
    axes = [AXES.index(axis) for axis in EXPERT_DIMS[config.fold_experts][1]]
    others = [axis for axis in axes if axis != TENSOR]
    return axes, sizes[:, others].prod(axis=1).astype(float)


def _all_divisible(split: Iterable[int], ways: Column) -> NDArray[np.bool_]:
    mask = np.ones(len(ways), bool)
    for size in split:
        mask &= size % ways == 0
    return mask


def _divide_or_repeat(kv_heads: Iterable[int], tensor: Column) -> NDArray[np.bool_]:
    """Return which sizes of `tensor` divide the key-value heads, or are a multiple of them."""
    mask = np.ones(len(tensor), bool)
    for size in kv_heads:
        mask &= (size % tensor == 0) | (tensor % size == 0)
    return mask


def _with_settings(
    config: RunConfig, fleet: Fleet, layouts: Column, allowed: Mapping[str, Sequence[str]]
) -> Candidates:
    """Return each layout with each of its settings, without those that make the same program twice."""
    choices: dict[str, list[int]] = {}
    usual = {"precision": (config.precision,), "remat": dict.fromkeys((*SEARCHED_REMAT, config.remat))}
    usual["offload"] = dict.fromkeys((*SEARCHED_OFFLOAD, config.offload))
    for name, values in SETTINGS.items():
        chosen = allowed.get(name, usual.get(name, values))
        choices[name] = [values.index(value) for value in chosen]
    inners = [AXES.index(name) for name in allowed.get(INNER, AXES)]
    micro = [n for n in _divisors(config.batch.sequences) if str(n) in allowed.get(MICROBATCH, (str(n),))]
    kept = {name: len(values) for name, values in choices.items()}
    if kept["pipeline_chunks"] == len(SETTINGS["pipeline_chunks"]):
        kept["pipeline_chunks"] = 2  # one and the most
    counts = [len(layouts), len(inners), len(micro), *kept.values()]
    if math.prod(counts[1:]) * len(layouts) > 50 * MOST_CANDIDATES:
        raise _too_many(math.prod(counts))
    columns = [np.arange(len(layouts)), np.array(inners, np.int64), np.array(micro, np.int64)]
    # The two that depend on the layout alone come first, so that most of the product is never made.
    grid = [grown.ravel() for grown in np.meshgrid(*columns, indexing="ij")]
    sizes = layouts[grid[0]]
    candidates = Candidates(sizes=sizes, inner=grid[1], microbatch=grid[2], settings={})
    whole = config.batch.sequences % (candidates.num_replicas * grid[2]) == 0
    candidates = candidates[whole & _orders_that_differ(candidates, fleet, TENSOR in inners)]
    if len(candidates) * math.prod(counts[3:]) > MOST_CANDIDATES * 4:
        raise _too_many(len(candidates) * math.prod(counts[3:]))
    for name, values in choices.items():
        if name == "pipeline_chunks":
            candidates = _with_chunks(config, candidates, values)
            continue
        candidates = _times(candidates, name, np.array(values, np.int64))
        candidates = candidates[_has_an_effect(candidates, name, values)]
    if len(candidates) > MOST_CANDIDATES:
        raise _too_many(len(candidates))
    return candidates


def _too_many(count: int) -> InputError:
    return InputError(
        f"about {count:,} candidates are more than the planner compares ({MOST_CANDIDATES:,})",
        hint="restrict it: --fix context=1 --fix offload=none --fix inner=tensor",
    )


def _times(candidates: Candidates, name: str, values: Column) -> Candidates:
    """Return each candidate with each value of one more setting."""
    count = len(candidates)
    grown = candidates[np.repeat(np.arange(count), len(values))]
    return dataclasses.replace(grown, settings={**grown.settings, name: np.tile(values, count)})


def _orders_that_differ(candidates: Candidates, fleet: Fleet, has_default: bool) -> NDArray[np.bool_]:
    """Return which orders place some axis otherwise on the hosts than the default order does.

    With one fast domain every order has the same links. Moving an axis of size 1, or one that already lies
    innermost, changes nothing.
    """
    default = candidates.inner == TENSOR
    if not has_default:
        return np.ones(len(candidates), bool)
    if fleet.chips_per_domain >= fleet.num_devices:
        return default
    rows = np.arange(len(candidates))
    moved_size = candidates.sizes[rows, candidates.inner]
    place = np.arange(len(AXES))[None, :]
    inside = np.where(place > candidates.inner[:, None], candidates.sizes, 1).prod(axis=1)
    return default | ((moved_size > 1) & (inside > 1))


def _has_an_effect(candidates: Candidates, name: str, values: Sequence[int]) -> NDArray[np.bool_]:
    """Mark the candidates to keep: one whose program a setting does not change has its first value alone."""
    first = candidates.settings[name] == values[0]
    if name == "zero1":
        return first | (candidates.size(DATA) * candidates.size(CONTEXT) * candidates.size(EXPERT) > 1)
    if name == "pipeline":  # gpipe keeps more than 1f1b and is as fast: only if somebody asks for it
        return first | ((candidates.size(STAGE) > 1) & (len(values) < len(SETTINGS[name])))
    return np.ones(len(candidates), bool)


def _with_chunks(config: RunConfig, candidates: Candidates, values: Sequence[int]) -> Candidates:
    """Return each candidate with each legal number of chunks; if nobody chose any, with one and the most.

    More chunks make the bubble and the saved activations smaller, and more messages.
    """
    stage, groups = candidates.size(STAGE), groups_of_stage(config, candidates.size(STAGE))
    microbatches = config.batch.sequences // (candidates.num_replicas * candidates.microbatch)
    several = (stage > 1) & (microbatches % stage == 0)
    legal = np.stack([(place == 0) | (several & (groups % (place + 1) == 0)) for place in values])
    if len(values) == len(SETTINGS["pipeline_chunks"]):
        most = len(values) - 1 - np.argmax(legal[::-1], axis=0)
        legal[1:] &= most == np.arange(1, len(values))[:, None]
    else:  # without stages all are the same
        legal[0] |= stage == 1
    places, rows = legal.nonzero()
    chosen = candidates[rows]
    settings = {**chosen.settings, "pipeline_chunks": np.array(values, np.int64)[places]}
    return dataclasses.replace(chosen, settings=settings)


def groups_of_stage(config: RunConfig, stage: Column) -> Column:
    """Return the groups of layers on the fullest stage, for each number of stages."""
    model = config.model
    size = model.num_stacked_layers // len(model.period) if isinstance(model, TransformerModel) else 1
    return -(-size // stage)


def _setting_rules(config: RunConfig, fleet: Fleet, candidates: Candidates) -> dict[str, NDArray[np.bool_]]:
    """Return for each rule about settings, which candidates keep it."""
    model = config.model
    remat, offload = candidates.settings["remat"], candidates.settings["offload"]
    moments, parameters, activations = (waits(offload, part) for part in PARTS)
    full, zero1 = remat == SETTINGS["remat"].index("full"), candidates.settings["zero1"] == 1
    has_moments = bool(config.optimizer.moments())
    split = [
        size for dim, by_key in model.sizes.split_dims.items() if "fsdp" in PARAMETER_RULES[dim]
        for size in by_key.values()
    ]  # fmt: skip
    tensor, context = candidates.size(TENSOR), candidates.size(CONTEXT)
    sharing = candidates.num_replicas * context  # the state under ZeRO-1
    widths = model.sizes.split_dims.get("embed", {}).values()
    in_rows = candidates.size(STAGE) * tensor
    by_columns = ~_all_divisible(model.sizes.split_dims.get("vocab", {}).values(), in_rows)
    lacking = [
        place for place, name in enumerate(SETTINGS["precision"]) if not _has_units(config, fleet, name)
    ]
    fp8 = candidates.settings["precision"] == SETTINGS["precision"].index("fp8")
    return {
        "remat needs blocks": (remat == 0) | model.has_blocks,
        "remat names results that the model's blocks do not make": ~keeps(
            remat, *(set(RESULTS) - set(results_of(model) if isinstance(model, TransformerModel) else ()))
        ),
        "remat has no whole groups of blocks on a stage": _has_whole_groups(config, candidates),
        "offload of activations needs remat = full and one stage": ~activations
        | (full & model.has_blocks & (candidates.size(STAGE) == 1)),
        "offload of moments needs moments": ~moments | has_moments,
        "offload of parameters needs a loop over layers, one stage, no zero1 and no adapters": ~parameters
        | (keeps_layers(config) & (candidates.size(STAGE) == 1) & ~zero1),
        "a CPU's memory is its host's": (offload == 0) | (fleet.chip.platform != "cpu"),
        "zero1 does not divide the model's sizes": ~zero1
        | (_all_divisible(split, sharing) & (~by_columns | _all_divisible(widths, sharing * tensor))),
        "adapters have one stage and no zero1": (config.lora.rank is None)
        | ((candidates.size(STAGE) == 1) & ~zero1),
        "sums of gradients in bf16 need products in bf16 or fp8": (config.gradient_sum != "bf16")
        | (candidates.settings["precision"] == SETTINGS["precision"].index("bf16"))
        | fp8,
        "sums of gradients all in fp32 need fsdp or stages in place of zero1": ~zero1
        | (candidates.size(STAGE) > 1)
        | (config.gradient_sum != "all-fp32")
        | (candidates.settings["precision"] == SETTINGS["precision"].index("fp32")),
        "fp8 needs products in eight bits": ~fp8 | model.has_fp8_products,
        "the chip has no units for the precision": ~np.isin(candidates.settings["precision"], lacking),
    }


def waits(offload: Column, part: str) -> NDArray[np.bool_]:
    """Return which candidates keep a part of the run in the hosts' memory."""
    return np.isin(offload, [i for i, name in enumerate(SETTINGS["offload"]) if part in OFFLOADED[name]])


def keeps_layers(config: RunConfig) -> bool:
    """Return whether a run's layers could wait in the hosts' memory, in some layout."""
    return config.model.has_blocks and not getattr(config.model, "unroll", False) and config.lora.rank is None


def _has_whole_groups(config: RunConfig, candidates: Candidates) -> NDArray[np.bool_]:
    """Return which candidates have one stage, or whole groups of `remat`'s blocks in each chunk of layers."""
    model, stage = config.model, candidates.size(STAGE)
    if not isinstance(model, TransformerModel):
        return np.ones(len(candidates), bool)
    sizes = np.array([*(len(block_policies(name)) for name in NAMED_REMAT), 1])
    kind = kinds(candidates.settings["remat"])
    groups = np.lcm(len(model.period), sizes)[kind]
    held = groups_of_stage(config, stage) // candidates.chunks * len(model.period)
    alike = sizes[kind] == 1
    padded = bool(model.layer_pattern) & (model.num_stacked_layers // len(model.period) % stage != 0)
    whole = alike | ((held % groups == 0) & (model.num_stacked_layers % groups == 0))
    return (stage == 1) | (whole & ~padded)


def _has_units(config: RunConfig, fleet: Fleet, precision: str) -> bool:
    try:
        check_precision(config.model_copy(update={"precision": precision}), fleet.chip)
    except InputError:
        return False
    return True


def room_of(fleet: Fleet, candidates: Candidates) -> NDArray[np.float64]:
    """Return the bytes that each candidate's program may reserve, by the axes that need a communicator.

    They are infinite where nothing is known of the fleet's memory.
    """
    usable = usable_bytes(fleet)
    if usable is None:
        return np.full(len(candidates), np.inf)
    kinds = np.concatenate([candidates.sizes > 1, candidates.inner[:, None]], axis=1)
    _, first, places = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
    by_kind = [sum(allowance(fleet, candidates.layout(int(row)).axes).values()) for row in first]
    return usable - np.array(by_kind, float)[places.ravel()]
