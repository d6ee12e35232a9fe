"""Name the policies of rematerialisation: those with a name, and lists of results that a block keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticKnownError

from meshwright.errors import nearest_name

from ._section import Problem, raise_problems
from ._transformer import TransformerModel

Widths = tuple[float, float, float, float]
"""Bytes of each token: multiples of the width, the MLP's hidden width, the heads' width and the keys'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One named policy: what a block keeps for its backward pass, in the step, in estimates and in words.

    `saves`: groups of results, by the names that the model's blocks give them, and the rules of
    `trainer.models.rematerialisation.RULES`; `saves_sent`: those beyond where an axis `tensor` sent them.
    `kept_bytes`: what that comes to, in estimates of the planner. `repeats`: the forward work that the
    backward pass does again: "products", "second products", "attention", "light". `elsewhere`: names of
    other programs for it.
    """

    words: str
    saves: tuple[str, ...]
    saves_sent: tuple[str, ...] = ()
    kept_bytes: Widths
    repeats: tuple[str, ...]
    elsewhere: str


_PRODUCTS = ("product", "second_product", "expert_product", "second_expert_product", "after_attention")
POLICIES: dict[str, Policy] = {
    "none": Policy(
        words="every intermediate result",
        saves=("all but gathered",),
        kept_bytes=(24.0, 14.0, 10.0, 10.0),  # what XLA does not fuse away
        repeats=(),
        elsewhere="false off",
    ),
    "dots": Policy(
        words="the results of products",
        saves=("dots", "expert_product", "second_expert_product", "norm_statistics"),
        kept_bytes=(4.0, 4.0, 2.0, 2.0),
        repeats=("attention", "light"),
        elsewhere="selective core-attn minimal dots-with-no-batch-dims-saveable",
    ),
    "dots-attention": Policy(
        words="those of products and of attention",
        saves=("attention", "attention_output", "norm_statistics", *_PRODUCTS),
        kept_bytes=(4.0, 4.0, 4.0, 2.0),
        repeats=("light",),
        elsewhere="minimal-with-context",
    ),
    "full": Policy(
        words="only the block's input",
        saves=(),
        kept_bytes=(0.0, 0.0, 0.0, 0.0),
        repeats=("products", "attention", "light"),
        elsewhere="true block everything uniform",
    ),
    "alternate-dots": Policy(
        words="attention's and those of every second product",
        saves=("attention", "attention_output", "norm_statistics", "product", "expert_product"),
        saves_sent=("after_attention",),
        kept_bytes=(2.0, 2.0, 4.0, 1.0),
        repeats=("second products", "light"),
        elsewhere="op selective-op",
    ),
}
"""The policies that hold for single blocks."""
NAMED_REMAT: tuple[str, ...] = (*POLICIES, *(f"full-every-{number}" for number in (2, 3, 4)))
"""These, and those of groups of blocks (`block_policies`)."""
SEARCHED_REMAT = ("none", "dots-attention", "save:query,key,value,context,out", "full")
"""The policies that a plan tries."""
SAVE = "save:"
"""The beginning of a policy that lists what a block keeps: `save:query,key,value`."""


@dataclass(frozen=True, slots=True)
class Result:
    """A result of a block that a list may name. A block that does not keep it holds next to nothing of it."""

    words: str
    kept_bytes: Widths = (0.0, 0.0, 0.0, 0.0)


RESULTS: dict[str, Result] = {
    "norms": Result("the statistics of its norms: two numbers for each token"),
    "latents": Result("the results of the products that make latents, in latent attention"),
    "query": Result("the result of the queries' product, before norms and rotation", (0.0, 0.0, 2.0, 0.0)),
    "key": Result("that of the keys' product", (0.0, 0.0, 0.0, 1.0)),
    "value": Result("that of the values' product", (0.0, 0.0, 0.0, 1.0)),
    "context": Result(
        "attention's output, and the log-sum-exp of its scores, by which its backward pass begins",
        (0.0, 0.0, 2.0, 0.0),
    ),
    "out": Result("the result of attention's output product, summed over `tensor`", (2.0, 0.0, 0.0, 0.0)),
    "residual": Result("the residual after attention", (2.0, 0.0, 0.0, 0.0)),
    "mlp_gate": Result("the result of the product with `gate`", (0.0, 2.0, 0.0, 0.0)),
    "mlp_up": Result("that of the product with `up`", (0.0, 2.0, 0.0, 0.0)),
    "mlp_hidden": Result(
        "the hidden units that `down` multiplies, activated and gated", (0.0, 2.0, 0.0, 0.0)
    ),
    "mlp_out": Result("the result of the product with `down`; only a norm after it reads it"),
    "router": Result("the router's logits"),
    "expert_tokens": Result("the tokens of experts' buffers that crossed `expert`"),
    "expert_gate": Result("the result of the experts' product with `gate`", (0.0, 2.0, 0.0, 0.0)),
    "expert_up": Result("that of the experts' product with `up`", (0.0, 2.0, 0.0, 0.0)),
}
"""The results of a block that a list may name, in the order in which a block makes them."""


def policies_in_words() -> str:
    """Return what each named policy keeps, as one clause for a sentence.

    >>> policies_in_words()[:64]
    '`none` keeps every intermediate result, `dots` the results of pr'
    """
    named = [f"`{name}` {policy.words}" for name, policy in POLICIES.items()]
    return ", ".join(named).replace("` ", "` keeps ", 1)


@dataclass(frozen=True, slots=True)
class Choices:
    """The values of a text in words, for the page that documents them."""

    words: tuple[str, ...]


def saved_results(remat: str) -> tuple[str, ...] | None:
    """Return the results that a list names; None for a policy with a name.

    >>> saved_results("save:query,key"), saved_results("dots")
    (('query', 'key'), None)
    """
    return tuple(remat.removeprefix(SAVE).split(",")) if remat.startswith(SAVE) else None


def in_order(results: tuple[str, ...]) -> str:
    """Return the policy that keeps `results`, in the order in which a block makes them.

    >>> in_order(("value", "query"))
    'save:query,value'
    """
    return SAVE + ",".join(name for name in RESULTS if name in results)


def results_of(model: TransformerModel) -> tuple[str, ...]:
    """Return the results that a model's blocks make."""
    has_mlp = model.count(mlp="mlp") or model.shared_dim
    gated, routed = model.mlp == "gated", model.num_experts is not None
    lacks: set[str] = set()
    lacks |= {"latents"} if model.latent_rank is None else set()
    lacks |= {name for name in RESULTS if name.startswith("mlp_")} if not has_mlp else set()
    lacks |= {"router", "expert_tokens", "expert_gate", "expert_up"} if not routed else set()
    lacks |= {"mlp_gate", "expert_gate"} if not gated else set()
    return tuple(name for name in RESULTS if name not in lacks)


def remat_problems(remat: str, model: object) -> Iterator[Problem]:
    """Yield the results in a list that a transformer's blocks do not make."""
    if not isinstance(model, TransformerModel):
        return
    made = results_of(model)
    for name in saved_results(remat) or ():
        if name not in made:
            what = f"= {remat!r} names {name!r}, which the blocks of this model do not make"
            yield "remat", what, f"leave it out; they make {', '.join(made)}"


def _checked(remat: object) -> object:
    if remat in NAMED_REMAT:
        return remat
    results = saved_results(remat) if isinstance(remat, str) else None
    if results is None:
        *most, last = (*NAMED_REMAT, f"{SAVE}NAMES")
        expected = f"{', '.join(map(repr, most))} or {last!r}"
        raise PydanticKnownError("literal_error", {"expected": expected})
    if results == ("",):
        raise_problems([("", f"= {remat!r} keeps no result", 'use "full", which keeps the block\'s input')])
    for name in results:
        if name not in RESULTS:
            raise_problems([("", f"= {remat!r}: no result is called {name!r}", nearest_name(name, RESULTS))])
        if results.count(name) > 1:
            raise_problems([("", f"= {remat!r} names {name!r} twice", f"use {in_order(results)!r}")])
    return in_order(results)


Remat = Annotated[
    str,
    BeforeValidator(_checked),
    Choices((*NAMED_REMAT, f"{SAVE}NAMES")),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(NAMED_REMAT), "type": "string"},
                {"pattern": rf"^{SAVE}({'|'.join(RESULTS)})(,({'|'.join(RESULTS)}))*$", "type": "string"},
            ]
        }
    ),
]
"""The policy of a run, by its name or as a list: `dots`, `save:query,key,value`."""
