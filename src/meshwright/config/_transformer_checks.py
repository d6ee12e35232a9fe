"""Check the keys of a Transformer against each other: a key that needs another, or has no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ._layer_kinds import MIXERS, MLPS, words_of
from ._mixer_keys import state_problems
from ._model_kind import MOST_UNROLLED, ModelKind
from ._section import Problem, near_divisors, near_multiples, or_list

if TYPE_CHECKING:
    from ._transformer import TransformerModel

_OF_EXPERTS = (
    *("experts_per_token", "num_shared_experts", "capacity_factor", "balancing_loss", "num_dense_layers"),
    *("dense_mlp_dim", "router", "router_scale", "router_bias", "router_groups", "router_groups_chosen"),
    *("expert_load", "router_bias_rate", "expert_bias", "shared_mlp_dim", "shared_gate"),
    "expert_norms",
)
_NOT_LATENT = {
    **{"bias": False, "qkv_bias": False, "qk_norm": "none", "rotary_share": 1.0},
    **{"output_bias": False, "position_growth": 0.0, "attention_gate": False},
}


def transformer_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield what is wrong with a model's keys: the key, what it is, and what to use."""
    problems = list(_pattern_problems(model))
    for check in () if problems else CHECKS:  # they ask for the kinds of layers
        problems += check(model)
    yield from problems


def dispatch_problems(model: ModelKind, domains: int | None) -> Iterator[Problem]:
    """Yield the reasons why a run of a model cannot send a row once to each of several fast domains."""
    what, hint = f"= {domains}, but ", "leave it out"
    if (domains or 1) == 1:
        return
    if getattr(model, "num_experts", None) is None:
        yield "expert_domains", f"{what}the model has no experts", hint
    elif getattr(model, "capacity_factor", None) is not None:
        yield "expert_domains", f"{what}buffers of a capacity factor hold a row for each choice", hint


def _pattern_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with the pattern of layers: with its words, and with other keys."""
    if not model.layer_pattern:
        for mixer, name in (("delta", "delta_heads"), ("mamba", "mamba_heads")):
            if (value := getattr(model, name)) is not None:
                what = f"= {value} has no effect without {mixer!r} in layer_pattern"
                yield name, what, f'leave {name} out, or write which layers have it, as in "{mixer}+mlp"'
        return
    key, written = "layer_pattern", f"= {model.layer_pattern[:60]!r}"
    try:
        words = words_of(model.layer_pattern)
    except ValueError as wrong:
        known = ", ".join((*MIXERS, *MLPS))
        yield key, f"{written}: {wrong}", f'use words such as "attention+mlp*3 mlp", of {known}'
        return
    if not words:
        yield key, f"{written} has no words", 'leave it out, or write it as in "attention+mlp"'
    elif model.num_layers % len(words):
        what = f"has {len(words)} layers, and num_layers = {model.num_layers} is no multiple of that"
        yield key, what, f"use num_layers = {or_list(near_multiples(len(words), model.num_layers))}"
    for name in ("global_every", "no_rope_every", "num_dense_layers", "parallel"):
        if value := getattr(model, name):
            what = f"= {value} has no effect or is not run with layer_pattern"
            yield name, what, f"leave {name} out, and say in layer_pattern which layers are which"
    yield from _part_problems(model, {part for word in words for part in word.split("+")})


def _part_problems(model: TransformerModel, parts: set[str]) -> Iterator[Problem]:
    """Yield the parts of a pattern that need a key, and the keys that need a part."""
    key, written = "layer_pattern", f"= {model.layer_pattern[:60]!r}"
    keys = {"local": "window", "experts": "num_experts", "delta": "delta_heads", "mamba": "mamba_heads"}
    for part, name in keys.items():
        if part in parts and getattr(model, name) is None:
            yield key, f"{written} has {part!r}", f"set {name}, or leave {part!r} out"
        if part not in parts and getattr(model, name) is not None:
            what = f"{written} has no {part!r}, without which {name} has no effect"
            yield key, what, f"leave {name} out, or add {part!r}"
    if "nope" in parts and model.position != "rotary":
        what = f"{written} has 'nope', and position = {model.position!r} turns nothing anyway"
        yield key, what, "write 'attention' in its place"


def _layer_problems(model: TransformerModel) -> Iterator[Problem]:
    if model.num_heads % model.num_kv_heads:
        what = f"= {model.num_kv_heads} does not divide num_heads = {model.num_heads}"
        nearest = near_divisors(model.num_heads, model.num_kv_heads)[0]
        yield "num_kv_heads", what, f"use num_kv_heads = {nearest}"
    for name in ("qkv_bias", "output_bias"):
        if model.bias and getattr(model, name):
            yield name, "= true has no effect with bias = true", f"leave {name} out"
    if model.gate_limit is not None and model.mlp != "gated":
        what = f"= {model.gate_limit} has no effect with mlp = {model.mlp!r}"
        yield "gate_limit", what, "leave gate_limit out"
    if model.unroll and model.num_layers > MOST_UNROLLED:
        what = f"= true writes out num_layers = {model.num_layers} blocks, and at most {MOST_UNROLLED} can be"
        yield "unroll", what, "use unroll = false"


def _need_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the keys that have no effect without another, or that are in place of one that is set."""
    before, turned = model.norm_place == "before", model.position == "rotary"
    needs = {
        "one_norm": (model.parallel and before, 'parallel = true and norm_place = "before"'),
        "qk_norm_turned": (model.qk_norm != "none" and turned, "qk_norm and rotary positions"),
        "norm_bias": (model.norm == "layer" and not model.bias, 'norm = "layer" and bias = false'),
        "no_rope_every": (turned, "rotary positions"),
        "position_growth": (model.rope_original_positions is not None, "rope_original_positions"),
    }
    for name, (has_effect, condition) in needs.items():
        if (value := getattr(model, name)) and not has_effect:
            shown = "true" if value is True else value
            yield name, f"= {shown} has no effect without {condition}", f"leave {name} out"
    if model.score_scale is not None and model.score_dim is not None:
        what = f"= {model.score_scale} is in place of score_dim = {model.score_dim}"
        yield "score_scale", what, "leave one of them out"
    if model.activation == "xielu" and (model.num_experts is not None or model.mlp != "plain"):
        yield "activation", "= 'xielu' is run in one plain MLP", 'use mlp = "plain" without experts'


def _position_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with positions: each scheme needs its own key, and the other's has no effect."""
    keys = {
        "rotary": ("rope_theta", "10000.0"),
        "learned": ("max_positions", "the longest sequence, e.g. 1024"),
    }
    for position, (key, example) in keys.items():
        value = getattr(model, key)
        if position == model.position and value is None:
            yield key, f"is missing; position = {position!r} needs it", f"set {key} to {example}"
        elif position != model.position and value is not None:
            what = f"= {value} has no effect with position = {model.position!r}"
            yield key, what, f'leave {key} out, or set {key} = "none"'
    yield from _stretching_problems(model)
    low, high = model.rope_low_factor, model.rope_high_factor
    if low > high or (low == high and model.rope_stretching != "yarn"):  # yarn rounds the two places apart
        what = f"= {model.rope_low_factor} is not below rope_high_factor = {model.rope_high_factor}"
        yield "rope_low_factor", what, "use rope_low_factor = 1.0"
    if model.position == "rotary" and model.head_dim % 2:
        what = f"= {model.head_dim} is odd; rotary positions turn pairs of numbers"
        yield "head_dim", what, f"use head_dim = {model.head_dim + 1}"


def _window_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with windows: some keys need another."""
    if model.window is None and model.global_every is not None:
        what = f"= {model.global_every} has no effect without window"
        yield "global_every", what, "leave global_every out"
    if model.rope_local_theta is not None and (model.window is None or model.rope_theta is None):
        needs = "rope_theta" if model.rope_theta is None else "window"
        what = f"= {model.rope_local_theta} has no effect without {needs}"
        yield "rope_local_theta", what, "leave rope_local_theta out"


def _global_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with attention that is another in layers that see all positions."""
    named = ("global_kv_heads", "global_key_is_value")
    if model.global_head_dim is None:
        for name in named:
            if value := getattr(model, name):
                yield name, f"= {value} has no effect without global_head_dim", f"leave {name} out"
        return
    if model.window is None:
        what = f"= {model.global_head_dim} has no effect without window, the width of other layers' heads"
        yield "global_head_dim", what, "leave global_head_dim out, and set head_dim"
    if model.latent_rank is not None:
        what = f"= {model.global_head_dim} is not run with latent_rank = {model.latent_rank}"
        yield "global_head_dim", what, "leave one of them out"
    if model.num_heads % (heads := model.global_kv_heads or model.num_kv_heads):
        nearest = near_divisors(model.num_heads, heads)[0]
        what = f"= {heads} does not divide num_heads = {model.num_heads}"
        yield "global_kv_heads", what, f"use global_kv_heads = {nearest}"
    for name in ("bias", "qkv_bias"):
        if model.global_key_is_value and getattr(model, name):
            yield name, "= true is not run with global_key_is_value", f"leave {name} out"


def _latent_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with latent attention, whose keys need each other."""
    if model.latent_rank is None:
        for name in ("query_rank", "rotary_dim", "value_dim"):
            if (value := getattr(model, name)) is not None:
                yield name, f"= {value} has no effect without latent_rank", f"leave {name} out"
        return
    if model.rotary_dim is None or model.rotary_dim % 2 or model.rotary_dim >= model.head_dim:
        what = (
            f"= {model.rotary_dim}; latent attention needs an even number below head_dim = {model.head_dim}"
        )
        yield "rotary_dim", what, "set rotary_dim to half of head_dim or less"
    if model.num_kv_heads != model.num_heads:
        what = f"= {model.num_kv_heads}, but with latent_rank each of num_heads has keys of its own"
        yield "num_kv_heads", what, f"use num_kv_heads = {model.num_heads}"
    for name, plain in _NOT_LATENT.items():
        if (value := getattr(model, name)) != plain:
            what = f"= {value!r} is not run with latent_rank = {model.latent_rank}"
            yield name, what, f"use {name} = {plain!r}"


def _expert_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with experts: they have no biases, and their keys need `num_experts`."""
    if model.num_experts is None:
        for name in _OF_EXPERTS:
            if (value := getattr(model, name)) and value != type(model).model_fields[name].default:
                yield name, f"= {value} has no effect without num_experts", f"leave {name} out"
        return
    if model.experts_per_token is None:
        what = f"is missing; num_experts = {model.num_experts} needs it"
        yield "experts_per_token", what, "set experts_per_token to 1 or 2"
    elif model.experts_per_token > model.num_experts:
        what = f"= {model.experts_per_token} is more than num_experts = {model.num_experts}"
        yield "experts_per_token", what, f"use {model.num_experts} at most"
    if model.bias:
        yield "bias", "= true, but experts have no biases", "use bias = false"


def _unlike_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with MLPs that are no routed experts: shared ones, and those of other layers."""
    if model.num_experts is None:
        return
    if model.num_dense_layers >= model.num_layers:
        what = f"= {model.num_dense_layers} leaves no layer of {model.num_layers} with experts"
        yield "num_dense_layers", what, "leave num_experts out, or use fewer"
    if (model.count(mlp="mlp") > 0) != (model.dense_mlp_dim is not None):
        name = "layer_pattern: words with mlp" if model.layer_pattern else "num_dense_layers"
        yield name, "and dense_mlp_dim need each other", "set both, or neither"
    if model.num_dense_layers and len(model.period) > 1:
        what = f"= {model.num_dense_layers} with layers that take turns (global_every) is not run"
        yield "num_dense_layers", what, "leave one of them out"


def _shared_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with shared experts: one width, and a gate of something."""
    if model.shared_mlp_dim is not None and model.num_shared_experts:
        what = f"= {model.shared_mlp_dim} is in place of num_shared_experts = {model.num_shared_experts}"
        yield "shared_mlp_dim", what, "leave one of them out"
    if model.shared_gate and not model.shared_dim:
        yield "shared_gate", "= true, but there is no shared expert", "leave shared_gate out"


def _router_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with groups of experts, and with the rate of a bias that is not there."""
    if model.router_bias_rate and not model.router_bias:
        what = f"= {model.router_bias_rate} has nothing to move without router_bias"
        yield "router_bias_rate", what, "set router_bias = true, or leave router_bias_rate out"
    groups, chosen = model.router_groups, model.router_groups_chosen
    if (groups is None) != (chosen is None):
        yield "router_groups", "and router_groups_chosen need each other", "set both, or neither"
    elif groups is not None and chosen is not None and model.num_experts is not None:
        each, rest = divmod(model.num_experts, groups)
        least = 2 if model.router == "sigmoid" else 1
        if rest or each < least:
            what = f"= {groups} does not divide num_experts = {model.num_experts}, {least} or more to a group"
            nearest = or_list(near_divisors(model.num_experts, min(groups, model.num_experts // least)))
            yield "router_groups", what, f"use router_groups = {nearest}"
        elif not chosen <= groups or chosen * each < (model.experts_per_token or 1):
            what = f"= {chosen} of {groups} groups cannot hold experts_per_token = {model.experts_per_token}"
            yield "router_groups_chosen", what, f"use {groups} at most, and enough for the experts"


def _stretching_problems(model: TransformerModel) -> Iterator[Problem]:
    """Yield the problems with stretched wavelengths, whose keys need each other."""
    name = "rope_short_factors" if model.rope_stretching == "longrope" else "rope_factor"
    other = "rope_factor" if model.rope_stretching == "longrope" else "rope_short_factors"
    if getattr(model, other):
        what = f"has no effect with rope_stretching = {model.rope_stretching!r}"
        yield other, what, f"leave {other} out"
    if model.is_stretched and model.rope_theta is None:
        yield name, "has no effect without rope_theta", f"leave {name} out"
    needs = model.is_stretched and model.rope_stretching != "linear"
    if needs != (model.rope_original_positions is not None):
        what = f"and rope_original_positions need each other; {model.rope_stretching!r} stretching is set"
        yield name, what, "set both, or neither, or the factor alone for linear stretching"
    if model.is_stretched and model.rope_stretching == "yarn" and (model.rope_theta or 0) <= 1:
        yield "rope_theta", f"= {model.rope_theta}; yarn needs a base above 1", "set rope_theta to 10000.0"
    if not model.rope_rounded and not (model.is_stretched and model.rope_stretching == "yarn"):
        what = "= false has no effect without YaRN's stretching"
        yield "rope_rounded", what, 'leave rope_rounded out, or set rope_stretching = "yarn" and rope_factor'
    if model.rope_gain != 1 and not model.is_stretched:
        yield "rope_gain", f"= {model.rope_gain} has no effect without {name}", "leave rope_gain out"
    num_pairs = (model.rotary_dim or 2 * int(model.head_dim * model.rotary_share / 2)) // 2
    for each in ("rope_short_factors", "rope_long_factors"):
        if (count := len(getattr(model, each))) not in ((num_pairs,) if model.rope_short_factors else (0,)):
            what = f"has {count} numbers, and positions turn {num_pairs} pairs of each head"
            yield each, what, f"give one for each pair in {each}, or leave both lists out"


CHECKS = (
    *(_layer_problems, _need_problems, _position_problems, _window_problems, _global_problems),
    *(_latent_problems, _expert_problems, _unlike_problems, _shared_problems, _router_problems),
    state_problems,
)
