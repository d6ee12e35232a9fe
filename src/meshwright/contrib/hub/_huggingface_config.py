"""Read the `config.json` of a Hugging Face model as the configuration of a run.

families.toml has a table for each `model_type`, and `_rotary_keys` reads rotary positions. A key that no one
understands is refused by name: it may change the model.

What the file does not say is the same for all: 4,194,304 tokens in a step, the batch with which Llama 3 405B
began, in sequences of at most 8192 tokens; AdamW; parameters sharded over all devices.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

from pydantic import TypeAdapter, ValidationError

from meshwright.config import TransformerModel, is_table, near_divisors
from meshwright.errors import InputError

from ._families import ACTIVATIONS, ALWAYS_FALSE, BESIDE, FAMILIES, OF_TRAINING, Family
from ._layer_lists import head_of_states, layers_json, read_layers
from ._rotary_keys import (
    GLOBAL,
    LOCAL,
    OWN_MODULE,
    NotUnderstood,
    not_understood,
    read_rotary,
    rotary_json,
    shortened,
)

Tree = Mapping[str, Any]

SIZES = ("num_layers", "embed_dim", "num_heads", "mlp_dim", "vocab_size")  # that every model has
OF_BOTH_PARTS = {"tie_word_embeddings", "torch_dtype", "dtype"}  # keys of a file whose text is a part of it
OF_PICTURES = re.compile(r"(vision|image|video|audio)_")  # begins keys of the other parts

EXPERTS_BESIDE = "enable_moe_block"
BESIDE_MLP = {
    **{"num_experts": "num_experts", "top_k_experts": "experts_per_token"},
    "moe_intermediate_size": "mlp_dim",
}
PER_LAYER = "per_layer_config"  # the sizes of layers that are unlike others
NEXT_TOKEN = ("ForCausalLM", "LMHeadModel")  # ends of the names of classes that predict it
_OFF: list[Any] = [False, {}]
TOKENS_PER_STEP = 2**22
LONGEST_SEQUENCE = 8192  # unless the file's own limit is lower
MOST_KEYS = 200  # of a file that cannot be read: it is read again without each of them
UNLIKE_KINDS = (TypeError, ValueError, AttributeError, ArithmeticError)  # what a text for a number raises


def family_of(tree: Tree) -> str | None:
    """Return the family by which a file is read: its `model_type`, or that of the class that it names.

    >>> family_of({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]})
    'deepseek_v3'
    """
    if isinstance(kind := tree.get("model_type"), str) and kind in FAMILIES:
        return kind
    named = _listed(tree.get("architectures"))
    return next((name for name, family in FAMILIES.items() if family.architecture in named), None)


def _listed(architectures: Any) -> list[str]:
    """Return the names of classes that a file lists, which may be one name, or null."""
    several = cast("list[Any]", architectures) if isinstance(architectures, list) else [architectures or ""]
    return [str(each) for each in several]


def run_of_huggingface(tree: Tree, where: str) -> dict[str, Any]:
    """Return the tree of a run of the model that a `config.json` describes.

    Args:
        where: the file, for errors.

    Raises:
        InputError: the family is not known, or a key or its value is not understood.

    >>> tree = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    ...         "num_attention_heads": 4, "vocab_size": 256, "max_position_embeddings": 512}
    >>> run = run_of_huggingface(tree, "config.json")
    >>> run["model"]["embed_dim"], run["batch"]["sequence_length"]
    (64, 512)
    """
    if reads_text_alone(tree):
        return run_of_huggingface(text_part(tree), where)
    if (name := family_of(tree)) is None:
        raise _not_known(tree, where)
    tree = {**tree, "model_type": name}
    check_heads(tree, where)
    try:
        return _run_of_family(tree, FAMILIES[name], where)
    except KeyError as missing:  # or null, which has no default
        raise _lacks(name, str(missing.args[0]), where) from missing
    except UNLIKE_KINDS as wrong:
        few = [*tree][:MOST_KEYS]
        which = [f"{key} = {shortened(tree[key])}" for key in few if _is_cause(tree, key, where)]
        raise InputError(
            f"{where}: a value is not of the kind that its key has: {'; or '.join(which) or wrong}",
            hint="compare the file with the model's own; numbers are not in quotes, and lists in brackets",
        ) from wrong


def _is_cause(tree: Tree, key: str, where: str) -> bool:
    """Return whether the value of one key is why a file cannot be read.

    It is if the file can be read without the key, or if it is then refused because the key is required.
    """
    rest = {other: value for other, value in tree.items() if other != key}
    try:
        _run_of_family(rest, FAMILIES[tree["model_type"]], where)
    except InputError as refused:
        return isinstance(tree[key], str | list | dict) and f" {key}" in refused.message
    except (KeyError, *UNLIKE_KINDS):
        return False
    return True


def _run_of_family(tree: Tree, family: Family, where: str) -> dict[str, Any]:
    """Return the tree of a run of a model; a value of a wrong type raises one of `UNLIKE_KINDS`."""
    given = _given(tree, family, where)
    given |= head_of_states(given)
    unread = set(given) - BESIDE
    model: dict[str, Any] = {"kind": "transformer", **family.fixed}
    for ours, theirs in family.keys.items():
        unread.discard(theirs)
        if theirs in given:
            model[ours] = _of_all_layers(given[theirs])
    if model.get("shared_mlp_dim") == 0 and not model.get("shared_gate"):
        del model["shared_mlp_dim"]  # as transformers: none is shared, and a gate would be a parameter
    _check_sizes(tree, model, family, where)
    for read in READERS:
        read(given, model, unread, where)
    limits = (given.get("max_position_embeddings"), given.get("n_positions"))
    length = min((LONGEST_SEQUENCE, *(int(limit) for limit in limits if limit)))
    for key, values in (*family.only.items(), *((key, _OFF) for key in ALWAYS_FALSE)):
        unread.discard(key)
        if key in given and given[key] not in values:
            raise not_understood(where, {key: given[key]})
    if unread:
        raise not_understood(where, {key: given[key] for key in sorted(unread)})
    return {
        "layout": "fsdp=-1",
        "model": model,
        "data": {"source": "synthetic"},
        "optimizer": {"kind": "adamw", "learning_rate": 3e-4, "clip_norm": 1.0},
        "batch": {
            "sequences": max(1, TOKENS_PER_STEP // (length or 1)),
            "sequence_length": length,
            "microbatch_sequences": 1,
        },
    }


def refusal_of(tree: Tree, where: str) -> NotUnderstood | None:
    """Return why a file cannot be a configuration of ours; None if it can, or if a value in it is wrong.

    >>> refusal_of({"model_type": "falcon"}, "config.json").message
    "config.json: model_type 'falcon' is not known"
    """
    try:
        run_of_huggingface(tree, where)
    except InputError as refused:
        return refused if isinstance(refused, NotUnderstood) else None
    return None


def text_part(tree: Tree) -> Tree:
    """Return the text part of a file of a model that reads more than text; any other file as it is."""
    if is_table(inner := tree.get("text_config")):
        of_text = f"{tree.get('model_type')}_text"
        if inner.get("model_type") is None and of_text in FAMILIES:  # which transformers takes it for
            inner = {**inner, "model_type": of_text}
        kind = inner.get("model_type")
        is_known = isinstance(kind, str) and kind in FAMILIES
        named = {"architectures"} if is_known else set[str]()  # of the whole model
        part = {key: value for key, value in inner.items() if key not in named}
        return {**{key: tree[key] for key in OF_BOTH_PARTS & tree.keys()}, **part}
    if not _is_in_one(tree):
        return tree
    kept = {
        key: value for key, value in tree.items() if not OF_PICTURES.match(key) and key != "architectures"
    }
    return {**kept, "model_type": f"{tree['model_type']}_text"}


def _is_in_one(tree: Tree) -> bool:
    """Return whether a file has the keys of the text between those of images, as Qwen2-VL's of 2024."""
    kind, has_sizes = tree.get("model_type"), "hidden_size" in tree
    return has_sizes and isinstance(kind, str) and kind not in FAMILIES and f"{kind}_text" in FAMILIES


def _of_all_layers(value: Any) -> Any:
    """Return the value of a list that has one for each layer, if all are alike (Hunyuan's `moe_topk`)."""
    if not isinstance(value, list):
        return value
    several = cast("list[Any]", value)
    return several[0] if several and all(each == several[0] for each in several) else several


def reads_text_alone(tree: Tree) -> bool:
    """Return whether a file is of a model that reads more than text, whose text part has a known family."""
    inner = text_part(tree)
    return inner is not tree and family_of(inner) is not None and family_of(tree) is None


def _given(tree: Tree, family: Family, where: str) -> dict[str, Any]:
    """Return the keys of a file, and the defaults of keys that it lacks, without null; a null switch is off.

    Raises NotUnderstood if the file gives two names of one key different values.
    """
    named = dict(tree)
    for other, key in family.synonyms.items():
        if (value := named.pop(other, None)) is None:
            continue
        if named.setdefault(key, value) is None:
            named[key] = value
        if named[key] != value:
            raise not_understood(where, {other: value, key: named[key]})
    for table, keys in family.inner.items():
        inner = dict(named.pop(table, None) or {})
        named |= {keys.get(key, f"{table}.{key}"): value for key, value in inner.items()}
    given = {**family.defaults, **named}
    switches = {key for key, value in family.defaults.items() if isinstance(value, bool)}
    given |= {key: False for key in switches if given[key] is None}
    return {key: value for key, value in given.items() if value is not None}


def _not_known(tree: Tree, where: str) -> NotUnderstood:
    """Return the error of a `model_type` without a table; it says how to weigh such a model all the same."""
    name, inner = tree["model_type"][:100], tree.get("text_config")
    near = [family for family in FAMILIES if is_misspelling(name, family)]
    hint = OWN_MODULE if not near else f"did you mean {' or '.join(map(repr, near))}? Or {OWN_MODULE}"
    what = f"{where}: model_type {name!r} is not known"
    if is_table(inner):
        what = f"{what}: beside text, it reads images or sound, and its text part is no known family either"
    return NotUnderstood(what, hint=hint)


def is_misspelling(name: str, family: str) -> bool:
    """Return whether a name is a family's, with two letters swapped, one left out, or one written twice.

    Case and separators do not count. Another letter, digit or ending makes the name of another family.

    >>> [is_misspelling(name, "llama") for name in ("LLaMa", "lama", "llamma", "llava", "llama4", "mllama")]
    [True, True, True, False, False, False]
    """
    one, other = (re.sub(r"[\W_]", "", each.lower()) for each in (name, family))
    if re.findall(r"\d", one) != re.findall(r"\d", other):
        return False
    if sorted(one) == sorted(other):
        return sum(a != b for a, b in zip(one, other, strict=True)) <= 2
    if len(one) == len(other) + 1:
        return any(one[:at] + one[at + 1 :] == other for at in range(1, len(one)) if one[at] == one[at - 1])
    return len(one) == len(other) - 1 and any(other[:at] + other[at + 1 :] == one for at in range(len(one)))


def _lacks(family: str, key: str, where: str) -> InputError:
    """Return the error of a key without which there is no model."""
    article = "an" if family[0] in "aeo" else "a"
    return InputError(f"{where}: {article} {family} model has no {key}", hint=f"add {key} to config.json")


def check_heads(tree: Tree, where: str) -> None:
    """Raise an `InputError` for a model that does not predict the next token, such as a classifier."""
    named = _listed(tree.get("architectures"))
    if any(named) and not any(each.endswith(NEXT_TOKEN) for each in named):
        raise InputError(
            f"{where}: architectures = {named}, and the step here trains one that predicts the next token",
            hint=f"to weigh that one with the same sizes, leave it out or name a ...{NEXT_TOKEN[0]}",
        )


def _check_sizes(tree: Tree, model: Tree, family: Family, where: str) -> None:
    """Raise an `InputError` that names the keys of the file whose values are missing or cannot be."""
    name, needed = tree["model_type"], [family.keys[ours] for ours in SIZES if ours in family.keys]
    missing = [theirs for theirs in needed if tree.get(theirs, family.defaults.get(theirs)) is None]
    if missing := [key for key in missing if key != "n_inner"]:  # GPT-2's, which is usually null
        raise _lacks(name, " and ".join(missing), where)
    wrong: list[str] = []
    without = {"num_experts", "experts_per_token"} if model.get("num_experts") == 0 else set[str]()
    for ours, theirs in family.keys.items():
        if ours in model and not (ours in without and model[ours] == 0):
            try:
                _adapter(ours).validate_python(model[ours], strict=True)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                shown = f"{theirs} = {shortened(model[ours])}"
                wrong.append(f"{shown} (model.{ours}): {problem[:1].lower()}{problem[1:]}")
    if wrong:
        raise InputError(f"{where}: {'; '.join(wrong)}", hint="correct the file; numbers are not in quotes")
    heads, groups = model["num_heads"], "num_key_value_heads"
    if groups in family.keys.values() and heads % (given := _of_all_layers(tree.get(groups)) or heads):
        near = near_divisors(heads, given)[0]
        what = f"{groups} = {given} does not divide {family.keys['num_heads']} = {heads}"
        raise InputError(f"{where}: {what}", hint=f"correct the file; {near} would divide it")
    if "head_dim" in family.keys and not model.get("head_dim") and model["embed_dim"] % heads:
        sizes = (f"{family.keys[ours]} = {model[ours]}" for ours in ("embed_dim", "num_heads"))
        what = f"{where}: {' is no multiple of '.join(sizes)}, and there is no {family.keys['head_dim']}"
        raise InputError(what, hint="add it to config.json: the width of a head")
    if groups in family.defaults and groups not in tree and heads % family.defaults[groups]:
        raise InputError(
            f"{where}: a {name} model without {groups} has {family.defaults[groups]}, which do not divide "
            f"num_attention_heads = {heads}",
            hint=f"add {groups} to config.json: {heads} if each head has its own",
        )


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """Return the validator of one configuration key."""
    field, annotated = TransformerModel.model_fields[name], cast("Any", Annotated)
    return TypeAdapter(annotated[field.annotation, "", *field.metadata])


def huggingface_of_model(model: TransformerModel, longest: int) -> dict[str, Any]:
    """Return a `config.json` of the first family that has this model.

    Args:
        longest: positions that the file states as its limit, for a model whose positions are rotary.

    Raises:
        InputError: no family has it.

    >>> from meshwright.config import load_config
    >>> made = huggingface_of_model(load_config("llama3-8b").model, 8192)
    >>> made["model_type"], made["num_hidden_layers"], made["rope_parameters"]["rope_theta"]
    ('llama', 32, 500000.0)
    """
    for name, family in FAMILIES.items():
        tree = _config_json(model, name, family, longest)
        try:
            read = TransformerModel.model_validate(run_of_huggingface(tree, name)["model"])
        except (InputError, ValueError):
            continue  # this family cannot have these sizes
        if _architecture(read) == _architecture(model):
            return tree
    raise InputError(
        "no Hugging Face family that is known has this model's combination of norms, positions and biases",
        hint=f"export it as it is, without --format; known: {', '.join(FAMILIES)}",
    )


def _config_json(model: TransformerModel, name: str, family: Family, longest: int) -> dict[str, Any]:
    """Return the file of a family with the sizes of a model, which that family need not be able to have."""
    tree: dict[str, Any] = {"model_type": name, "architectures": [family.architecture]}
    tree |= {theirs: getattr(model, ours) for ours, theirs in family.keys.items()}
    known = {**ACTIVATIONS, **family.activations}
    theirs_of = {ours: theirs for named in (known, ACTIVATIONS) for theirs, ours in reversed(named.items())}
    tree[family.activation] = theirs_of.get(model.activation)
    tree |= {theirs: 1 / getattr(model, ours) for ours, theirs in family.inverses.items()}
    if family.unpadded:
        tree["pad_token_id"] = None  # their own is beyond a small vocabulary
    tree |= {key: values[0] for key, values in family.only.items() if values}
    tree |= _routing_json(model, family)
    if model.window is not None:
        layers = [GLOBAL if kind.window is None else LOCAL for kind in model.kinds]
        tree |= {"sliding_window": model.window}
        tree |= {"layer_types": layers} if family.windows == BY_LAYER else {}
        tree |= {"use_sliding_window": True} if "use_sliding_window" in family.defaults else {}
    elif "sliding_window" in family.defaults or family.windows == ALL:
        tree["sliding_window"] = None
        tree |= {"layer_types": [GLOBAL] * model.num_layers} if family.windows == BY_LAYER else {}
    if family.unturned == BY_LAYER:
        tree["no_rope_layers"] = [int(kind.has_positions) for kind in model.kinds]
    tree |= layers_json(model, family) if family.mixers else {}
    if model.rope_theta is not None:
        tree |= {"max_position_embeddings": longest, **rotary_json(model)}
    return tree


def _routing_json(model: TransformerModel, family: Family) -> dict[str, Any]:
    """Return the keys of heads and routing that have no one-to-one counterpart in our configuration."""
    tree: dict[str, Any] = {}
    if "latent_rank" in family.keys:
        turned = model.rotary_dim or 0
        tree |= {"qk_nope_head_dim": model.head_dim - turned, "num_key_value_heads": model.num_heads}
    if "dense_mlp_dim" in family.keys:
        tree["intermediate_size"] = model.dense_mlp_dim or model.mlp_dim
    tree |= family.ungrouped if model.router_groups is None else family.grouped
    if family.dense_by_layer:
        tree["mlp_layer_types"] = ["dense" if kind.mlp == "mlp" else "sparse" for kind in model.kinds]
    for theirs, (ours, _, value_if_true) in family.switches.items():
        tree[theirs] = getattr(model, ours) == value_if_true
    if tree.get(EXPERTS_BESIDE):
        tree |= {theirs: getattr(model, ours) for theirs, ours in BESIDE_MLP.items()}
        tree["intermediate_size"] = model.shared_mlp_dim
    return tree


def _architecture(model: TransformerModel) -> dict[str, Any]:
    """Return the keys that describe the model, without those that only training reads."""
    keys = {key: value for key, value in model.model_dump().items() if key not in OF_TRAINING}
    return {**keys, "layer_pattern": tuple(model.kinds)} if model.layer_pattern else keys


def _activation(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the activation, the keys whose values are true or false, and those that divide."""
    family = FAMILIES[given["model_type"]]
    key = family.activation
    unread -= {key, *family.ignored, *family.switches, *family.inverses.values()}
    named = given.get(key, family.defaults[key])
    known = {**ACTIVATIONS, **family.activations}
    if named not in known:
        raise not_understood(where, {key: named})
    model["activation"] = known[named]
    for theirs, (ours, *values) in family.switches.items():
        model[ours] = values[bool(given[theirs])]
    for ours, theirs in family.inverses.items():
        model[ours] = 1 / given[theirs]


def _kv_heads(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    model.setdefault("num_kv_heads", model.get("num_heads"))


def _inner(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    if "mlp_dim" not in model and "embed_dim" in model:  # GPT-2's n_inner is usually null
        model["mlp_dim"] = 4 * model["embed_dim"]


MOST_LAYERS = 10_000  # whose kinds are listed
ALL, BY_LAYER = "all", "by layer"  # which layers of a family may have a sliding window
GLOBAL_ALONE = "global"  # layers without positions: those that see all


_OF_WINDOWS = {
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("sliding_window_pattern", "_sliding_window_pattern", "sliding_window_size"),
}


def _window(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read a sliding window, and which layers have it: all, none, or all but the last of each group."""
    family = FAMILIES[given["model_type"]]
    windows, num_layers = family.windows, model["num_layers"]
    kinds = None if family.mixers else given.get("layer_types")
    if kinds is not None and (set(kinds) - {LOCAL, GLOBAL} or len(kinds) != num_layers):
        raise not_understood(where, {"num_hidden_layers": num_layers, "layer_types": kinds})
    if kinds is not None and LOCAL not in kinds:
        unread.discard("layer_types")
    if windows not in (ALL, BY_LAYER):
        return
    unread -= _OF_WINDOWS
    if num_layers > MOST_LAYERS:
        raise InputError(f"{where}: num_hidden_layers = {num_layers}", hint=f"use {MOST_LAYERS} at most")
    if windows == ALL:
        kinds = [LOCAL] * num_layers
    kinds = kinds or _kinds_of_layers(given, num_layers)
    if not (given.get("use_sliding_window", True) and given.get("sliding_window")) or LOCAL not in kinds:
        model.pop("rope_local_theta", None)
        return
    model["window"] = given["sliding_window"]
    if GLOBAL in kinds:
        size = kinds.index(GLOBAL) + 1
        if kinds != [GLOBAL if (layer + 1) % size == 0 else LOCAL for layer in range(num_layers)]:
            raise not_understood(where, {key: given[key] for key in sorted(_OF_WINDOWS) if key in given})
        model["global_every"] = size


def _global_attention(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the sizes of attention in layers that see all positions, of a family in which they are others.

    `transformers` writes them again for each such layer, by its number.
    """
    if "global_head_dim" not in FAMILIES[given["model_type"]].keys:
        return
    unread.discard(PER_LAYER)
    if not model["global_key_is_value"]:
        model.pop("global_kv_heads", None)  # which is not read then
    if (layers := given.get(PER_LAYER)) is not None:
        every, sizes = model.get("global_every"), [dict(each) for each in layers.values()]
        wanted = [str(n) for n in range(model["num_layers"]) if every and (n + 1) % every == 0]
        known = all(set(each) <= {"head_dim", "num_key_value_heads"} and each == sizes[0] for each in sizes)
        if list(layers) != wanted or not sizes or not known:
            raise not_understood(where, {PER_LAYER: layers})
        model["global_head_dim"] = sizes[0].get("head_dim", model["head_dim"])
        model["global_kv_heads"] = sizes[0].get("num_key_value_heads")
    if model.get("window") is None or model.get("global_every") is None:
        raise not_understood(where, {key: given.get(key) for key in ("sliding_window", "layer_types")})


def _experts_beside(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the experts beside each layer's MLP, which is then a shared expert (Gemma 4)."""
    if EXPERTS_BESIDE not in FAMILIES[given["model_type"]].switches:
        return
    unread -= set(BESIDE_MLP)
    if not given[EXPERTS_BESIDE]:
        return
    for key in BESIDE_MLP:
        if key not in given:
            raise _lacks(given["model_type"], key, where)
    model["shared_mlp_dim"] = model["mlp_dim"]
    model |= {ours: given[theirs] for theirs, ours in BESIDE_MLP.items()}


def _unturned(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read which layers have no positions: those that a file lists, or those that see all positions."""
    unturned, num_layers = FAMILIES[given["model_type"]].unturned, model["num_layers"]
    if unturned == GLOBAL_ALONE and model.get("global_every"):
        model["no_rope_every"] = model["global_every"]
    if unturned != BY_LAYER:
        return
    unread -= {"no_rope_layers", "no_rope_layer_interval"}
    every = given.get("no_rope_layer_interval", 0)
    turned = given.get("no_rope_layers") or [int((n + 1) % every != 0) for n in range(num_layers)]
    if 0 not in turned:
        return
    every = turned.index(0) + 1
    if turned[:num_layers] != [int((n + 1) % every != 0) for n in range(num_layers)]:
        raise not_understood(where, {"no_rope_layers": turned})
    model["no_rope_every"] = every


def _kinds_of_layers(given: Tree, num_layers: int) -> list[str]:
    """Return the kind of each layer of a file that does not list them.

    The last of each `sliding_window_pattern` layers sees all (Gemma), or those with a G in it (EXAONE), or
    the first `max_window_layers` do.
    """
    pattern = given.get("sliding_window_pattern", given.get("_sliding_window_pattern"))
    if isinstance(pattern, str):
        named = [{"L": LOCAL, "G": GLOBAL}.get(letter, letter) for letter in pattern]
        return [named[layer % len(named)] for layer in range(num_layers)]
    if pattern is not None:
        return [GLOBAL if (layer + 1) % pattern == 0 else LOCAL for layer in range(num_layers)]
    first = given.get("max_window_layers", 0)
    return [LOCAL if layer >= first else GLOBAL for layer in range(num_layers)]


def _latent(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read the sizes of heads that have a latent, and drop keys that have no effect with the given values."""
    if "latent_rank" not in FAMILIES[given["model_type"]].keys:
        return
    unread -= {"qk_nope_head_dim", "head_dim", "qk_head_dim", "num_key_value_heads"}
    for key in ("qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads"):
        if key not in given:
            raise _lacks(given["model_type"], key, where)
    model["head_dim"] = given["qk_nope_head_dim"] + given["qk_rope_head_dim"]
    if given.get("num_key_value_heads", given["num_attention_heads"]) != given["num_attention_heads"]:
        raise not_understood(where, {"num_key_value_heads": given["num_key_value_heads"]})


def _routing(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Read which layers have experts, and drop keys of the router without effect with the given values."""
    num_layers = model["num_layers"]
    if "moe_layer_end_index" in given:
        unread.discard("moe_layer_end_index")
        if -1 != given["moe_layer_end_index"] < num_layers - 1:
            raise not_understood(where, {"moe_layer_end_index": given["moe_layer_end_index"]})
    family = FAMILIES[given["model_type"]]
    if family.dense_by_layer and not family.mixers:
        unread.discard("mlp_layer_types")
        kinds = given.get("mlp_layer_types") or ["dense", *["sparse"] * (num_layers - 1)]
        model["num_dense_layers"] = first = kinds.count("dense")
        if kinds != ["dense"] * first + ["sparse"] * (num_layers - first):
            raise not_understood(where, {"mlp_layer_types": kinds})
    groups = model.get("router_groups"), model.get("router_groups_chosen")
    if given.get("topk_method") == "greedy" or groups == (1, 1):
        model.pop("router_groups", None)
        model.pop("router_groups_chosen", None)
    if not model.get("num_dense_layers") and not model.get("layer_pattern"):
        model.pop("dense_mlp_dim", None)
    elif model.get("num_dense_layers") and "dense_mlp_dim" not in model:
        raise _lacks(given["model_type"], "intermediate_size", where)


def _expert_mlp(given: Tree, model: dict[str, Any], unread: set[str], where: str) -> None:
    """Check that a model of experts says how many; leave out the width of a dense MLP where none is dense."""
    family = FAMILIES[given["model_type"]]
    alike = "experts" if "num_experts" in model else ""  # layers that need no pattern
    has_experts = not family.mixers or "experts" in model.get("layer_pattern", alike)
    for ours in (
        ("experts_per_token", "num_experts") if has_experts and family.keys.get("num_experts") else ()
    ):
        if (theirs := family.keys.get(ours)) is not None and ours not in model:
            others = [other for other, key in family.synonyms.items() if key == theirs]
            raise _lacks(given["model_type"], " or ".join((theirs, *others)), where)
    if "num_experts" in family.keys and "moe_intermediate_size" in given:
        unread.discard("intermediate_size")


READERS: tuple[Callable[..., None], ...] = (
    *(read_layers, _activation, _latent, _routing, _kv_heads, _inner, read_rotary, _window),
    *(_global_attention, _unturned, _expert_mlp, _experts_beside),
)  # fmt: skip
