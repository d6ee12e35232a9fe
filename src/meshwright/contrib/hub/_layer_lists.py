"""Read from a Hugging Face file which layers are of which kind, as a pattern of layers.

Families that mix attention with layers of states list the kind of each layer, or say after how many comes
attention. Nemotron-H lists the parts of layers: a mixer and an MLP after it are one layer here, and each has
a number in the names of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.config import LayerKind, TransformerModel, pattern_of

from ._families import FAMILIES, Family
from ._rotary_keys import not_understood

Tree = Mapping[str, Any]

_KEYS = {
    *("layer_types", "layers_block_type", "hybrid_override_pattern"),
    *("mlp_only_layers", "decoder_sparse_step", "position_embedding_type"),
}
_DENSE, _NUMBERED = ("mlp_layer_types", "first_k_dense_replace"), ("full_attn_layers", "kda_layers")
_INTERVAL = "full_attention_interval"  # in families that have a default of it
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_EARLIER = {"mamba": "linear_attention", "attention": "full_attention"}  # names in files of some releases
PLAIN_WIDTH = "intermediate_size"
_MLPS = {"mlp": "mlp", "moe": "experts"}
_OF_LISTS = {"dense": "mlp", "sparse": "experts"}
_OF_EXPERTS = (
    *("num_experts", "experts_per_token", "router", "router_bias", "router_normalised", "router_scale"),
    *("router_groups", "router_groups_chosen", "shared_mlp_dim", "shared_gate", "num_shared_experts"),
)


def read_layers(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the pattern of layers into `model`, and drop the keys of parts that no layer has."""
    family = FAMILIES[given["model_type"]]
    if not family.mixers:
        return
    unread -= {*_KEYS, *_NUMBERED, "moe_intermediate_size", *(_DENSE if family.dense_by_layer else ())}
    unread -= {_INTERVAL} & family.defaults.keys()
    if "position_embedding_type" in family.defaults and given.get("position_embedding_type") != "rope":
        model["position"] = "none"
    if not model.get("num_experts"):
        model.pop("num_experts", None)
        width = given.get(PLAIN_WIDTH) if _has_two_widths(family) else model.get("shared_mlp_dim")
        model["mlp_dim"] = width or model.get("mlp_dim")
    words = _words(given, family, model, where)
    parts = {part for word in words for part in word.split("+")}
    model["num_layers"], model["layer_pattern"] = len(words), pattern_of(words)
    states = [mixer for mixer in ("delta", "mamba") if mixer in parts]
    dropped = [
        key for key in model if key.startswith(("delta_", "mamba_")) and key.split("_")[0] not in states
    ]
    dropped += [] if states else [key for key in ("conv_width", "conv_bias", "scan_chunk") if key in model]
    dropped += [] if "experts" in parts else [key for key in _OF_EXPERTS if key in model]
    for key in dropped:
        del model[key]
    if "experts" in parts and "mlp" in parts:
        model["dense_mlp_dim"] = given["intermediate_size"]
    if "experts" not in parts and _has_two_widths(family):
        model["mlp_dim"] = given.get(PLAIN_WIDTH)
    if "experts" in parts and family.numbered_by_part:
        model["mlp_dim"] = given["moe_intermediate_size"]
    if parts in ({"attention", "mlp"}, {"attention", "experts"}) and len(set(words)) == 1:
        del model["layer_pattern"]


def head_of_states(given: Tree) -> dict[str, int]:
    """Return the width of a head that a file leaves to the other sizes ("auto", Granite 4), by its key.

    >>> head_of_states({"mamba_d_head": "auto", "mamba_expand": 2, "hidden_size": 64, "mamba_n_heads": 8})
    {'mamba_d_head': 16}
    """
    if given.get("mamba_d_head") != "auto":
        return {}
    return {"mamba_d_head": given["mamba_expand"] * given["hidden_size"] // given["mamba_n_heads"]}


def _has_two_widths(family: Family) -> bool:
    """Return whether experts and MLPs of layers without them have widths of their own in a file."""
    return family.keys.get("mlp_dim") == "moe_intermediate_size"


def _words(given: Tree, family: Family, model: dict[str, Any], where: str) -> list[str]:
    """Return the word of each layer."""
    key = next(
        (key for key in ("layer_types", "layers_block_type") if key in given), "hybrid_override_pattern"
    )
    listed = given.get(key)
    if isinstance(listed, str):
        listed = [_LETTERS.get(letter, letter) for letter in listed]
    if family.numbered_by_part:
        parts = [_EARLIER.get(part, part) for part in listed or ()]
        if not parts or set(parts) - {*family.mixers, *_MLPS}:
            raise not_understood(where, {key: given.get(key)})
        return _joined([{**family.mixers, **_MLPS}[part] for part in parts])
    num_layers = model["num_layers"]
    kinds = listed or _unlisted(given, family, num_layers, where)
    kinds = [_EARLIER.get(kind, kind) for kind in kinds]
    if len(kinds) != num_layers or set(kinds) - set(family.mixers):
        raise not_understood(where, {"num_hidden_layers": num_layers, key: given.get(key)})
    mlps = _mlps(given, family, model, where)
    return [f"{family.mixers[kind]}+{mlp}" for kind, mlp in zip(kinds, mlps, strict=True)]


def _unlisted(given: Tree, family: Family, num_layers: int, where: str) -> list[str]:
    """Return the kind of each layer of a file without a list: by their numbers, or attention every few.

    In a family that has neither, no layer has attention.
    """
    if not any(_NUMBERED[0] in keys for keys in family.inner.values()):
        every = given.get(_INTERVAL, family.defaults.get(_INTERVAL, num_layers + 1))
        return ["linear_attention" if n % every else "full_attention" for n in range(1, num_layers + 1)]
    numbers: dict[str, list[int]] = {key: list(given.get(key) or ()) for key in _NUMBERED}
    full, states = numbers.values()
    if sorted([*full, *states]) != list(range(1, num_layers + 1)):
        raise not_understood(where, {"num_hidden_layers": num_layers, **numbers})
    return ["full_attention" if n in full else "linear_attention" for n in range(1, num_layers + 1)]


def _mlps(given: Tree, family: Family, model: dict[str, Any], where: str) -> list[str]:
    """Return the MLP of each layer."""
    num_layers = model["num_layers"]
    if family.dense_by_layer and (kinds := given.get(_DENSE[0])):
        if len(kinds) != num_layers or set(kinds) - _OF_LISTS.keys():
            raise not_understood(where, {"num_hidden_layers": num_layers, _DENSE[0]: kinds})
        return [_OF_LISTS[kind] for kind in kinds]
    step, plain = given.get("decoder_sparse_step", 1), given.get("mlp_only_layers") or ()
    first = given.get("first_k_dense_replace", 0)

    def mlp(layer: int) -> str:
        has_experts = model.get("num_experts") and layer not in plain and (layer + 1) % step == 0
        return "experts" if has_experts and layer >= first else "mlp"

    return [mlp(layer) for layer in range(num_layers)]


def _numbers_of_experts(family: Family) -> list[str]:
    keys = [family.keys[ours] for ours in _OF_EXPERTS if ours in family.keys]
    return [key for key in keys if key in family.defaults]


def _joined(parts: list[str]) -> list[str]:
    """Return words of layers: a mixer takes the MLP that comes after it."""
    words = list[str]()
    for part in parts:
        if part in _MLPS.values() and words and "+" not in words[-1] and words[-1] not in _MLPS.values():
            words[-1] = f"{words[-1]}+{part}"
        else:
            words.append(part)
    return words


def layers_json(model: TransformerModel, family: Family) -> dict[str, Any]:
    """Return the keys of a file of such a family that state a model's layers."""
    theirs = {ours: name for name, ours in family.mixers.items()}
    mlps = {ours: name for name, ours in _MLPS.items()}
    mixers = [None if kind.mixer is None else theirs.get(kind.mixer, kind.mixer) for kind in model.kinds]
    if family.numbered_by_part:
        pairs = zip(mixers, (kind.mlp and mlps[kind.mlp] for kind in model.kinds), strict=True)
        listed = [part for pair in pairs for part in pair if part is not None]
        width = {} if model.num_experts is None else {"moe_intermediate_size": model.mlp_dim}
        if model.num_experts is None:  # which transformers wants to read all the same
            width = {theirs: family.defaults[theirs] for theirs in _numbers_of_experts(family)}
        plain = model.dense_mlp_dim or model.mlp_dim
        return {"layers_block_type": listed, "intermediate_size": plain, **width}
    plain = [layer for layer, kind in enumerate(model.kinds) if kind.mlp == "mlp"]
    tree: dict[str, Any] = {"layer_types": mixers}
    if "mlp_only_layers" in family.defaults:
        tree["mlp_only_layers"] = plain if model.num_experts else []
    if "position_embedding_type" in family.defaults:
        tree["position_embedding_type"] = "rope" if model.position == "rotary" else "nope"
    if model.num_experts is None and "shared_mlp_dim" in family.keys:
        tree |= {theirs: family.defaults[theirs] for theirs in _numbers_of_experts(family)}
        plain = PLAIN_WIDTH if _has_two_widths(family) else family.keys["shared_mlp_dim"]
        tree |= {family.keys["num_experts"]: 0, plain: model.mlp_dim}
    if model.dense_mlp_dim is not None:
        tree["intermediate_size"] = model.dense_mlp_dim
    return tree


def numbers_of_parts(kinds: list[LayerKind]) -> list[tuple[int, int]]:
    """Return the numbers of each layer's mixer and MLP where each part has one, from 0.

    >>> numbers_of_parts([LayerKind("mamba", "mlp"), LayerKind("mamba", None), LayerKind("attention", "mlp")])
    [(0, 1), (2, 3), (3, 4)]
    """
    numbers, place = list[tuple[int, int]](), 0
    for kind in kinds:
        numbers.append((place, place + (kind.mixer is not None)))
        place += (kind.mixer is not None) + (kind.mlp is not None)
    return numbers
