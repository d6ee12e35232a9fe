"""Read and write how a Hugging Face `config.json` states rotary positions.

Releases of `transformers` differ: `rope_theta` and `rope_scaling` beside the sizes (4), or both in
`rope_parameters` (5), which may have a table for each kind of layer. A value in the table comes first.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from meshwright.config import TransformerModel, is_table
from meshwright.errors import InputError

from ._families import FAMILIES

Tree = Mapping[str, Any]

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # kinds of layers
OWN_MODULE = (
    "weigh the module that transformers makes of the file: meshwright weigh FOLDER --as torch --on FLEET"
)
LENGTH, GROWTH = "original_max_position_embeddings", "llama_4_scaling_beta"
STRETCHING = {
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_factor",
        "high_freq_factor": "rope_high_factor",
        LENGTH: "rope_original_positions",
    },
    "linear": {"factor": "rope_factor"},
    "yarn": {
        "factor": "rope_factor",
        "beta_slow": "rope_low_factor",
        "beta_fast": "rope_high_factor",
        "attention_factor": "rope_gain",
        "truncate": "rope_rounded",
        LENGTH: "rope_original_positions",
    },
    "longrope": {
        "short_factor": "rope_short_factors",
        "long_factor": "rope_long_factors",
        "attention_factor": "rope_gain",
        LENGTH: "rope_original_positions",
    },
}
DYNAMIC = "dynamic"
"""The kind of stretching that begins beyond `max_position_embeddings`: shorter sequences have none."""
_KEYS = {
    *("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "n_positions"),
    *("rotary_emb_base", "partial_rotary_factor", LENGTH),
}


MOST_LISTED = 40  # keys of a file in an error


class NotUnderstood(InputError):
    """The error for a model whose family or keys have no counterpart in our configuration.

    `keys`: those of the file; none if its family is not known.
    """

    def __init__(self, message: str, *, hint: str, keys: tuple[str, ...] = ()) -> None:
        self.keys = keys
        super().__init__(message, hint=hint)


def not_understood(where: str, keys: Mapping[str, Any]) -> NotUnderstood:
    """Return the error for keys whose values cannot be expressed in our configuration."""
    return NotUnderstood(
        f"{where}: not understood, and it may change the model: {listed_keys(keys)}",
        hint=f"remove what you know to have no effect, or {OWN_MODULE}",
        keys=tuple(keys),
    )


def listed_keys(keys: Mapping[str, Any]) -> str:
    """Return keys with their values, and of very many the number of the rest."""
    listed = [f"{key} = {shortened(value)}" for key, value in itertools.islice(keys.items(), MOST_LISTED)]
    return ", ".join(listed) + f" and {len(keys) - MOST_LISTED:,} more" * (len(keys) > MOST_LISTED)


def shortened(value: object) -> str:
    """Return a value as JSON, without the middle of a long one."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:120]} ... {text[-40:]}"


OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys that divide a head's turns among a picture's axes: a token of text has one position on all of them."""
NOT_READ = ("finetuned",)  # of the first files with YaRN


def read_rotary(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the base of the rotary wavelengths and how they are stretched, into `model`."""
    unread -= {*_KEYS, FAMILIES[given["model_type"]].turned_width}
    if model["position"] != "rotary":
        return
    family = FAMILIES[given["model_type"]]
    name = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    whole = _of_all_positions(name, _table(name, given.get(name) or {}, where), model, where)
    passed = (*OF_IMAGES, *NOT_READ)
    scaling = {key: value for key, value in whole.items() if value is not None and key not in passed}
    base = given.get("rope_theta", given.get("rotary_emb_base", 10_000.0))
    model["rope_theta"] = float(scaling.pop("rope_theta", base))
    _read_share(given, scaling, model, where)
    if family.rope_growth:
        model["position_growth"] = float(scaling.pop(GROWTH, 0))
        scaling.pop("max_position_embeddings", None)  # the file's own limit once more
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    kind = "default" if kind == "mrope" else family.rope_types.get(kind, kind)
    if kind == "proportional" and scaling.get("factor") == 1:
        del scaling["factor"]
    if kind in ("default", "proportional") and not scaling:
        model |= {} if kind == "default" else {"rope_stretching": kind}
        return
    if family.rope_alpha and kind == DYNAMIC and (alpha := scaling.get("alpha")):
        width = _head_width(model)  # the other keys have no effect then
        model["rope_theta"] *= float(alpha) ** (width / (width - 2))
        return
    if kind == DYNAMIC and not set(scaling) - {"factor", LENGTH}:
        return
    shown = {name: {"rope_type": kind, **scaling}}
    if kind not in STRETCHING:
        raise not_understood(where, shown)
    stretched = _stretched(kind, scaling, given)
    if stretched is None:
        raise not_understood(where, shown)
    if kind == "yarn" and family.rope_magnitude:
        model["rope_magnitude"] = float(scaling.get("mscale_all_dim", 0))
    model["rope_stretching"] = kind
    model |= {ours: stretched[theirs] for theirs, ours in STRETCHING[kind].items()}


def stretching_of(tree: Tree) -> str | None:
    """Return the kind of stretching that a file names; None if it names none, or several."""
    table = tree.get("rope_scaling") or tree.get("rope_parameters")
    return (table.get("rope_type") or table.get("type")) if is_table(table) else None


def has_alpha(tree: Tree) -> bool:
    """Return whether a file multiplies the base of its positions by an `alpha`, at any length (Hunyuan)."""
    table = tree.get("rope_scaling") or tree.get("rope_parameters")
    return is_table(table) and bool(table.get("alpha"))


def _table(name: str, given: Any, where: str) -> dict[str, Any]:
    """Return a table of a file, in which only the kind of stretching is a text."""
    if not is_table(given):
        hint = f'write {name} as a table, such as {{"rope_type": "linear", "factor": 2.0}}, or null'
        raise InputError(f"{where}: {name} = {shortened(given)} is no table", hint=hint)
    table = dict(given)
    for key, value in table.items():
        if isinstance(value, str) and key not in ("rope_type", "type"):
            what = f"{where}: {name}.{key} = {shortened(value)} is text"
            raise InputError(what, hint="correct the file; numbers are not in quotes")
    return table


def _of_all_positions(name: str, whole: Tree, model: dict[str, Any], where: str) -> Tree:
    """Return the table of the layers that see all positions; read the base of those with a window."""
    has_two_bases = "rope_local_theta" in model
    if GLOBAL not in whole and LOCAL not in whole:
        if has_two_bases and name == "rope_parameters" and whole:
            raise not_understood(where, {name: whole})  # which transformers passes over
        return whole
    local = dict(whole.get(LOCAL) or {})
    theta = local.pop("rope_theta", model.get("rope_local_theta"))
    if not has_two_bases or local not in ({}, {"rope_type": "default"}):
        raise not_understood(where, {name: whole})
    model["rope_local_theta"] = float(theta)
    return dict(whole.get(GLOBAL) or {})


def _read_share(given: Tree, scaling: dict[str, Any], model: dict[str, Any], where: str) -> None:
    """Read the share of each head that positions turn: an even number, in the families that have one."""
    key, family = "partial_rotary_factor", FAMILIES[given["model_type"]]
    beside = None if "rotary_share" in family.keys else given.get(key)
    width = _head_width(model)
    if family.turned_width is not None and family.turned_width in given:
        beside = given[family.turned_width] / width if beside is None else beside
    share = scaling.pop(key, model.get("rotary_share", beside))
    if share is None:
        return
    if not family.partly_turned and share != 1:
        raise not_understood(where, {key: share})
    turned = int(width * share)
    if share != 1 and (turned < 2 or turned % 2):
        raise InputError(
            f"{where}: {key} = {share} of a head of {width} numbers turns {turned}, and positions turn pairs",
            hint=f"use a {key} that gives an even number",
        )
    model["rotary_share"] = share


def _head_width(model: Tree) -> int:
    """Return the width of a head of a model that is being read."""
    return model.get("head_dim") or model.get("embed_dim", 0) // (model.get("num_heads") or 1)


def _stretched(kind: str, scaling: Tree, given: Tree) -> dict[str, Any] | None:
    """Return the values of a kind of stretching, with those that are left out; None if it has others."""
    found = dict(scaling)
    if LENGTH in STRETCHING[kind]:
        length = given.get(LENGTH, found.get(LENGTH, given.get("max_position_embeddings")))
        found |= {} if length is None else {LENGTH: length}
    if kind == "yarn":
        for key, default in (("beta_slow", 1.0), ("beta_fast", 32.0)):
            found[key] = found.get(key) or default
        found["truncate"] = found.get("truncate", True)
    if kind in ("yarn", "longrope"):
        growth = found.pop("mscale", None), found.pop("mscale_all_dim", None)
        gain = _gain_of_yarn if kind == "yarn" else _gain_of_longrope
        factor = found.get("factor", given.get("max_position_embeddings", 0) / (found.get(LENGTH) or 1))
        found.setdefault("attention_factor", gain(float(factor), growth, found.get(LENGTH)))
        if kind == "longrope":
            found.pop("factor", None)
            lists = ("short_factor", "long_factor")
            found |= {key: tuple(float(each) for each in found[key]) for key in lists if key in found}
    return found if set(found) == set(STRETCHING[kind]) else None


def _gain_of_yarn(factor: float, growth: tuple[Any, Any], length: int | None) -> float:
    """Return what multiplies sines and cosines if the file does not say it: 1 + 0.1 ln(factor)."""

    def gain(growth: float) -> float:
        return 1.0 if factor <= 1 else 1 + 0.1 * growth * math.log(factor)

    shown, all_dim = growth
    return gain(shown) / gain(all_dim) if shown and all_dim else gain(1)


def _gain_of_longrope(factor: float, growth: tuple[Any, Any], length: int | None) -> float:
    """Return what multiplies sines and cosines: sqrt(1 + ln(factor) / ln(original length))."""
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 and length else 1.0


def rotary_json(model: TransformerModel) -> dict[str, Any]:
    """Return the keys of a file that state a model's rotary positions, as transformers 5 writes them."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    beside: dict[str, Any] = {}
    if model.is_stretched:
        keys = STRETCHING[model.rope_stretching]
        rope |= {"rope_type": model.rope_stretching}
        rope |= {theirs: getattr(model, ours) for theirs, ours in keys.items()}
        if model.rope_rounded:  # which is usual
            rope.pop("truncate", None)
        if model.rope_magnitude:  # DeepSeek's, which needs both
            rope |= {"mscale": model.rope_magnitude, "mscale_all_dim": model.rope_magnitude}
        if model.position_growth:
            rope[GROWTH] = model.position_growth
        if model.rope_original_positions is not None:
            beside = {LENGTH: model.rope_original_positions}  # where Phi-3 looks first
    if model.rope_stretching == "proportional":
        rope |= {"rope_type": "proportional"}
    if model.rotary_share != 1:
        rope["partial_rotary_factor"] = model.rotary_share
    if model.rope_local_theta is not None:
        local = {"rope_type": "default", "rope_theta": model.rope_local_theta}
        return {"rope_parameters": {GLOBAL: rope, LOCAL: local}, **beside}
    return {"rope_parameters": rope, **beside}
