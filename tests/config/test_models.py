"""Parameter counts against published figures, and what a model refuses about itself."""

import pytest

from meshwright.config import CruncherModel, LeNetModel, LinearModel, TransformerModel, load_config
from meshwright.errors import InputError

# The released checkpoints' own counts: `sum(p.numel() for p in model.parameters())` of gpt2 and gpt2-xl,
# https://huggingface.co/openai-community; of Llama-2-7b, Meta-Llama-3-8B, -70B, Llama-3.1-405B,
# Llama-3.2-1B and Mixtral-8x7B-v0.1.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-1.5b": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(preset: str):
    assert load_config(preset).model.num_parameters == PUBLISHED[preset]


def test_a_token_uses_the_published_12_9_billion_of_mixtrals_parameters():
    """Table 1 of https://arxiv.org/abs/2401.04088 and the text below it. By hand: attention, the router, two
    experts and two norms of each layer, both tables, the last norm."""
    attention, expert = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14_336
    by_hand = 32 * (attention + 4096 * 8 + 2 * expert + 2 * 4096) + 2 * 32_000 * 4096 + 4096
    assert load_config("mixtral-8x7b").model.num_active_parameters == by_hand  # pyright: ignore
    assert round(by_hand / 1e9, 1) == 12.9
    llama = load_config("llama3-8b").model
    assert llama.num_active_parameters == llama.num_parameters  # pyright: ignore


def test_shared_experts_are_active_and_multiply():
    one = load_config("bytes-moe").model
    two = load_config("bytes-moe", ["model.num_shared_experts=2"]).model
    added = 2 * 2 * 3 * 64 * 128  # layers, experts, matrices
    assert two.num_parameters - one.num_parameters == added
    assert two.num_active_parameters - one.num_active_parameters == added  # pyright: ignore
    assert two.num_matmul_parameters - one.num_matmul_parameters == added


def test_a_shared_expert_may_have_a_width_and_a_gate_of_its_own():
    one = load_config("bytes-moe").model
    two = load_config("bytes-moe", ["model.shared_mlp_dim=96", "model.shared_gate=true"]).model
    added = 2 * (3 * 64 * 96 + 64)  # layers, matrices and the gate
    assert two.num_parameters - one.num_parameters == added
    assert two.num_matmul_parameters - one.num_matmul_parameters == added


def test_the_vectors_of_a_block_by_hand():
    nano = ("model.norm=layer", "model.parallel=true", "model.mlp=plain")
    one = load_config("bytes-nano", nano).model.num_parameters
    changes = ("model.one_norm=true", "model.norm_bias=true", "model.activation=xielu")
    two = load_config("bytes-nano", [*nano, *changes]).model.num_parameters
    assert two - one == 2 * (-64 + 64 + 2) + 64  # layers: a norm less, a bias and two numbers more; last norm


def test_layers_without_positions_make_groups():
    model = load_config("bytes-nano", ["model.num_layers=12", "model.no_rope_every=4"]).model
    assert model.windows == (None,) * 4
    assert [kind.has_positions for kind in model.period] == [True, True, True, False]
    changes = ["model.num_layers=12", "model.no_rope_every=4", "model.window=8", "model.global_every=6"]
    both = load_config("bytes-nano", changes).model
    assert [layer for layer, kind in enumerate(both.kinds, 1) if not kind.has_positions] == [4, 8, 12]
    assert [layer for layer, window in enumerate(both.windows, 1) if window is None] == [6, 12]


def test_gpt3_rounds_to_the_published_175_billion():
    assert load_config("gpt3-175b").model.num_parameters == pytest.approx(175.0e9, rel=0.003)


def test_the_matmul_parameters_of_a_small_transformer_by_hand():
    # bytes-nano: 2 layers, embed 64, 4 query and 2 key-value heads of 16, gated MLP of 128, 256 bytes
    query_and_output, key_and_value = 2 * 64 * 64, 2 * 64 * 32
    mlp, head = 3 * 64 * 128, 64 * 256
    model = load_config("bytes-nano").model
    assert model.num_matmul_parameters == 2 * (query_and_output + key_and_value + mlp) + head
    assert model.num_parameters == model.num_matmul_parameters + 256 * 64 + 5 * 64  # embedding, norms


def test_a_tied_head_multiplies_but_is_not_counted_twice():
    tied = load_config("gpt2-124m").model
    untied = load_config("gpt2-124m", ["model.tied_embeddings=false"]).model
    assert tied.num_matmul_parameters == untied.num_matmul_parameters
    assert untied.num_parameters - tied.num_parameters == 50_257 * 768


def test_cruncher_and_linear_count_as_the_course_does():
    cruncher = CruncherModel(kind="cruncher", width=64, num_layers=2)
    assert cruncher.num_parameters == 64 * 64 + 64 * 64 + 64
    assert cruncher.num_matmul_parameters == cruncher.num_parameters
    linear = LinearModel(kind="linear", input_dim=16, bias=True)
    assert (linear.num_parameters, linear.num_matmul_parameters) == (17, 16)


def test_lenet_counts_as_its_arrays_by_hand():
    lenet = LeNetModel(kind="lenet")
    assert lenet.num_matmul_parameters == 180 + 25_000 + 102_400 + 1_280
    assert lenet.num_parameters == lenet.num_matmul_parameters + 208


def test_the_head_dim_follows_from_embed_and_heads_unless_given():
    assert load_config("bytes-nano").model.head_dim == 16  # pyright: ignore
    assert load_config("bytes-nano", ["model.head_dim=32"]).model.head_dim == 32  # pyright: ignore


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["num_kv_heads=3"], "model.num_kv_heads = 3 does not divide num_heads = 4", "num_kv_heads = 2"),
        (["num_heads=6"], "model.head_dim is missing, and 64 / 6", "num_heads = 4 or 8"),
        (
            ["rope_theta=none"],
            "model.rope_theta is missing; position = 'rotary'",
            "set rope_theta to 10000.0",
        ),
        (
            ["position=learned", "rope_theta=none"],
            "model.max_positions is missing; position = 'learned'",
            "set max_positions",
        ),
        (
            ["position=learned", "max_positions=64"],
            "model.rope_theta = 10000.0 has no effect with position = 'learned'",
            'rope_theta = "none"',
        ),
        (["max_positions=64"], "model.max_positions = 64 has no effect", "leave max_positions out"),
        (["head_dim=15"], "model.head_dim = 15 is odd", "use head_dim = 16"),
        (["global_every=2"], "model.global_every = 2 has no effect without window", "leave global_every out"),
        (
            ["rope_local_theta=50.0"],
            "model.rope_local_theta = 50.0 has no effect without window",
            "leave rope_local_theta",
        ),
        (["rope_factor=8.0"], "rope_original_positions need each other", "set both"),
        (
            ["rope_factor=8.0", "rope_original_positions=64", "rope_stretching=linear"],
            "rope_original_positions need each other; 'linear' stretching is set",
            "the factor alone for linear",
        ),
        (["one_norm=true"], "model.one_norm = true has no effect without parallel = true", "leave one_norm"),
        (["qk_norm_turned=true"], "= true has no effect without qk_norm", "leave qk_norm_turned out"),
        (["norm_bias=true"], "= true has no effect without norm = ", "leave norm_bias out"),
        (
            ["position=learned", "rope_theta=none", "max_positions=64", "no_rope_every=4"],
            "model.no_rope_every = 4 has no effect without rotary positions",
            "leave no_rope_every out",
        ),
        (["position_growth=0.1"], "= 0.1 has no effect without rope_original", "leave position_growth out"),
        (["score_scale=0.1", "score_dim=8"], "= 0.1 is in place of score_dim = 8", "leave one of them out"),
        (["query_rank=8"], "model.query_rank = 8 has no effect without latent_rank", "leave query_rank out"),
        (["value_dim=8"], "model.value_dim = 8 has no effect without latent_rank", "leave value_dim out"),
        (
            ["latent_rank=8"],
            "model.rotary_dim = None; latent attention needs an even number",
            "set rotary_dim",
        ),
        (
            ["latent_rank=8", "rotary_dim=4", "num_kv_heads=2"],
            "model.num_kv_heads = 2, but with latent_rank each of num_heads has keys of its own",
            "use num_kv_heads = 4",
        ),
        (
            ["latent_rank=8", "rotary_dim=4", "qk_norm=head"],
            "model.qk_norm = 'head' is not run with latent_rank = 8",
            "use qk_norm = 'none'",
        ),
    ],
)
def test_a_transformer_that_contradicts_itself_is_refused(overrides: list[str], message: str, hint: str):
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", [f"model.{override}" for override in overrides])
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("preset", "override", "message", "hint"),
    [
        (
            "bytes-nano",
            "experts_per_token=2",
            "= 2 has no effect without num_experts",
            "leave experts_per_token",
        ),
        ("bytes-nano", "num_shared_experts=1", "= 1 has no effect without num_experts", "leave num_shared"),
        (
            "bytes-nano",
            "capacity_factor=1.5",
            "= 1.5 has no effect without num_experts",
            "leave capacity_factor",
        ),
        (
            "bytes-nano",
            "balancing_loss=0.1",
            "= 0.1 has no effect without num_experts",
            "leave balancing_loss",
        ),
        (
            "bytes-nano",
            "num_experts=4",
            "experts_per_token is missing; num_experts = 4",
            "experts_per_token to 1",
        ),
        ("bytes-moe", "experts_per_token=5", "= 5 is more than num_experts = 4", "use 4 at most"),
        ("bytes-moe", "bias=true", "experts have no biases", "use bias = false"),
        ("bytes-nano", "router_scale=2.0", "= 2.0 has no effect without num_experts", "leave router_scale"),
        ("bytes-nano", "router=sigmoid", "has no effect without num_experts", "leave router out"),
        ("bytes-moe", "router_groups=2", "router_groups_chosen need each other", "set both"),
        ("bytes-moe", "num_dense_layers=1", "dense_mlp_dim need each other", "set both"),
        ("bytes-moe", "num_dense_layers=99", "= 99 leaves no layer of", "or use fewer"),
        ("bytes-moe", "num_shared_experts=-1", "model.num_shared_experts", "0"),
        ("bytes-moe", "capacity_factor=0", "model.capacity_factor", "0"),
        ("bytes-moe", "activation=xielu", "= 'xielu' is run in one plain MLP", 'mlp = "plain"'),
        ("bytes-moe", "shared_gate=true", "there is no shared expert", "leave shared_gate out"),
        ("bytes-nano", "shared_mlp_dim=8", "= 8 has no effect without num_experts", "leave shared_mlp_dim"),
    ],
)
def test_experts_that_contradict_each_other_are_refused(preset: str, override: str, message: str, hint: str):
    with pytest.raises(InputError) as caught:
        load_config(preset, [f"model.{override}"])
    assert message in caught.value.message
    assert hint in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (("router_groups=3", "router_groups_chosen=1"), "= 3 does not divide num_experts = 4", "2 or 4"),
        (("router_groups=4", "router_groups_chosen=1"), "= 1 of 4 groups cannot hold", "use 4 at most"),
        (
            ("router_groups=4", "router_groups_chosen=2", "router=sigmoid"),
            "= 4 does not divide num_experts = 4, 2 or more to a group",
            "router_groups = 2",
        ),
        (
            ("num_dense_layers=1", "dense_mlp_dim=64", "window=8", "global_every=2"),
            "with layers that take turns (global_every) is not run",
            "leave one of them out",
        ),
    ],
)
def test_routing_by_groups_and_unlike_layers_are_checked(overrides, message: str, hint: str):
    with pytest.raises(InputError) as caught:
        load_config("bytes-moe", [f"model.{override}" for override in overrides])
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_the_positions_that_a_token_sees_by_hand():
    windows = load_config("gemma-2-2b").model
    assert (windows.windows, windows.num_layers) == ((4096, None), 26)
    local, whole = 4096 - 4096**2 / (2 * 8192), 4096
    assert windows.seen_positions(8192) == pytest.approx((local + whole) / 2)
    assert windows.seen_positions(4096) == 2048


def test_a_transformer_built_in_python_is_checked_as_well():
    with pytest.raises(ValueError, match="rope_theta is missing"):
        TransformerModel(
            kind="transformer",
            num_layers=1,
            embed_dim=8,
            num_heads=1,
            num_kv_heads=1,
            mlp_dim=8,
            vocab_size=8,
        )
