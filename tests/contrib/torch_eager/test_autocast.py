"""Under autocast a step on GPUs that are not there casts what CUDA casts, and leaves nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from meshwright.errors import InputError  # noqa: E402
from tests.contrib.torch_eager import steps  # noqa: E402

ROWS, WIDTH = 32, 64
BF16, FP32 = torch.bfloat16, torch.float32


class Runs(nn.Module):
    """A module that calls a function with itself and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.matrix = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def weighed(function, *inputs, on="1xH100", autocast=BF16, **how):
    inputs = inputs or (torch.zeros(ROWS, WIDTH),)
    return steps.weighed(Runs(function), *inputs, on=on, autocast=autocast, **how)


def saved(function, *inputs, **how):
    return weighed(function, *inputs, **how).account.ranks[0].saved_activation_bytes


def formats(function, *inputs, **how):
    """Return the formats of the results, which `function` returns by name."""
    found = {}

    def loss(output):
        found.update({name: tensor.dtype for name, tensor in output.items()})
        return sum(tensor.float().sum() for tensor in output.values())

    weighed(function, *inputs, loss=loss, **how)
    return found


def test_a_power_keeps_fp32_on_a_gpu_and_its_operand_on_a_cpu():
    def power(module, x):
        return module.layer(x).pow(3)

    assert saved(power) - saved(power, on="1xCPU") == ROWS * WIDTH * 2


def test_products_return_the_lower_format_and_norms_sums_and_losses_fp32():
    def results(module, x):
        half, whole = module.layer(x), x
        return {
            "linear": half,
            "matmul": half @ half.T,
            "einsum": torch.einsum("ij,kj->ik", whole, whole),
            "mv": torch.mv(module.matrix, whole[0]),
            "gelu": functional.gelu(half),
            "layer_norm": module.norm(half),
            "group_norm": functional.group_norm(half, 4),
            "softmax": half.softmax(-1),
            "log_softmax": functional.log_softmax(half, -1),
            "sum": half.sum(),
            "sum of rows": half.sum(0),
            "cumsum": half.cumsum(0),
            "prod": half.prod(0),
            "norm": half.norm(),
            "norm of rows": torch.norm(half, 2, 0),
            "exp": half.exp(),
            "rsqrt": half.rsqrt(),
            "mse_loss": functional.mse_loss(half, half.detach()),
            "cross_entropy": functional.cross_entropy(half, torch.zeros(ROWS, dtype=torch.long)),
        }

    lower = {"linear", "matmul", "einsum", "mv", "gelu"}
    assert formats(results) == {
        name: BF16 if name in lower else FP32 for name in formats(results, autocast=None)
    }


def test_some_operations_run_in_the_widest_format_of_their_operands_and_some_are_left_alone():
    def results(module, x):
        half, deep = module.layer(x), x.double()
        volume = half.view(1, 1, ROWS, 8, 8)
        return {
            "addcmul": torch.addcmul(half, half, x),
            "addcmul of halves": torch.addcmul(half, half, half),
            "cat": torch.cat([half, x]),
            "cat of halves": torch.cat([half, half]),
            "pool": functional.avg_pool3d(volume, 2),
            "pad": functional.pad(half[None], (1, 1), mode="reflect"),
            "softmax in a given format": half.softmax(-1, dtype=BF16),
            "exp of fp64": deep.exp(),
            "sum of fp64": deep.sum(),
        }

    assert formats(results) == {
        "addcmul": FP32,
        "addcmul of halves": BF16,
        "cat": FP32,
        "cat of halves": BF16,
        "pool": BF16,
        "pad": BF16,
        "softmax in a given format": BF16,
        "exp of fp64": torch.float64,
        "sum of fp64": torch.float64,
    }


def test_cross_entropy_keeps_its_probabilities_in_the_format_of_the_logits_and_again_in_fp32():
    labels = torch.zeros(ROWS, dtype=torch.long)

    def loss(module, x):
        return functional.cross_entropy(module.layer(x), labels)

    logits = ROWS * WIDTH
    # On a CPU the logits become fp32 first, so that both of its parts share one array.
    assert saved(loss) - saved(loss, on="1xCPU") in range(2 * logits, 2 * logits + 16)


def test_attention_casts_its_operands_before_the_kernel_is_chosen():
    batch, heads, length, width = 2, 4, 128, 64
    arrays = [torch.zeros(batch, heads, length, width, requires_grad=True) for _ in range(3)]

    def attention(module, *qkv):
        return functional.scaled_dot_product_attention(*qkv, is_causal=True)

    array, rows = batch * heads * length * width, batch * heads * length * 4
    assert saved(attention, *arrays) - 4 * array * 2 - rows in range(
        0, 33
    )  # its operands and result, and a seed
    assert saved(attention, *arrays, autocast=None) - array * 4 - rows in range(0, 33)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_in_the_same_formats(reentrant):
    def block(module, x):
        return module.norm(module.layer(x).pow(3))

    def whole(module, x):
        return checkpoint(lambda y: block(module, y), x, use_reentrant=reentrant)

    x = torch.zeros(ROWS, WIDTH, requires_grad=True)
    assert saved(whole, x) < saved(block, x)  # PyTorch itself compares the formats of the arrays
    products = [weighed(function, x).account.ranks[0].flops_by_phase for function in (block, whole)]
    assert products[1]["recomputed"] == products[0]["forward"] > 0


def test_a_weight_is_cast_once():
    def uses(count):
        def function(module, x):
            return sum(torch.einsum("ij,jk->ik", x, module.matrix) for _ in range(count))

        return saved(function)

    assert uses(2) - uses(1) < WIDTH * WIDTH * 2


def test_a_module_that_enters_autocast_for_cuda_itself_gets_it():
    def outside(module, x):
        return {"linear": module.layer(x), "power": module.layer(x).pow(2)}

    def inside(module, x):
        assert not torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype=BF16):
            assert torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") == BF16
            result = outside(module, x)
            with torch.autocast("cuda", enabled=False):
                return {**result, "island": module.layer(x)}

    assert formats(inside, autocast=None) == {"linear": BF16, "power": FP32, "island": FP32}


def test_a_function_with_casts_of_its_own_gets_them():
    class Doubles(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FP32)
        def forward(context, x):
            return 2 * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(context, *gradients):
            return 2 * gradients[0]

    assert formats(lambda module, x: {"doubled": Doubles.apply(module.layer(x))}) == {"doubled": FP32}


def test_a_loss_that_cuda_refuses_under_autocast_is_refused():
    def loss(module, x):
        return functional.binary_cross_entropy(module.layer(x).sigmoid().float(), torch.ones(ROWS, WIDTH))

    with pytest.raises(InputError, match="binary_cross_entropy_with_logits"):
        weighed(loss)
    weighed(loss, autocast=None)


def test_sharded_parameters_are_cast_too():
    def power(module, x):
        return module.layer(x).pow(3)

    kept = {}
    for on in ("2xH100", "2xCPU"):
        weighing = weighed(power, on=on, layout="fsdp=2")
        kept[on] = weighing.account.ranks[0].saved_activation_bytes
    assert kept["2xH100"] - kept["2xCPU"] == ROWS * WIDTH * 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_on_a_cpu_behaves_afterwards_as_before(fails):
    x = torch.ones(ROWS, WIDTH, dtype=BF16)

    def behaviour():
        with torch.autocast("cpu", dtype=BF16):
            made = (x.pow(2), functional.layer_norm(x, (WIDTH,)), x.sum(), x[None].cumsum(0), x @ x.T)
            pooled = functional.avg_pool3d(x.view(1, 1, ROWS, 8, 8), 2)
            asked = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
        return [tensor.dtype for tensor in (*made, pooled)], asked

    before = behaviour()

    def power(module, x):
        if fails:
            raise ValueError("a mistake in the module")
        return module.layer(x).pow(3)

    try:
        weighed(power)
    except InputError:
        assert fails
    assert behaviour() == before
    assert before[0][0] == BF16  # or nothing is told by it


def test_the_lists_are_those_of_this_pytorch():
    from meshwright.contrib.torch_eager import APPENDED, LOWER, WIDEST, WITH_FORMAT

    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this PyTorch comes without its headers")
    text = header.read_text()

    def listed(macro):
        body = text.split(f"#define {macro}(_)")[1].split("\n\n")[0]
        return {".".join(entry.replace(" ", "").split(",")) for entry in re.findall(r"_\(([\w, ]+)\)", body)}

    fp32 = listed("AT_FORALL_FP32")
    assert listed("AT_FORALL_LOWER_PRECISION_FP") <= LOWER
    assert listed("AT_FORALL_FP32_SET_OPT_DTYPE") <= WITH_FORMAT
    assert listed("AT_FORALL_PROMOTE") == WIDEST
    assert not fp32 & (LOWER | WITH_FORMAT | WIDEST | set(APPENDED))
