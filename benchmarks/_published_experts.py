"""Read a published row of a mixture of experts: its model by name, and its class among such rows.

A row of experts has the columns of a dense one, which do not tell shared experts, latents or dense first
layers: so its model is the published one that it names. All such runs force a balanced choice or drop what
exceeds a fair share, so a capacity factor of 1.0 is the program of each.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _published_words import InexpressibleError, Row

from meshwright.config import Layout, RunConfig, TransformerModel, load_config
from meshwright.hardware import Fleet

BALANCED = 1.0  # the capacity factor of a forced or dropped balance
# What the columns of such a row tell of its model, and the model's own field.
_TOLD = {"n_layers": "num_layers", "d_model": "embed_dim", "n_heads": "num_heads", "d_ff": "mlp_dim"}
_NOT_OURS = (
    (r"nemotron.*(super|ultra)", "experts between projections to a narrower width"),
    (r"deepseekv4", "attention that selects positions"),
    (r"switch", "no decoder-only Transformer"),
)


@functools.cache
def _models() -> tuple[Mapping[str, Any], ...]:
    text = (Path(__file__).parent / "published_assumptions.toml").read_text()
    return tuple(tomllib.loads(text)["models_of_experts"])


def has_experts(row: Row) -> bool:
    """Return whether a row is of a mixture of experts."""
    return bool(row.get("moe")) or (row.get("ep") or "1") != "1"


def model_of_experts(row: Row, notes: list[str]) -> dict[str, Any]:
    """Return the fields of the model that a row of experts names.

    Raises:
        InexpressibleError: we have no such model, or the row's dimensions are others.
    """
    name = re.sub(r"\s*\(.*?\)", "", row["model"]).strip()
    for pattern, reason in _NOT_OURS:
        if re.search(pattern, name.lower()):
            raise InexpressibleError(reason)
    entry = next((entry for entry in _models() if name in entry["names"]), None)
    if entry is None:
        raise InexpressibleError("experts of a model that is not known by its name")
    known = load_config(entry["like"]).model.model_dump(exclude_defaults=True) if "like" in entry else {}
    model = {**known, **entry.get("fields", {}), "kind": "transformer"}
    model |= {"capacity_factor": BALANCED, "balancing_loss": 0.0}
    _check(row, model)
    if note := entry.get("note"):
        notes.append(note)
    if entry.get("predicted_tokens") and "w/o mtp" not in row["model"].lower():
        model["num_layers"] += 1
        notes.append("its layer of multi-token prediction taken as one more layer")
    return model


def _check(row: Row, model: Mapping[str, Any]) -> None:
    """Raise if what a row tells of its model is not so in the model that it names."""
    if any(row[column] and float(row[column]) != model[field] for column, field in _TOLD.items()):
        raise InexpressibleError("dimensions other than those of the model that it names")
    experts = re.match(r"(\d+)/(\d+)", row["moe"])
    if experts and tuple(map(int, experts.groups())) != (model["num_experts"], model["experts_per_token"]):
        raise InexpressibleError("experts other than those of the model that it names")


def class_of(config: RunConfig, fleet: Fleet) -> str:
    """Return the class of a run of experts; "" of any other.

    >>> from meshwright.config import load_config
    >>> run = load_config("mixtral-8x7b", ["layout=data=2,expert=8", "precision=fp8"])
    >>> class_of(run, Fleet.parse("2x8xH100"))
    'experts in one domain, fp8'
    """
    model = config.model
    if not isinstance(model, TransformerModel) or model.num_experts is None:
        return ""
    layout = Layout.parse(config.layout)
    reach = layout.size("expert") * layout.size("tensor")
    words = "experts across domains" if reach > fleet.chips_per_domain else "experts in one domain"
    words += ", hybrid" if model.count(mixer="mamba") else ""
    words += ", stages" if layout.size("stage") > 1 else ""
    return words + (", fp8" if config.precision == "fp8" else ", bf16")
