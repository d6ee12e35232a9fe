from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from tests.contrib.torch_eager.steps import weighed  # noqa: E402

ROWS, WIDTH, VOCABULARY = 1024, 128, 8192
LOGITS = ROWS * VOCABULARY  # elements
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Script(nn.Module):
    """A small model of the form of speed-run scripts: documents in one row, capped logits, a loss in fp32."""

    def __init__(self, *, attends=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.attends = attends
        self.turned = None

    def forward(self, tokens, targets):
        x = F.rms_norm(self.embed(tokens), (WIDTH,))
        if self.attends:
            x = x + self.attention(x, tokens)
        logits = self.head(F.rms_norm(x, (WIDTH,)))
        logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(logits.float(), targets)

    def attention(self, x, tokens):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        documents = (tokens == 0).cumsum(0)

        def document_causal(b, h, q, k):
            return (q >= k) & (documents[q] == documents[k])

        mask = create_block_mask(document_causal, None, None, ROWS, ROWS, device=x.device)
        if self.turned is None:  # what a module keeps from its first call
            self.turned = torch.arange(ROWS, device=x.device).cos()
        q, k, v = (part.view(1, ROWS, 2, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q = q * self.turned.to(q.dtype)[:, None]
        return flex_attention(q, k, v, block_mask=mask).transpose(1, 2).reshape(ROWS, WIDTH)


def inputs():
    return torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, dtype=torch.long)


def weigh(module, on="1xH100", **how):
    how.setdefault("optimizer", torch.optim.AdamW)
    return weighed(module, *(how.pop("args", None) or inputs()), on=on, **how)


def made(**how):
    return Script(**how).to(torch.bfloat16)


def rank_of(weighing):
    return weighing.account.ranks[0]


def test_capped_logits_and_their_loss_keep_one_array_in_16_bits_where_they_are_compiled():
    eager, compiled = weigh(made()), weigh(torch.compile(made()))
    assert rank_of(eager).saved_activation_bytes > 6 * LOGITS  # tanh in bf16, the logarithms in fp32
    assert 2 * LOGITS < rank_of(compiled).saved_activation_bytes < 2.2 * LOGITS
    # The gradient of the logits takes their place: nothing else of that size is ever there.
    persistent = rank_of(compiled).parameters_bytes + rank_of(compiled).optimizer_state_bytes + 2**26
    assert rank_of(compiled).peak_bytes - persistent < 3 * LOGITS
    for name in ("flops_by_phase", "parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert getattr(rank_of(compiled), name) == getattr(rank_of(eager), name)


def test_the_verdict_says_that_it_is_by_a_model_of_inductor_in_all_its_forms():
    weighing = weigh(torch.compile(made()))
    lines = str(weighing).splitlines()
    assert lines[1].startswith("Weighed as Inductor compiles it (a model")
    assert lines[2].startswith("FITS")
    fields = weighing.to_dict()
    assert fields["source"] == "PyTorch, as Inductor compiles it (a model), on fake tensors"
    assert fields["ledger"]["memory"]["basis"].startswith("weighed as Inductor compiles it (a model")
    assert fields["ledger"]["memory"]["is_upper_bound"] is False
    assert fields["fits"] is fields["ledger"]["memory"]["fits"] is True
    plain = weigh(made()).to_dict()
    assert (plain["ledger"]["memory"]["basis"], plain["source"]) == ("", "PyTorch, eager, on fake tensors")


def test_a_script_with_a_mask_of_documents_is_compiled_whole():
    weighing = weigh(torch.compile(made(attends=True)))
    assert weighing.ledger.memory.basis.startswith("weighed as Inductor")
    assert 2 * LOGITS < rank_of(weighing).saved_activation_bytes < 2.6 * LOGITS
    assert any("depends on data" in words for words in weighing.ledger.assumptions)


def test_a_part_that_is_compiled_by_its_own_method_is_found_in_the_copy():
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)))
    x = (torch.zeros(ROWS, WIDTH),)
    eager = rank_of(weigh(module, args=x))
    for block in module:
        block.compile()
    weighing = weigh(module, args=x)
    assert weighing.ledger.memory.basis.startswith("weighed as Inductor")
    # Each block keeps its input and the product before the activation, as the eager ones do.
    assert rank_of(weighing).saved_activation_bytes == eager.saved_activation_bytes
    assert rank_of(weighing).peak_bytes == pytest.approx(eager.peak_bytes, rel=0.01)


def test_blocks_that_are_compiled_and_sharded_keep_their_messages():
    from torch.distributed.fsdp import fully_shard

    def plan(module, mesh):
        for block in module:
            block.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)

    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)))
    x = (torch.zeros(ROWS, WIDTH),)
    weighing = weigh(module, args=x, on="4xH100", parallelize=plan)
    assert weighing.ledger.memory.basis.startswith("weighed as Inductor")
    assert weighing.account.messages == weigh(module, args=x, on="4xH100").account.messages


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Script()

    def forward(self, tokens, targets):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.inner, tokens, targets, use_reentrant=False)


def test_what_is_not_modelled_is_an_upper_bound_and_never_said_not_to_fit():
    for on, fits, words in (("1xH100", True, "FITS"), ("1xA10G", None, "MAY NOT FIT: at most ")):
        rows = ROWS * (1 if fits else 512)
        args = (torch.zeros(rows, dtype=torch.long, device="meta"),) * 2
        weighing = weigh(torch.compile(Checkpointed()), on=on, args=args)
        lines = str(weighing).splitlines()
        assert lines[1] == "Upper bound: weighed without torch.compile"
        assert lines[2].startswith(words)
        memory = weighing.to_dict()["ledger"]["memory"]
        assert (weighing.fits, memory["fits"], memory["is_upper_bound"]) == (fits, fits, True)
        assert any("checkpoint" in each for each in weighing.ledger.assumptions)


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.double = nn.Linear(WIDTH, WIDTH), torch.compile(lambda x: x + x)

    def forward(self, x):
        return self.double(self.layer(x))


def test_a_function_that_was_compiled_before_is_weighed_as_it_was_written_and_said():
    weighing = weigh(Calls(), args=(torch.zeros(ROWS, WIDTH),))
    assert weighing.ledger.memory.basis == "upper bound: weighed without torch.compile"
    assert weighing.prediction is None
