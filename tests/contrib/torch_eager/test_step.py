"""Memory and phases of a step, beside real runs: PyTorch's own hooks, optimizers, and allocator events."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random

import numpy as np
import pytest

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from meshwright.errors import InputError  # noqa: E402
from tests.contrib.torch_eager.steps import counted  # noqa: E402


def mean_square(output):
    return (output[0] if isinstance(output, tuple) else output).float().square().mean()


def storage_bytes(tensors) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def real_step(module, inputs, optimizer, loss, autocast):
    """Bytes that a real second step saves, keeps and peaks at."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), *inputs)}
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    cast = torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext()
    with hooks, cast:
        value = loss(module(*inputs))
    saved_bytes = storage_bytes([t for t in saved if t.untyped_storage().data_ptr() not in own])
    saved.clear()
    value.backward()
    gradients = storage_bytes([p.grad for p in module.parameters() if p.grad is not None])
    optimizer.step()
    optimizer.zero_grad()
    state = storage_bytes([t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)])
    before = storage_bytes([*module.parameters(), *module.buffers(), *inputs]) + state
    return saved_bytes, gradients, state, before + _most_allocated(module, inputs, optimizer, loss, autocast)


def _most_allocated(module, inputs, optimizer, loss, autocast) -> int:
    """By PyTorch's profiler, which the allocator tells of each block."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
            output = module(*inputs)
            value = loss(output)
        value.backward()
        optimizer.step()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


class Stateful(nn.Module):
    """GRU, embedding, tied output."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(50, 32), nn.GRU(32, 32, batch_first=True)
        self.out = nn.Linear(32, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.cell(self.embed(tokens))[0])


def perceptron():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(128, 64)


def convolutional():
    layers = (
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, groups=4), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 6 * 6, 10),
    )  # fmt: skip
    return nn.Sequential(*layers), torch.randn(8, 3, 16, 16)


def encoder():
    return nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0), torch.randn(8, 32, 64)


def encoder_with_dropout():
    return nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), torch.randn(8, 32, 64)


def stateful():
    return Stateful(), torch.randint(50, (4, 12))


ADAMW, SGD = torch.optim.AdamW, functools.partial(torch.optim.SGD, lr=0.1)
REAL = [(perceptron, SGD), (convolutional, ADAMW), (encoder_with_dropout, ADAMW), (stateful, SGD)]
MORE = [(convolutional, SGD), (encoder, SGD), (encoder_with_dropout, SGD)]
MORE += [(perceptron, ADAMW), (encoder, ADAMW), (stateful, ADAMW)]


@pytest.mark.parametrize(
    ("make", "optimizer"), [*REAL, *(pytest.param(*case, marks=pytest.mark.wide) for case in MORE)]
)
def test_every_byte_is_that_of_a_real_step(make, optimizer):
    module, *inputs = make()
    found = counted(module, *inputs, optimizer=optimizer, loss=mean_square).weighing
    (rank,), memory = found.account.ranks, found.ledger.memory
    real = real_step(module, inputs, optimizer(module.parameters()), mean_square, None)
    assert (rank.saved_activation_bytes, rank.gradients_bytes, rank.optimizer_state_bytes) == real[:3]
    assert rank.peak_bytes == pytest.approx(real[3], rel=0.01)  # a kernel may take a little for itself
    assert rank.peak_phase in ("forward", "backward", "optimizer")
    assert rank.peak_bytes == memory.peak_bytes == sum(memory.by_category.values())
    assert rank.rule_of_thumb_bytes == rank.parameters_bytes + sum(real[:3])


def test_autocast_keeps_copies_of_weights_as_a_real_step_does():
    module, x = perceptron()
    found = counted(module, x, loss=mean_square, autocast=torch.bfloat16)
    real = real_step(module, (x,), torch.optim.SGD(module.parameters()), mean_square, torch.bfloat16)
    assert found.rank.saved_activation_bytes == real[0]
    assert found.rank.bytes_by_format["saved_activations"].keys() == {"bf16", "fp32"}
    assert found.by_format.keys() == {"bf16"}
    assert "Copies of weights that autocast makes are among the saved activations" in found.assumptions


def test_an_lstm_keeps_what_pytorchs_own_form_keeps():
    module, x = nn.LSTM(16, 32, 2, bidirectional=True, batch_first=True), torch.randn(4, 8, 16)
    found = counted(module, x, loss=mean_square)
    with _no_onednn():
        real = real_step(module, (x,), torch.optim.SGD(module.parameters()), mean_square, None)
    assert found.rank.saved_activation_bytes == real[0]
    assert any(words.startswith("LSTM") for words in found.assumptions)


@contextlib.contextmanager
def _no_onednn():
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.before, self.reentrant = nn.Linear(8, 8), reentrant

    def forward(self, x):
        x = self.before(x)
        return x + (
            self.inside(x)
            if self.reentrant is None
            else checkpoint(self.inside, x, use_reentrant=self.reentrant)
        )


@pytest.mark.parametrize(("reentrant", "again"), [(False, 2048), (True, 4096)])
def test_a_checkpointed_block_is_recomputed_in_the_backward_pass(reentrant, again):
    x = torch.randn(4, 8)
    plain = counted(Checkpointed(None), x, loss=mean_square)
    found = counted(Checkpointed(reentrant), x, loss=mean_square)
    # Without reentering, PyTorch stops when it has what it saved: the second layer's product is not needed.
    assert found.recomputed == again
    assert found.backward == plain.backward + again
    assert (found.forward, found.model) == (plain.forward, plain.model)
    inside = found.modules["inside"]
    assert inside.flops_by_phase == {"forward": 4096, "recomputed": again, "backward": 8192}
    assert found.rank.saved_activation_bytes < plain.rank.saved_activation_bytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_function_belongs_to_the_module_that_called_it(reentrant):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            return checkpoint(
                lambda y: (y @ self.weight).relu() @ self.weight, x @ self.weight, use_reentrant=reentrant
            )

    found = counted(nn.Sequential(Outer(), nn.Linear(8, 1)), torch.randn(4, 8))
    outer = found.modules["0"].flops_by_phase
    assert outer["recomputed"] == found.recomputed > 0
    assert outer["backward"] == 512 + 2 * 1024


@pytest.mark.parametrize(("keeps", "kept_bytes"), [(True, 4 * 8 * (256 + 64)), (False, 0)])
def test_what_selective_checkpointing_keeps_is_saved(keeps, kept_bytes):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, operation, *_, **__):
        is_product = operation == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product and keeps else CheckpointPolicy.PREFER_RECOMPUTE

    class Selects(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

        def forward(self, x):
            return checkpoint(
                lambda x: self.down(self.up(x).relu()),
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )

    account = counted(Selects(), torch.zeros(8, 64))
    assert account.rank.saved_activation_bytes == kept_bytes
    assert account.recomputed == (0 if keeps else 2 * 8 * 64 * 256)  # the last product is not repeated


def test_backward_work_belongs_to_the_module_whose_forward_made_it():
    module = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)))
    found = counted(module, torch.randn(4, 8))
    rows = {
        scope: (each.flops_by_phase["forward"], each.flops_by_phase["backward"])
        for scope, each in found.modules.items()
    }
    assert rows == {
        "": (4608, 8704), "0": (512, 512), "1": (4096, 8192),
        "1/0": (2048, 4096), "1/1": (0, 0), "1/2": (2048, 4096),
    }  # fmt: skip
    assert found.weighing.ledger.flops.by_module == {"0": 1024, "1/0": 6144, "1/2": 6144}


def test_frozen_and_tied_parameters_and_buffers():
    module, tokens = stateful()
    tied = counted(module, tokens, optimizer=torch.optim.AdamW)
    assert tied.num_parameters == sum(p.numel() for p in module.parameters())
    module.cell.requires_grad_(False)
    found = counted(module, tokens, optimizer=torch.optim.AdamW).rank
    assert found.gradients_bytes == module.embed.weight.nbytes
    assert found.optimizer_state_bytes == 2 * module.embed.weight.nbytes + 4
    norm = nn.BatchNorm1d(8)
    assert counted(norm, torch.randn(4, 8)).rank.buffers_bytes == 2 * 8 * 4 + 8


def test_without_gradients_there_is_no_backward_pass():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.no_grad():
        found = counted(layer, x)
    assert (found.forward, found.backward) == (512, 0)
    assert (found.rank.saved_activation_bytes, found.rank.gradients_bytes) == (0, 0)
    assert "Nothing requires a gradient: there is no backward pass" in found.assumptions
    # A verdict on the forward pass alone must not pass for one on a step.
    (warning,) = found.weighing.warnings
    assert warning == "Nothing requires a gradient: there is no backward pass, and training would fail"
    with torch.inference_mode():
        assert counted(layer, x).forward == 512


def test_inputs_that_ask_for_a_gradient_get_one():
    found = counted(nn.ReLU(), torch.randn(4, 8, requires_grad=True))
    assert found.rank.gradients_bytes == 4 * 8 * 4


def test_sparse_gradients_hold_the_rows_that_were_looked_up():
    module, tokens = nn.Embedding(1000, 4, sparse=True), torch.tensor([3, 5, 3])
    found = counted(module, tokens, optimizer=torch.optim.SGD, loss=mean_square).rank
    mean_square(module(tokens)).backward()
    gradient = module.weight.grad
    assert gradient._indices().untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()
    assert found.gradients_bytes == gradient._values().untyped_storage().nbytes() == 3 * 4 * 4
    assert counted(nn.EmbeddingBag(10, 4), torch.tensor([[1, 2]])).rank.gradients_bytes == 160


def test_the_loss_is_given_or_the_outputs_own_or_the_sum():
    x = torch.randn(4, 8)
    assert any("No loss was given" in words for words in counted(nn.Linear(8, 8), x).assumptions)
    given = counted(nn.Linear(8, 8), x, loss=lambda output: F.mse_loss(output, torch.zeros(4, 8)))
    assert not any("loss" in words for words in given.assumptions)

    class Own(nn.Linear):
        def forward(self, x):
            from types import SimpleNamespace

            return SimpleNamespace(loss=super().forward(x).mean())

    assert any("own `loss`" in words for words in counted(Own(8, 8), x).assumptions)


def test_a_tensor_that_a_closure_holds_is_an_input():
    target = torch.zeros(4, 8)
    found = counted(nn.Linear(8, 8), torch.randn(4, 8), loss=lambda output: F.mse_loss(output, target))
    assert found.rank.inputs_bytes == 2 * target.nbytes
    labels = torch.zeros(2, 2, dtype=torch.long)
    found = counted(
        nn.Linear(8, 8), torch.randn(4, 8), loss=lambda output: F.cross_entropy(output, labels.view(-1))
    )
    assert found.rank.inputs_bytes == target.nbytes + labels.nbytes
    assert "int64" not in found.rank.bytes_by_format["saved_activations"]


def test_an_optimizer_that_multiplies_matrices_has_flops():
    found = counted(nn.Linear(8, 8, bias=False), torch.randn(4, 8), optimizer=torch.optim.Muon)
    # Five rounds of three products of 8 x 8 matrices.
    optimizer = found.rank.flops_by_phase["optimizer"]
    assert optimizer == 5 * 3 * 2 * 8**3
    assert found.weighing.ledger.flops.executed == found.forward + found.backward + optimizer


@pytest.mark.parametrize(
    "kind",
    ["Adagrad", "RMSprop", "Adafactor", "NAdam", "RAdam", "Rprop", "ASGD", "Adadelta", "Adamax", "Adam"],
)
def test_optimizers_keep_the_state_that_they_keep_really(kind):
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    made = getattr(torch.optim, kind)(module.parameters())
    found = counted(module, x, optimizer=getattr(torch.optim, kind)).rank.optimizer_state_bytes
    module(x).sum().backward()
    made.step()
    assert found == storage_bytes([t for s in made.state.values() for t in s.values() if torch.is_tensor(t)])


def test_nothing_of_the_user_changes():
    module, x = encoder_with_dropout()
    module.linear1.weight.grad = torch.ones_like(module.linear1.weight)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    before = copy.deepcopy(module.state_dict())
    gradient = module.linear1.weight.grad
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    counted(module, x, optimizer=torch.optim.AdamW)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.linear1.weight.grad is gradient
    assert bool((gradient == 1).all())
    assert all(p.grad is None for name, p in module.named_parameters() if name != "linear1.weight")
    assert torch._C._get_mkldnn_enabled()


def test_a_module_on_the_meta_device_costs_what_the_real_one_does():
    real, x = encoder()
    meta = copy.deepcopy(real).to("meta")
    of_real, of_meta = counted(real, x), counted(meta, x.to("meta"))
    assert of_meta.rank == of_real.rank
    assert of_meta.modules == of_real.modules
    assert of_meta.weighing.ledger == of_real.weighing.ledger


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda output: output, "the loss is a tensor of shape [4, 8], not one number"),
        (lambda output: 3.0, "the loss is a float, not one number"),
    ],
)
def test_a_loss_is_one_number(loss, words):
    with pytest.raises(InputError) as raised:
        counted(nn.Linear(8, 8), torch.randn(4, 8), loss=loss)
    assert raised.value.message == words
    assert raised.value.hint == "end it in .mean() or .sum()"


def test_an_optimizers_function_returns_an_optimizer():
    with pytest.raises(InputError, match="the optimizer's function returned a list"):
        counted(nn.Linear(8, 8), torch.randn(4, 8), optimizer=lambda parameters: parameters)


def test_an_optimizer_that_wants_a_closure_is_told_that_there_is_none():
    with pytest.raises(
        InputError, match=r"the optimizer failed inside PyTorch: TypeError.*closure"
    ) as raised:
        counted(nn.Linear(8, 8), torch.randn(4, 8), optimizer=torch.optim.LBFGS)
    assert raised.value.hint.startswith("its step() is called without a closure: weigh one that needs none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("make", [perceptron, convolutional, encoder])
def test_the_peak_is_that_of_a_gpus_allocator(make):
    module, *inputs = make()
    module, inputs = module.cuda(), [x.repeat(32, *[1] * (x.dim() - 1)).cuda() for x in inputs]
    on = f"1x{torch.cuda.get_device_name()}"
    found = counted(module, *inputs, on=on, optimizer=torch.optim.AdamW, loss=mean_square)
    optimizer = torch.optim.AdamW(module.parameters())
    square = torch.ones(8, 8, device="cuda", requires_grad=True)
    (square @ square).sum().backward()  # cuBLAS takes its workspaces, which are left out
    start = torch.cuda.memory_allocated() - storage_bytes([*module.parameters(), *module.buffers(), *inputs])
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        output = module(*inputs)
        mean_square(output).backward()
        optimizer.step()
        optimizer.zero_grad()
        del output
    # Scratch that kernels ask for is not counted: 1.5 MiB in the perceptron's backward pass on an H100.
    peak_bytes = torch.cuda.max_memory_allocated() - start
    ours = found.rank.peak_bytes - found.at_peak["workspaces"]
    assert ours == pytest.approx(peak_bytes, rel=0.05, abs=2 * 2**20)
