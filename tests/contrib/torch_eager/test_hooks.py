from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from meshwright.errors import InputError  # noqa: E402
from tests.contrib.torch_eager.steps import counted, weighed  # noqa: E402

WIDTH, LAYERS, ROWS = 256, 4, 2
LAYER_BYTES = WIDTH * WIDTH * 4


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def weigh(plan=None, module=None, **how):
    made = layers() if module is None else module
    return weighed(made, torch.zeros(ROWS, WIDTH), parallelize=plan, **how)


def in_the_backward_pass(module, mesh):
    """PyTorch's own tutorial: an optimizer for each parameter."""
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in module.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def lomo(module, mesh):
    def hook(parameter):
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def main_gradients(module, mesh):
    def hook(parameter):
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.register_post_accumulate_grad_hook(hook)


def rank_of(weighing):
    (rank,) = weighing.account.ranks
    return rank


def at_peak(weighing, category):
    return weighing.ledger.memory.by_category.get(category, 0)


def test_an_optimizer_in_the_backward_pass_keeps_its_state_and_one_gradient_at_a_time():
    weighing = weigh(in_the_backward_pass)
    rank = rank_of(weighing)
    assert rank.gradients_bytes == 0
    assert rank.optimizer_state_bytes == LAYERS * (2 * LAYER_BYTES + 4)
    first = weighing.ledger.memory.timeline.by_category["optimizer_state"][0]  # there from the beginning
    assert first == rank.optimizer_state_bytes
    assert at_peak(weighing, "gradients") == LAYER_BYTES
    usual = rank_of(weigh(optimizer=functools.partial(torch.optim.AdamW, foreach=False)))
    assert usual.gradients_bytes == LAYERS * LAYER_BYTES
    assert usual.optimizer_state_bytes == rank.optimizer_state_bytes
    # One array that its loop over parameters holds from the parameter before, and all gradients but one.
    saved = usual.peak_bytes - rank.peak_bytes
    assert saved == pytest.approx(LAYERS * LAYER_BYTES, abs=LAYER_BYTES / 4)
    assert rank.flops_by_phase == usual.flops_by_phase  # the pass before the counted one has none


def test_lomo_keeps_no_state_and_no_gradients():
    weighing = weigh(lomo)
    rank = rank_of(weighing)
    assert (rank.gradients_bytes, rank.optimizer_state_bytes) == (0, 0)
    assert at_peak(weighing, "gradients") <= LAYER_BYTES


def test_main_gradients_stay_in_their_own_format():
    module = layers().to(torch.bfloat16)
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)
    weighing = weighed(module, x, parallelize=main_gradients)
    rank = rank_of(weighing)
    assert rank.parameters_bytes == LAYERS * LAYER_BYTES // 2
    assert rank.gradients_bytes == LAYERS * LAYER_BYTES  # fp32, all of them
    assert weighing.ledger.memory.timeline.by_category["gradients"][0] == LAYERS * LAYER_BYTES


def test_hooks_run_on_the_gradients_of_shards():
    from torch.distributed.fsdp import fully_shard

    def plan(module, mesh):
        for layer in module:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        in_the_backward_pass(module, mesh)

    rank = weigh(plan, on="4xH100").account.ranks[0]
    assert rank.gradients_bytes == 0
    assert rank.optimizer_state_bytes == LAYERS * (2 * LAYER_BYTES // 4 + 4)


def test_a_hook_of_the_module_itself_runs_on_the_copy():
    module = layers()
    lomo(module, None)
    assert rank_of(weigh(module=module)).gradients_bytes == 0
    assert counted(module, torch.zeros(ROWS, WIDTH)).rank.gradients_bytes == 0
    assert all(p.grad is None for p in module.parameters())


def test_a_hook_that_looks_for_the_original_parameter_is_told_where_to_register_it():
    module = layers()
    in_the_backward_pass(module, None)
    with pytest.raises(InputError, match="the backward pass failed") as raised:
        weigh(module=module)
    assert "register it in parallelize" in raised.value.hint
