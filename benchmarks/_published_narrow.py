"""Price products in 8 bits without the casts in their tables, for stacks whose casts are counted.

The tables of products in fp8 (`rates.toml`) time a linear layer: it finds a scale of its input and casts it,
two passes that take a third of the time at the median. Our own prices keep them, and fit dense runs so. Where
a stack's casts are counted by their bytes, they would be counted twice, the more the smaller a product is.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from _published_sizes import Sizes

from meshwright.predict import GemmRate
from meshwright.predict._rates import Machine, shared

NARROW = "fp8-e4m3"
Product = tuple[float, float, float, float]  # rows, columns, contracted, and how many of a layer


@functools.cache
def _rates() -> Mapping[str, GemmRate]:
    text = (Path(__file__).parent / "published_assumptions.toml").read_text()
    tables: list[dict[str, Any]] = tomllib.loads(text)["products_without_casts"]
    return {name: GemmRate(**table["rate"]) for table in tables for name in table["chips"]}


def without_casts(machine: Machine) -> Machine:
    """Return a machine whose products in 8 bits have no casts; the same where no table is known.

    They last at the share of the measured rate at which products in 16 bits do.
    """
    rate = _rates().get(machine.name)
    if rate is None:
        return machine
    lasting = replace(rate, efficiency=rate.efficiency * shared().factor_without_sustained)
    return replace(machine, rates=replace(machine.rates, gemm={**machine.rates.gemm, NARROW: lasting}))


def casts_in_products(sizes: Sizes, machine: Machine) -> float:
    """Return the seconds of casts in our prices of a layer's products, for a microbatch; not of experts'."""
    products = list(_of_layers(sizes))
    alone = without_casts(machine)
    return _seconds(products, machine) - _seconds(products, alone)


def _seconds(products: list[Product], machine: Machine) -> float:
    return math.fsum(
        times * float(machine.product_seconds(NARROW, m=m, n=n, k=k, num_bytes=m * k + k * n + 2 * m * n))
        for rows, columns, inner, times in products
        for m, n, k in ((rows, columns, inner), (rows, inner, columns), (inner, columns, rows))
    )


def _of_layers(sizes: Sizes) -> Iterator[Product]:
    """Yield the products of the mean layer, forward: rows, columns, contracted, and how many of a layer."""
    model, tokens, tensor = sizes.model, float(sizes.tokens), sizes.tensor
    mixed = sum(kind.mixer == "attention" for kind in model.kinds) / model.num_layers
    width = model.embed_dim
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    values = model.num_heads * (model.value_dim or model.head_dim)
    if model.latent_rank is not None:
        turned = model.rotary_dim or 0
        yield tokens, model.latent_rank + turned, width, mixed
        up = model.num_heads * (model.head_dim - turned) + values
        yield tokens, up / tensor, model.latent_rank, mixed
        if model.query_rank is not None:
            yield tokens, model.query_rank, width, mixed
            yield tokens, queries / tensor, model.query_rank, mixed
        else:
            yield tokens, queries / tensor, width, mixed
    else:
        yield tokens, (queries + 2 * keys) / tensor, width, mixed
    yield tokens, width, values / tensor, mixed
    gates = 2 if model.mlp == "gated" else 1
    for mlp, hidden in (("mlp", model.dense_mlp_dim or model.mlp_dim), ("experts", model.shared_dim)):
        share = sum(kind.mlp == mlp for kind in model.kinds) / model.num_layers
        if share and hidden:
            yield tokens, hidden / tensor, width, gates * share
            yield tokens, width, hidden / tensor, share
