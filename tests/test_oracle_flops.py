"""FLOPs against counts that are none of ours: PyTorch's counter on the same architectures, and closed forms
by hand for every preset."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from _hand_counts import BY_HAND

import meshwright as mw
from meshwright.compiler import TracedFlops
from meshwright.config import RunConfig, load_config, preset_names
from meshwright.sharding import mesh_of
from meshwright.trainer.step import build_step
from meshwright.worker import count_traced

ROOT = Path(__file__).parents[1]


def traced(config: RunConfig) -> TracedFlops:
    """FLOPs of the step as JAX traces it: what `weigh` calls model FLOPs, without a compiler."""
    built = build_step(config, mesh_of((("data", 1),), jax.devices()[:1]))
    return count_traced(built.step.trace(built.state, built.batch).jaxpr.jaxpr, "cuda")


def passes(flops: TracedFlops) -> tuple[int, int]:
    return flops.by_phase["forward"], flops.by_phase["backward"]


# Closed forms, forward and backward; every multiply-add is two FLOPs.


def transformer(config: RunConfig) -> tuple[int, int]:
    """T tokens in sequences of S; width E, H heads and K key-value heads of D, an MLP of M, V tokens.

    A token meets, in each layer, E (H D) for its query, twice E (K D) for key and value, (H D) E on the way
    out, and two matrices of E by M in the MLP, three where it is gated; of X experts those of the k that it
    chooses, as if nothing were dropped, of the shared ones, and E by X in the router; at the end V by E.
    Position i of a sequence needs i + 1 scores of D multiply-adds in each head, and as many for the weighted
    sum: over a sequence S (S + 1) / 2 each, of which the convention keeps S^2 / 2.
    Every product has two gradients, each as dear as the product.
    """
    m, batch = config.model, config.batch
    heads, kv_heads = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    mlps = 1 if m.num_experts is None else m.experts_per_token + m.num_shared_experts
    mlp = {"plain": 2, "gated": 3}[m.mlp] * m.mlp_dim * mlps
    layer = m.embed_dim * (2 * heads + 2 * kv_heads + mlp + (m.num_experts or 0))
    tokens = batch.sequences * batch.sequence_length
    scores_and_sum = 2 * batch.sequences * batch.sequence_length**2 // 2 * heads
    forward = 2 * (
        tokens * (m.num_layers * layer + m.vocab_size * m.embed_dim) + m.num_layers * scores_and_sum
    )
    return forward, 2 * forward


def lenet(config: RunConfig) -> tuple[int, int]:
    """28 x 28 pixels by 3 x 3 leave 26 x 26, halved 13 x 13; by 5 x 5 they leave 9 x 9, halved 4 x 4.

    The first convolution has one gradient only: nobody asks for the images'.
    """
    first = 26 * 26 * 20 * 3 * 3
    others = 9 * 9 * 50 * 20 * 5 * 5 + 50 * 4 * 4 * 128 + 128 * 10
    rows = config.batch.sequences
    return 2 * rows * (first + others), 2 * rows * (first + 2 * others)


def resnet18(config: RunConfig) -> tuple[int, int]:
    """A convolution costs its whole window at each output, padding included, for each pair of channels.

    The stem has one gradient only: nobody asks for the images'.
    """
    rows, side = config.batch.sequences, -(-config.model.image_size // 2)
    stem, others = side**2 * 7 * 7 * 64, 0
    side = -(-side // 2)  # the largest of 3 x 3: no product
    channels = 64
    for width in (64, 128, 256, 512):
        for block in (1, 2):
            shrinks = width > 64 and block == 1
            side = -(-side // 2) if shrinks else side
            others += side**2 * (9 * channels * width + 9 * width * width)
            if shrinks:
                others += side**2 * channels * width
            channels = width
    others += 512 * 10
    return 2 * rows * (stem + others), 2 * rows * (stem + 2 * others)


def cruncher(config: RunConfig) -> tuple[int, int]:
    """L matrices of D by D and a column of D; the first matrix's input has no gradient."""
    rows, width, layers = config.batch.sequences, config.model.width, config.model.num_layers
    return 2 * rows * (layers * width**2 + width), 2 * rows * ((2 * layers - 1) * width**2 + 2 * width)


def linear(config: RunConfig) -> tuple[int, int]:
    """One column of D, whose input has no gradient."""
    once = 2 * config.batch.sequences * config.model.input_dim
    return once, once


CLOSED_FORMS = {
    "transformer": transformer,
    "lenet": lenet,
    "resnet18": resnet18,
    "cruncher": cruncher,
    "linear": linear,
}


# Presets of which another has the same fields with other sizes.
ALIKE = ("gpt2-1.5b", "llama2-7b", "llama3-70b", "llama3-8b", "lenet-fashion", "gpt3-175b")


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=pytest.mark.wide if name in ALIKE else ()) for name in preset_names()],
)
def test_every_presets_model_flops_are_a_closed_form(preset):
    config = load_config(preset, ["layout=data=-1"])
    found = traced(config)
    assert config.model.kind in CLOSED_FORMS, f"write the closed form of {config.model.kind}"
    assert passes(found) == CLOSED_FORMS[config.model.kind](config)
    assert found.unpriced == ()


LONG_TO_TRACE = "google/gemma-3-27b-it"  # whose blocks of queries are many


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.wide if name == LONG_TO_TRACE else ()) for name in BY_HAND]
)
def test_a_published_models_flops_are_those_of_a_count_by_hand(name):
    config = load_config(name)
    counted = sum(passes(traced(config)))
    assert counted == config.batch.tokens_per_step * BY_HAND[name](config.batch.sequence_length)


def test_what_a_module_for_further_tokens_and_a_gated_shared_expert_add_by_hand():
    changes = ["model.mtp_layers=1", "model.shared_mlp_dim=96", "model.shared_gate=true"]
    plain, more = (load_config("bytes-moe", ["layout=data=1", *changes[:n]]) for n in (0, 3))
    m, tokens = plain.model, plain.batch.tokens_per_step
    heads, kv_heads = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
    shared = m.embed_dim * (3 * 96 + 1)
    experts = m.embed_dim * (3 * m.mlp_dim * m.experts_per_token + m.num_experts)
    module = m.embed_dim * (2 * heads + 2 * kv_heads) + experts + shared
    module += 2 * m.embed_dim**2 + m.vocab_size * m.embed_dim  # the joint matrix, and the head once more
    scores_and_sum = plain.batch.sequence_length * heads
    added = 2 * tokens * (m.num_layers * shared + module + scores_and_sum)
    forward, backward = (a - b for a, b in zip(passes(traced(more)), passes(traced(plain)), strict=True))
    assert (forward, backward) == (added, 2 * added)
    per_token = m.num_layers * shared + module
    assert more.model.num_matmul_parameters - m.num_matmul_parameters == per_token


@pytest.mark.wide
@pytest.mark.parametrize("on", ["1xH100", "8xH100"])
def test_a_weighed_residual_network_has_the_flops_of_its_closed_form(on):
    weighed = mw.weigh("resnet18-fashion", on=on)
    assert weighed.ledger.flops.model == sum(resnet18(weighed.config))
    assert weighed.ledger.unpriced == ()
    assert weighed.compiled.num_parameters == 11_173_578


# PyTorch's counter: it counts matmuls and convolutions where torch dispatches them, attention whole.


@pytest.fixture(scope="module")
def torch():
    found = pytest.importorskip("torch", reason="PyTorch is not installed")
    importlib.import_module("torch.utils.flop_counter")
    return found


@pytest.fixture(scope="module")
def transformers(torch):
    return pytest.importorskip("transformers", reason="transformers is not installed")


def counted(torch, loss) -> tuple[int, int]:
    """FLOPs of `loss()` and of its backward pass, on torch's meta device."""
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter, torch.device("meta"):
        value = loss()
        forward = counter.get_total_flops()
        value.backward()
    return forward, counter.get_total_flops() - forward


def of_hugging_face(torch, transformers, config: RunConfig) -> tuple[int, int]:
    """Hugging Face's model of the same sizes: eager attention, so that its matmuls are seen."""
    m, length = config.model, config.batch.sequence_length
    if m.position == "learned":
        described = transformers.GPT2Config(
            n_embd=m.embed_dim,
            n_layer=m.num_layers,
            n_head=m.num_heads,
            n_inner=m.mlp_dim,
            n_positions=m.max_positions,
            vocab_size=m.vocab_size,
            attn_implementation="eager",
        )
    else:
        described = transformers.LlamaConfig(
            hidden_size=m.embed_dim,
            num_hidden_layers=m.num_layers,
            num_attention_heads=m.num_heads,
            num_key_value_heads=m.num_kv_heads,
            head_dim=m.head_dim,
            intermediate_size=m.mlp_dim,
            max_position_embeddings=length,
            vocab_size=m.vocab_size,
            attn_implementation="eager",
        )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described)
        ids = torch.zeros((1, length), dtype=torch.int64)
    return tuple(
        config.batch.sequences * flops
        for flops in counted(torch, lambda: model(input_ids=ids, labels=ids).loss)
    )


def acausal_half(config: RunConfig) -> int:
    """What a forward pass computes beyond S^2 / 2 scores a head, and beyond their weighted sum: as much."""
    m, batch = config.model, config.batch
    return 2 * batch.sequences * batch.sequence_length**2 * m.num_heads * m.head_dim * m.num_layers


@pytest.mark.parametrize("preset", ["bytes-nano", "gpt2-124m", "llama3-8b"])
def test_transformers_count_as_hugging_faces_do_but_for_the_acausal_half(torch, transformers, preset):
    config = load_config(preset, ["layout=data=-1"])
    forward, backward = passes(traced(config))
    half = acausal_half(config)
    assert of_hugging_face(torch, transformers, config) == (forward + half, backward + 2 * half)


def test_a_weighed_transformer_counts_as_hugging_faces(torch, transformers):
    weighed = mw.weigh("bytes-nano", on="8xH100", layout="data=2,fsdp=2,tensor=2")
    theirs = sum(of_hugging_face(torch, transformers, weighed.config))
    assert weighed.ledger.flops.model == theirs - 3 * acausal_half(weighed.config)


def test_products_that_the_compiler_merges_count_under_their_own_modules():
    flops = mw.weigh("bytes-nano", on="8xH100", layout="data=2,fsdp=2,tensor=2").ledger.flops
    names = [f"attention_block/{name}" for name in ("query", "key", "value")]
    names += [f"mlp_block/{name}" for name in ("gate", "up")]
    for name in (f"layers/{name}" for name in names):
        assert flops.by_module[name] == flops.model_by_module[name], name


def test_lenet_counts_as_torchs(torch):
    config, nn = load_config("lenet"), torch.nn
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2)),
            *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
            *(nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10)),
        )
        images = torch.zeros(config.batch.sequences, 1, 28, 28)
    assert passes(traced(config)) == counted(torch, lambda: model(images).sum())


def residual_network(torch, example):
    """examples/residual.py in torch: the same kernels, strides and shortcuts."""

    def normalised(x):
        return torch.nn.functional.batch_norm(x, None, None, training=True)

    def convolved(x, kernel, stride):
        return torch.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)

    def loss(params, images):
        x = torch.relu(normalised(convolved(images, params["stem"], 1)))
        for block in (f"stage{s}/block{b}" for s in range(3) for b in range(example.BLOCKS)):
            shrinks = block in ("stage1/block0", "stage2/block0")
            y = torch.relu(normalised(convolved(x, params[f"{block}/first"], 1 + shrinks)))
            y = normalised(convolved(y, params[f"{block}/second"], 1))
            if shrinks:
                x = normalised(convolved(x, params[f"{block}/shortcut"], 2))
            x = torch.relu(x + y)
        return (x.mean((2, 3)) @ params["head"]).sum()

    with torch.device("meta"):
        params = {name: torch.zeros(shape, requires_grad=True) for name, shape in example.shapes().items()}
        images = torch.zeros(example.BATCH, 3, example.SIDE, example.SIDE)
    return lambda: loss(params, images)


@pytest.mark.wide
def test_a_residual_network_counts_as_torchs(torch, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    example = importlib.import_module("examples.residual")
    weighed = mw.weigh("examples.residual:train_step", on="8xH100")
    assert passes(weighed.compiled.traced_flops) == counted(torch, residual_network(torch, example))
    # The compiled program's own count leaves the taps on padding out.
    assert weighed.ledger.flops.executed < weighed.ledger.flops.model
    assert weighed.ledger.unpriced == ()
    assert weighed.compiled.traced_flops.by_phase["recompute"] == 0


# ResNet-50 on one image of 224 x 224, as torchvision has it (stride in the 3 x 3): 4.09 GMAC.

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks and their inner width
RESNET50_GMAC = 4.089  # torchvision.models.ResNet50_Weights.IMAGENET1K_V1.meta["_ops"]


def convolutions_of_resnet50():
    """Side of the input, side of the window, channels in and out, stride; padding is half the window."""
    yield 224, 7, 3, 64, 2
    side, channels = 56, 64
    for stage, (blocks, width) in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            yield side, 1, channels, width, 1
            yield side, 3, width, width, stride
            yield side // stride, 1, width, 4 * width, 1
            if not block:
                yield side, 1, channels, 4 * width, stride
            side, channels = side // stride, 4 * width


def resnet50_by_hand() -> int:
    """Multiply-adds of all convolutions, and of the last layer."""
    return 2048 * 1000 + sum(
        (side // stride) ** 2 * window**2 * before * after
        for side, window, before, after, stride in convolutions_of_resnet50()
    )


def test_resnet50_is_4_09_billion_multiply_adds_in_jax():
    def forward(images, kernels, head):
        total = 0.0
        for image, kernel, (_, window, _, _, stride) in zip(
            images, kernels, convolutions_of_resnet50(), strict=True
        ):
            pads = [(window // 2, window // 2)] * 2
            total += jax.lax.conv_general_dilated(image, kernel, (stride, stride), pads).sum()
        return total + (jnp.zeros((1, 2048)) @ head).sum()

    shapes = list(convolutions_of_resnet50())
    images = [jax.ShapeDtypeStruct((1, before, side, side), jnp.float32) for side, _, before, _, _ in shapes]
    kernels = [
        jax.ShapeDtypeStruct((after, before, window, window), jnp.float32)
        for _, window, before, after, _ in shapes
    ]
    head = jax.ShapeDtypeStruct((2048, 1000), jnp.float32)
    step = jax.jit(jax.value_and_grad(forward, argnums=(0, 1)))
    counted = passes(count_traced(step.trace(images, kernels, head).jaxpr.jaxpr, "cuda"))
    macs = resnet50_by_hand()
    assert round(macs / 1e9, 3) == RESNET50_GMAC
    assert counted == (2 * macs, 4 * (macs - 2048 * 1000))  # the head's gradients are not asked for


def test_resnet50_is_4_09_billion_multiply_adds_in_torch_too(torch):
    nn = torch.nn
    with torch.device("meta"):
        layers = [
            nn.Conv2d(before, after, window, stride, window // 2)
            for _, window, before, after, stride in convolutions_of_resnet50()
        ]
        images = [torch.zeros(1, before, side, side) for side, _, before, _, _ in convolutions_of_resnet50()]
        head, features = nn.Linear(2048, 1000), torch.zeros(1, 2048)

    class Convolutions(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList(layers), head

        def forward(self, *images):
            each = (layer(image).sum() for layer, image in zip(self.layers, images, strict=True))
            return sum(each) + self.head(features).sum()

    module = Convolutions()
    flops = mw.weigh(mw.torch_step(module, *images), on="1xCPU").ledger.flops.by_phase
    assert flops["forward"] == 2 * resnet50_by_hand()
    assert (flops["forward"], flops["backward"]) == counted(torch, lambda: module(*images))
