"""Price the products over `tensor` that Transformer Engine runs in pieces, beside their messages.

Source: Transformer Engine's userbuffers (transformer_engine/common/comm_gemm_overlap) in the settings of
NeMo's recipes (nemo/collections/llm/recipes/tp_overlap_configs/userbuffers.py: H100, 70B and 405B), which
Megatron Bridge has too:

* Ring exchange: the forward products that read gathered rows (queries, keys and values; the MLP's first)
  and the backward products that read gathered gradients (attention's output; the MLP's second) run one
  piece for each device of `tensor`, while the next piece arrives from a neighbour. Widths from 16,384 on
  have two pieces in one ("aggregate").
* Pipeline: the forward products whose sums are scattered run in four pieces. The last piece's scatter is
  waited for, and the scatter has 24 of the multiprocessors, or 16.
* Bulk: the other backward products run beside a gather or a scatter, which has 24 multiprocessors or 4.

Pieces fill their waves less, and fewer multiprocessors multiply. At the power limit the clock rises where
less of the chip works: power is multiprocessors at work times clock^3 (`power_exponent`), so products lose
the 2/3 power of what they would lose at one clock.

Not counted: the share of the power and of the memory that messages take.
"""

from __future__ import annotations

import math
from dataclasses import replace

from _published_sizes import Sizes

from meshwright.predict._formulas import collective_seconds
from meshwright.predict._rates import Machine

PIPELINE_PIECES = 4
AGGREGATED_WIDTH = 16384
# Multiprocessors that messages have beside a product, of the H100's settings for 70B.
OUTPUT_SCATTER, MLP_SCATTER, QUERY_SCATTER, FIRST_SCATTER, GATHER = 24, 16, 24, 4, 4


def seconds_in_pieces(sizes: Sizes, machine: Machine, *, eight_bits: bool) -> tuple[float, float]:
    """Return the seconds of a layer's products with their messages over `tensor`, and of the products alone.

    Both are of one microbatch. The messages are those of sequences that are split over `tensor`; whole
    experts have none.
    """
    model, tensor, has_experts = sizes.model, sizes.tensor, sizes.folds_experts
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden = model.mlp_dim * (2 if model.mlp == "gated" else 1)
    rows = float(sizes.tokens)
    products = _Products(machine=machine, eight_bits=eight_bits)
    gather = _message_seconds("all-gather", sizes, machine, num_bytes=1 if eight_bits else 2)
    scatter = _message_seconds("reduce-scatter", sizes, machine, num_bytes=2)
    pieces = max(tensor // 2, 2) if model.embed_dim >= AGGREGATED_WIDTH else tensor

    in_pieces = whole = 0.0
    firsts = [((queries + 2 * keys) / tensor, QUERY_SCATTER), (hidden / tensor, FIRST_SCATTER)]
    for columns, weight_scatter in firsts[: 1 if has_experts else 2]:
        width = float(model.embed_dim)
        whole += products.whole(rows, columns, width) + products.whole(rows, width, columns)
        whole += products.whole(width, columns, rows)
        in_pieces += max(products.split(rows, columns, width, pieces), gather)
        in_pieces += max(products.split(rows, width, columns, 1, taken=GATHER), gather)
        in_pieces += max(products.split(width, columns, rows, 1, taken=weight_scatter), scatter)
    lasts = [(queries / tensor, OUTPUT_SCATTER), (model.mlp_dim / tensor, MLP_SCATTER)]
    for depth, taken in lasts[: 1 if has_experts else 2]:
        width = float(model.embed_dim)
        of_weight = products.whole(depth, width, rows)
        whole += products.whole(rows, width, depth) + products.whole(rows, depth, width) + of_weight
        forward = products.split(rows, width, depth, PIPELINE_PIECES, taken=taken)
        last = scatter / PIPELINE_PIECES
        in_pieces += max(forward, scatter - last) + last
        in_pieces += max(products.split(rows, depth, width, pieces), gather) + of_weight
    return in_pieces, whole


def waited_seconds(sizes: Sizes, machine: Machine) -> float:
    """Return the seconds in which Megatron-LM without userbuffers waits for a layer's messages over `tensor`.

    They are in 16 bits. Forward: two gathers and two scatters; backward: two gathers of gradients. Inputs are
    gathered again, and the backward pass's sums scattered, beside a product each
    (megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication; Transformer
    Engine's modules likewise). A layer of whole experts has those of attention alone, half of them.
    """
    gather = _message_seconds("all-gather", sizes, machine, num_bytes=2)
    waited = 4 * gather + 2 * _message_seconds("reduce-scatter", sizes, machine, num_bytes=2)
    return waited / 2 if sizes.folds_experts else waited


class _Products:
    """The seconds of products on one machine, in one format."""

    def __init__(self, *, machine: Machine, eight_bits: bool) -> None:
        peaks = machine.peak_flops_per_second
        wide = "bf16" if "bf16" in peaks else "fp16"
        self._format = "fp8-e4m3" if eight_bits else wide
        self._bytes = 1 if eight_bits else 2
        self._machine, self._alone = machine, replace(machine, sustained_share=None)

    def whole(self, m: float, n: float, k: float) -> float:
        """Return the seconds of an [m, k] x [k, n] product."""
        return self._seconds(self._machine, m, n, k)

    def split(self, m: float, n: float, k: float, pieces: int, *, taken: int = 0) -> float:
        """Return the seconds of a product in pieces of its rows, on all multiprocessors but those `taken`."""
        whole = self.whole(m, n, k)
        sms = self._machine.num_sms
        assert sms is not None, "only GPUs run Transformer Engine"
        left = (sms - taken) / sms
        peaks = {name: peak * left for name, peak in self._alone.peak_flops_per_second.items()}
        fewer = replace(self._alone, num_sms=sms - taken, peak_flops_per_second=peaks)
        lost = pieces * self._seconds(fewer, m / pieces, n, k) / self._seconds(self._alone, m, n, k)
        at_limit = self._machine.sustained_flops_per_second(self._format) is not None
        return whole * max(lost, 1.0) ** (1 - self._machine.shared.power_exponent if at_limit else 1.0)

    def _seconds(self, machine: Machine, m: float, n: float, k: float) -> float:
        moved = self._bytes * (m * k + k * n) + 2 * m * n
        return float(machine.product_seconds(self._format, m=m, n=n, k=k, num_bytes=moved))


def _message_seconds(kind: str, sizes: Sizes, machine: Machine, *, num_bytes: int) -> float:
    """Return the seconds in which a microbatch's rows are gathered or scattered over `tensor`."""
    tensor = sizes.tensor
    members = min(tensor, machine.devices_per_domain)
    link = machine.inside_rate(members)
    assert link is not None
    wire = num_bytes * sizes.tokens * sizes.model.embed_dim * (tensor - 1) / tensor
    rate = machine.rates.collective_for(kind, members)
    inside = float(collective_seconds(rate, wire_bytes=wire, bytes_per_second=link))
    if tensor <= members:
        return inside
    assert machine.between_bytes_per_second is not None
    network = machine.between_bytes_per_second * machine.shared.network_efficiency * members
    return max(inside, wire / network) + machine.shared.network_alpha_seconds * (
        math.ceil(tensor / members) - 1
    )
