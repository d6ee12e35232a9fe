"""Differences between PyTorch steps: what moved is named by line and by module."""

from __future__ import annotations

from functools import cache

import pytest

pytestmark = pytest.mark.quick
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.distributed._functional_collectives import all_reduce  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import meshwright as mw  # noqa: E402

WIDTH, HIDDEN, ROWS = 256, 1024, 8 * 512
PRODUCT = 2 * ROWS * WIDTH * HIDDEN


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.kind, self.mesh = kind, None

    def hidden(self, x):
        return torch.tanh(self.up(x))

    def summed_over_ranks(self, gradient):
        return all_reduce(gradient, "avg", self.mesh)

    def summed(self, x):
        hidden = self.hidden(x)
        if self.kind == "twice":
            hidden.register_hook(self.summed_over_ranks)
        if self.kind == "fp32":
            return (x + hidden.float() @ self.down.weight.float().T).to(x.dtype)
        return x + self.down(hidden)

    def forward(self, x):
        return (
            checkpoint(self.summed, x, use_reentrant=False) if self.kind == "checkpoint" else self.summed(x)
        )


class Harmless(Block):
    """The same in other words: other order, names and a helper, a comment, dead code, a logged value."""

    def forward(self, rows):
        # A comment.
        self.logged = rows.detach()
        return self.summed(rows)

    def _up(self, values):
        return self.up(values)

    def hidden(self, values):
        unused = values.shape
        assert unused
        return torch.tanh(self._up(values))

    def summed(self, rows):
        inside = self.hidden(rows)
        return rows + (lambda h: self.down(h))(inside)


@cache
def weighed(kind):
    from torch.distributed.fsdp import fully_shard

    def parallelize(module, mesh):
        for block in module:
            block.mesh = mesh
        if kind != "replicated":
            for block in module:
                fully_shard(block, mesh=mesh)
            fully_shard(module, mesh=mesh)
        return module

    block = Harmless if kind == "harmless" else Block
    module = nn.Sequential(block(kind), block(kind)).bfloat16()
    x = torch.zeros(8, ROWS // 8, WIDTH, dtype=torch.bfloat16)
    step = mw.torch_step(
        module,
        x,
        loss=lambda y: y.float().square().mean(),
        optimizer=torch.optim.AdamW,
        parallelize=parallelize,
    )
    return mw.weigh(step, on="8xH100", layout="fsdp=8")


def changes(kind, title):
    made = mw.diff(weighed("plain"), weighed(kind))
    for table in made.tables:
        assert sum(row.by for row in table.rows) == pytest.approx(table.by, rel=1e-6, abs=1e-12)
    return {row.name: row for row in next(table.rows for table in made.tables if table.title == title)}


def line_of(function, offset):
    return f"test_diff_torch.py:{function.__code__.co_firstlineno + offset}"


def test_recomputation_is_named_by_its_line():
    row = changes("checkpoint", "FLOPs by source line")["bf16"]
    assert (row.by, row.place) == (2 * 8 * PRODUCT, line_of(Block.hidden, 1))
    assert changes("checkpoint", "Memory of a device by category")["saved_activations"].by < 0


def test_a_product_in_fp32_is_named_by_its_line():
    row = changes("fp32", "FLOPs by source line")["fp32"]
    assert row.place == line_of(Block.summed, 5)
    assert row.after > 0 == row.before


def test_what_is_on_every_rank_is_named_by_its_category_and_messages():
    memory = changes("replicated", "Memory of a device by category")
    state = memory["optimizer_state"]
    assert state.after == pytest.approx(8 * state.before, rel=1e-4)  # but for the counts of steps
    assert any("all-gather" in name for name in changes("replicated", "Bytes that a device sends"))


def test_a_second_sum_over_the_ranks_is_named_by_its_line():
    sent = {row.place: row.by for row in changes("twice", "Bytes sent by source line").values()}
    place = line_of(Block.summed_over_ranks, 1)
    gradients = 2 * ROWS * HIDDEN * 2  # of both blocks, in bf16
    assert sent[place] == 2 * gradients * 7 / 8  # a ring sends an array twice but for its own part
    assert sum(sent.values()) == sent[place]


def test_seven_harmless_changes_are_silent():
    made = mw.diff(weighed("plain"), weighed("harmless"))
    assert made.is_nothing, made.sentences


def test_every_line_and_message_of_a_step_sums_to_its_totals():
    ledger = weighed("plain").ledger
    assert (
        sum(n for formats in ledger.flops.by_line.values() for n in formats.values()) == ledger.flops.executed
    )
    for message in ledger.traffic:
        assert sum(message.by_line.values()) == message.wire_bytes
