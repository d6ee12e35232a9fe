"""Name the policies of rematerialisation: those with a name, and lists of results that a block keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticKnownError

from meshwright.errors import nearest_name

from ._section import Problem, raise_problems
from ._transformer import TransformerModel

NamedRemat = Literal[
    "none",
    "dots",
    "dots-attention",
    "full",
    "alternate-dots",
    "full-every-2",
    "full-every-3",
    "full-every-4",
]
NAMED_REMAT: tuple[str, ...] = get_args(NamedRemat)
SAVE = "save:"
"""The beginning of a policy that lists what a block keeps: `save:query,key,value`."""
RESULTS: dict[str, str] = {
    "norms": "the statistics of its norms: two numbers for each token",
    "latents": "the results of the products that make latents, in latent attention",
    "query": "the result of the queries' product, before norms and rotation",
    "key": "that of the keys' product",
    "value": "that of the values' product",
    "context": "attention's output, and the log-sum-exp of its scores, by which its backward pass begins",
    "out": "the result of attention's output product, summed over `tensor`",
    "residual": "the residual after attention",
    "mlp_gate": "the result of the product with `gate`",
    "mlp_up": "that of the product with `up`",
    "mlp_hidden": "the hidden units that `down` multiplies, activated and gated",
    "mlp_out": "the result of the product with `down`; only a norm after it reads it",
    "router": "the router's logits",
    "expert_tokens": "the tokens of experts' buffers that crossed `expert`",
    "expert_gate": "the result of the experts' product with `gate`",
    "expert_up": "that of the experts' product with `up`",
}
"""The results of a block that a list may name, in the order in which a block makes them."""


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
    has_mlp = model.num_experts is None or model.num_dense_layers or model.num_shared_experts
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
