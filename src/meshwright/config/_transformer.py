"""Define the keys of the Transformer, its parameter counts in closed form, and what the axes split.

One record holds GPT-2, Llama, Gemma and DeepSeek: each key adds or changes one part of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ._layer_kinds import (
    FIRST_LAYERS,
    GLOBAL_ATTENTION,
    LAYERS,
    LayerKind,
    Stretch,
    kind_of,
    stretches_of,
    word_of,
    words_of,
)
from ._mixer_keys import GlobalKeys
from ._model_kind import ModelSizes
from ._section import (
    LARGEST,
    AtLeastOne,
    Fraction,
    NotNegative,
    NotNegativeFloat,
    OptionalPositive,
    OptionalPositiveFloat,
    Positive,
    PositiveFloat,
    Problem,
    near_divisors,
    or_list,
    raise_problems,
)
from ._transformer_checks import transformer_problems

MOST_BY_ITSELF = 16  # stacked layers that `layer_loop = "auto"` unrolls


class TransformerModel(GlobalKeys):
    """A decoder: token embedding, `num_layers` blocks of attention and MLP, each after a norm; norm, head.

    With `num_experts` each block but the first `num_dense_layers` has that many MLPs of `mlp_dim`, and a
    router in float32 that sends each token to `experts_per_token` of them.
    """

    takes = "sequences"
    has_blocks = True
    kind: Literal["transformer"]
    """Kind of model. Effect: GPT, Llama and Mixtral are this one with other sizes."""
    num_layers: Positive
    """Blocks of attention and MLP.
    Effect: parameters, FLOPs and saved activations grow in proportion. Where `stage` does not divide it, the
    stages are padded. Unit: layers"""
    layer_pattern: str = ""
    """Parts of each layer, in words for one layer after the other; the words repeat up to `num_layers`.
    A word is a mixer (`attention`, `local`: attention with `window`, `nope`: attention without positions,
    `delta`, `mamba`), an MLP (`mlp`, `experts`), or both as in "delta+experts"; *3 repeats a word.
    Effect: each layer has the parameters and FLOPs of its own parts; stages hold whole patterns.
    Default: attention and an MLP, or experts, in each"""
    embed_dim: Positive
    """Width of the residual stream.
    Effect: parameters grow with its square where the other sizes follow; `fsdp` must divide it.
    Unit: numbers per token"""
    num_heads: Positive
    """Query heads of attention.
    Effect: `tensor` must divide it; with `head_dim` left to its default it changes no parameter count.
    Unit: heads"""
    num_kv_heads: Positive
    """Key and value heads, each shared by `num_heads` / `num_kv_heads` query heads.
    Effect: fewer save parameters and the keys and values that `context` sends. `tensor` must divide it, or
    be a multiple of it: each head then serves several devices.
    Unit: heads"""
    head_dim: Positive = Field(default_factory=lambda data: _default_head_dim(data))
    """Width of one head.
    Effect: attention's parameters and FLOPs grow in proportion; kernels want a multiple of 8. Unit: numbers
    Default: `embed_dim` / `num_heads`"""
    mlp_dim: Positive
    """Hidden width of the MLP, or of one expert.
    Effect: most of the parameters and FLOPs grow in proportion; `tensor` must divide it. Unit: numbers"""
    vocab_size: Annotated[int, Field(ge=2, le=LARGEST)]
    """Rows of the embedding table and of the head.
    Effect: both tables and the logits grow in proportion; ids of the data must be below it. A step pads sizes
    that do not suit the devices. Unit: tokens"""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm, before attention, MLP and head.
    Effect: the arithmetic of norms; a LayerNorm takes part in `bias`."""
    norm_epsilon: PositiveFloat = 1e-5
    """Number added to the mean square under the norm's root.
    Effect: bounds the norm of a vector that is nearly zero; nothing that is weighed. Unit: none"""
    position: Literal["rotary", "learned", "none"] = "rotary"
    """Rotary positions, a learned table that is added, or none beside the order that attention sees.
    Rotary ones turn queries and keys by angles.
    Effect: `rotary` needs `rope_theta`, `learned` needs `max_positions`."""
    max_positions: OptionalPositive = None
    """Rows of the learned position table.
    Effect: the longest sequence; a row of `embed_dim` parameters each. Unit: positions"""
    mlp: Literal["gated", "plain"] = "gated"
    """Form of the MLP.
    `gated` is activation(gate) x up, then down (three matrices); `plain` is up, activation, down (two).
    Effect: `gated` has half as many parameters again at the same `mlp_dim`. Gated with silu is SwiGLU."""
    activation: Literal["silu", "gelu", "gelu-erf", "gelu-quick", "relu", "relu2", "xielu"] = "silu"
    """Activation of the MLP.
    `gelu` is the tanh form that GPT-2 uses, `gelu-erf` the exact one, `gelu-quick` x sigmoid(1.702 x),
    `relu2` the square of `relu`; `xielu` has two learned numbers per layer ([Huang and Schlag
    2024](https://arxiv.org/abs/2411.13010)).
    Effect: elementwise arithmetic."""
    gate_limit: OptionalPositiveFloat = None
    """Largest gate of a gated MLP, and largest magnitude of what it multiplies, to which 1 is added.
    So gpt-oss has it.
    Effect: elementwise arithmetic. Unit: none"""
    tied_embeddings: bool = False
    """Use the embedding table, transposed, as the head. Its first values have a deviation of
    1/sqrt(3 `embed_dim`), where other weights have one over the root of their inputs
    ([Smith et al. 2022](https://arxiv.org/abs/2201.11990) use it for all weights).
    Effect: `vocab_size` x `embed_dim` parameters fewer; the FLOPs stay."""
    norm_bias: bool = False
    """Biases on LayerNorms alone, as Nemotron and StableLM have them; not with `bias`.
    Effect: a vector of `embed_dim` parameters per norm."""
    bias: bool = False
    """Biases on linear maps and LayerNorms; the head and RMSNorms have none.
    Effect: a few vectors of parameters per layer."""
    qkv_bias: bool = False
    """Biases on queries, keys and values alone, as Qwen2 has them; not with `bias`.
    Effect: three vectors of parameters per layer."""
    output_bias: bool = False
    """A bias on attention's output; not with `bias`.
    Effect: a vector of parameters per layer."""
    attention_sinks: bool = False
    """A learned score of each head in the softmax of attention, to which no value belongs (gpt-oss).
    Effect: a number of each head per layer; a fused kernel's output is scaled once more."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys before positions turn them.
    `head` is over the numbers of each head (Qwen3), `all` over those of all heads together (OLMo 2).
    Effect: two vectors of parameters per layer; with `all`, a sum over `tensor`."""
    value_norm: bool = False
    """RMSNorm without a scale of each head's values (Gemma 4).
    Effect: elementwise arithmetic."""
    attention_gate: bool = False
    """Multiply attention's output by the sigmoid of a linear map of its input, as Qwen3-Next does.
    Effect: as many parameters more per layer of attention as queries have."""
    qk_norm_turned: bool = False
    """Norm queries and keys after positions have turned them, as Hunyuan does; with `qk_norm`.
    Effect: nothing that is weighed."""
    embedding_scale: PositiveFloat = 1.0
    """Multiplies embeddings, as in Granite.
    Effect: nothing that is weighed but one product per number. Unit: none"""
    residual_scale: PositiveFloat = 1.0
    """Multiplies what attention and MLP add to the residual stream, as in Granite.
    Effect: nothing that is weighed but one product per number. Unit: none"""
    logit_scale: PositiveFloat = 1.0
    """Multiplies the logits, as in Cohere's models; Granite's `logits_scaling` is one over it.
    Effect: nothing that is weighed, since the last norm's scale takes it. Unit: none"""
    scaled_embedding: bool = False
    """Multiply embeddings by the root of `embed_dim`, as Gemma does.
    Effect: nothing that is weighed but one product per number."""
    norm_place: Literal["before", "after", "both"] = "before"
    """The place of the norms of attention and MLP: before each, after each (OLMo 2), or both (Gemma 2).
    Effect: `both` has two vectors of `embed_dim` parameters more per layer."""
    parallel: bool = False
    """Add attention and MLP to the same input, as GPT-NeoX does, instead of one after the other.
    Effect: both products can overlap; the parameters stay."""
    one_norm: bool = False
    """Give attention and MLP of a `parallel` block the same norm, as Cohere's models do.
    Effect: a norm fewer per layer."""
    window: OptionalPositive = None
    """Positions that attention sees, its own and those before it, as in Mistral.
    Effect: on longer sequences attention's FLOPs grow with the window in place of the sequence.
    Unit: positions"""
    global_every: OptionalPositive = None
    """Every that many layers, the last one sees all positions, and the others `window` (Gemma 2: 2).
    Effect: that of `window`, on the other layers alone; stages hold whole groups. Unit: layers"""
    no_rope_every: OptionalPositive = None
    """Every that many layers, positions do not turn the queries and keys of the last one (SmolLM3: 4).
    Effect: nothing that is weighed; stages hold whole groups. Unit: layers"""
    latent_rank: OptionalPositive = None
    """Width of the latent from which all heads' keys and values are made: DeepSeek-V2's attention.
    The last `rotary_dim` numbers of each key are one vector for all heads, which rotary positions turn.
    Effect: fewer parameters than `embed_dim` x heads; `fsdp` must divide it; not with `context`.
    Unit: numbers per token"""
    query_rank: OptionalPositive = None
    """Width of the latent from which queries are made; `none` makes them from the residual stream.
    Effect: two smaller matrices in place of one; `fsdp` must divide it; needs `latent_rank`.
    Unit: numbers per token"""
    rotary_dim: OptionalPositive = None
    """Numbers of each head, the last ones, that positions turn with `latent_rank`.
    Effect: parameters of as many numbers of keys, once for all heads. Unit: numbers"""
    value_dim: OptionalPositive = None
    """Width of one head's values with `latent_rank`.
    Effect: the parameters and FLOPs of values and of attention's output. Unit: numbers
    Default: `head_dim`"""
    score_dim: OptionalPositive = None
    """Number by whose root the scores of attention are divided, as Gemma 2 sets it.
    Effect: nothing that is weighed. Unit: numbers
    Default: `head_dim`"""
    score_scale: OptionalPositiveFloat = None
    """Multiplies the scores of attention, in place of one over the root of `score_dim` (Granite).
    Effect: nothing that is weighed. Unit: none
    Default: 1 / sqrt(`score_dim`)"""
    score_cap: OptionalPositiveFloat = None
    """Largest magnitude of attention's scores s, which become cap x tanh(s / cap) (Gemma 2).
    Effect: attention runs in plain blocks, since the fused kernel has none. Unit: none"""
    logit_cap: OptionalPositiveFloat = None
    """Largest magnitude of the logits, in the same way (Gemma 2).
    Effect: elementwise arithmetic on the logits. Unit: none"""
    mtp_layers: Annotated[int, Field(ge=0, le=16)] = 0
    """Modules that predict further tokens, each with a block like the last layer's (DeepSeek-V3: 1).
    They are trained and not exported; evaluation leaves them out. `--from` reads those of DeepSeek-V3.
    Effect: parameters and FLOPs of as many layers and heads more; no `stage`, no `lora`. Unit: modules"""
    mtp_loss: NotNegativeFloat = 0.3
    """Weight of the mean loss of `mtp_layers` in the loss of training; DeepSeek-V3 began with 0.3.
    Effect: nothing that is weighed. Unit: none"""
    dropout: Fraction = 0.0
    """Share of numbers set to zero on the embeddings and on each residual branch.
    Effect: above 0 it draws random numbers and saves masks. Unit: share"""
    unroll: bool = False
    """Write the blocks out one after the other instead of scanning over them.
    Effect: a longer compilation; on a CPU a faster step; not with `stage`."""
    loss_chunk: Positive = 512
    """Most positions of each sequence whose logits are held at once.
    Logits are the largest array of a small model; whole in fp32 those of a large vocabulary would not fit.
    Effect: larger chunks need more memory and fewer passes. Unit: positions"""
    num_experts: OptionalPositive = None
    """Experts of each block, of which a token meets `experts_per_token`; `none` is one MLP for all.
    Effect: parameters grow in proportion, FLOPs do not; `expert` must divide it. Unit: experts"""
    experts_per_token: OptionalPositive = None
    """Experts that each token is sent to.
    Effect: the MLP's FLOPs and messages over `expert` grow in proportion. Unit: experts"""
    expert_bias: bool = False
    """Biases on the products of experts and on the router's logits (gpt-oss).
    Effect: a few vectors of parameters for each expert."""
    expert_norms: bool = False
    """Norms of their own before and after experts, after shared ones, and of the router's input (Gemma 4).
    Experts have the residual stream as input, and a learned scale each. Effect: four vectors per layer."""
    num_shared_experts: NotNegative = 0
    """Experts beside those that every token meets.
    Effect: parameters and FLOPs of as many MLPs more. Unit: experts"""
    shared_mlp_dim: OptionalPositive = None
    """Hidden width of one MLP that every token meets beside its experts, in place of `num_shared_experts`.
    Effect: that of `mlp_dim`, for this MLP. Unit: numbers"""
    shared_gate: bool = False
    """Multiply the output of shared experts by the sigmoid of a product of the token with a vector.
    Effect: `embed_dim` parameters per layer (Qwen2-MoE, Qwen3-Next)."""
    num_dense_layers: NotNegative = 0
    """First layers that have one MLP of `dense_mlp_dim` for all tokens in place of experts (DeepSeek).
    Effect: fewer parameters; every stage runs them, for its share of the microbatches. Unit: layers"""
    dense_mlp_dim: OptionalPositive = None
    """Hidden width of the MLP of the first `num_dense_layers`.
    Effect: that of `mlp_dim`, in those layers. Unit: numbers"""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns a router's logits into scores (sigmoid: DeepSeek-V3).
    Effect: the choice is by score, and outputs are weighted by the scores of the chosen experts."""
    router_normalised: bool = True
    """Divide the scores of the chosen experts by their sum.
    Effect: nothing that is weighed."""
    router_scale: PositiveFloat = 1.0
    """Multiplies the weights of the chosen experts.
    Effect: nothing that is weighed. Unit: none"""
    router_bias: bool = False
    """Add a number of each expert to its score when experts are chosen, not when they are weighted.
    It is read from files and saved, and no gradient changes it; `router_bias_rate` does.
    Effect: `num_experts` numbers per layer, not counted as parameters."""
    router_bias_rate: NotNegativeFloat = 0.0
    """Change of an expert's `router_bias` in a step: up if it got fewer tokens than the mean, down if more.
    It balances experts without a loss (Wang et al. 2024); DeepSeek-V3 trained with 0.001. 0 leaves the bias.
    Effect: spreads the tokens over the experts; nothing that is weighed. Unit: scores"""
    router_groups: OptionalPositive = None
    """Groups of experts, side by side, of which a token chooses `router_groups_chosen` first.
    By a group's best score, or with `sigmoid` by the sum of its two best.
    Effect: nothing that is weighed. Unit: groups"""
    router_groups_chosen: OptionalPositive = None
    """Groups in which a token's experts may be.
    Effect: that of `router_groups`, which needs it. Unit: groups"""
    capacity_factor: OptionalPositiveFloat = None
    """Most tokens of a device that an expert takes, in multiples of its fair share; others are dropped.
    Effect: larger factors pad more and drop less; `none` drops nothing and pads little. Unit: fair shares"""
    expert_load: AtLeastOne = 1.0
    """Tokens of the device whose experts get most, over the mean of all devices, as far as prices go.
    Effect: multiplies the predicted time of the experts and of their messages; the program is the same. With
    `capacity_factor` it changes nothing. 1.0 is a balanced router. Unit: none"""
    balancing_loss: NotNegativeFloat = 0.0
    """Weight of the load-balancing loss in the loss of training.
    Effect: spreads the tokens over the experts; nothing that is weighed. Unit: none"""

    @property
    def num_parameters(self) -> int:
        """Number of parameters, each counted once (a tied head adds none).

        With V vocabulary, E embed, L layers, H heads and K key-value heads of size D, M hidden of the
        MLP with G matrices (3 gated, 2 plain), P learned positions (0 if rotary), n = E per norm
        (2 E for a LayerNorm with bias), of which a block has 1 to 4:
            V E (+ V E if the head is its own) + P E + n + L (2 n + attention + MLP (+ 2 of an xIELU))
            attention = E H D + 2 E K D + H D E    (+ H D + 2 K D + E biases; + 2 D for norms of heads,
                                                    or (H + K) D for one of all; + E H D for a gate)
            MLP       = G E M                      (+ (G - 1) M + E biases)
        With X routed and S shared experts, MLP = (X + S) G E M, and the router adds E X; biases of experts
        X ((G - 1) M + E + 1), sinks H, a bias of attention's output E. Shared experts may have their own M,
        and a gate of E. The first layers without experts have their own M. With a latent of width R, one of
        Q for queries (or none, Q = E and no norm of it), T rotary numbers of a head and values of width U:
            attention = (E Q + Q) + Q H D + E (R + T) + R + R H (D - T + U) + H U E
        A layer has the parts that `layer_pattern` names, with a norm (n) for each. Layers that see all
        positions may have their own D and K, and no matrix of values. A module that predicts further tokens
        has the last layer's, three norms, and a matrix of 2 E^2.
        """
        norm = self.embed_dim * (2 if self.has_norm_biases else 1)
        attention = sum(count * model._num_attention_vectors for model, count in self.attentions)
        mlp = ((self._num_mlp_matrices - 1) * self.plain_mlp_dim + self.embed_dim) * self.bias
        mlp += 2 if self.activation == "xielu" else 0
        parts = sum((kind.mixer is not None) + (kind.mlp is not None) for kind in self.kinds)
        parts = self.num_layers if self.one_norm else parts
        norms = parts * norm * (2 if self.norm_place == "both" else 1)
        vectors = attention + self.count(mlp="mlp") * mlp + norms
        vectors += self.count(mixer="delta") * (self.num_delta_parameters - self.num_delta_matrix_parameters)
        vectors += self.count(mixer="mamba") * (self.num_mamba_parameters - self.num_mamba_matrix_parameters)
        tables = self.vocab_size * (1 if self.tied_embeddings else 2) + (self.max_positions or 0)
        matrices = self._matmul_parameters(self.num_experts or 0)
        biases = (self.num_experts or 0) * (self._num_expert_biases + self.expert_bias)
        if self.expert_norms:
            biases += (3 if self.shared_dim else 2) * norm + self.embed_dim + (self.num_experts or 0)
        vectors += self.num_expert_layers * biases + self.mtp_layers * 3 * norm
        further = self.mtp_layers * self._num_joint + self._of_further(lambda one: one.num_parameters)
        return tables * self.embed_dim + norm + vectors + matrices + further

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses: all but those of the experts to which it is not sent.

        The unused experts have L (X - k) G E M, and their biases. This number is published as "active": 12.9B
        of Mixtral 8x7B's 46.7B (https://arxiv.org/abs/2401.04088).
        """
        idle = (self.num_experts or 0) - (self.experts_per_token or 0)
        each = self.num_mlp_parameters + self._num_expert_biases
        with_experts = self.num_expert_layers + self.mtp_layers * (self.period[-1].mlp == "experts")
        return self.num_parameters - with_experts * idle * each

    @property
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply a token: those of attention and MLPs, and V E for the head.

        The head counts even if it is tied. The embedding, which is a lookup, does not count, nor do norms and
        biases. Of X experts only the k to which a token is sent count; the shared experts and the router
        count too.
        """
        own = self._matmul_parameters(self.experts_per_token or 0) + self.vocab_size * self.embed_dim
        each = self._num_joint + self.vocab_size * self.embed_dim
        return own + self.mtp_layers * each + self._of_further(lambda one: one.num_matmul_parameters)

    @property
    def _num_joint(self) -> int:
        """Number of weights of the matrix that joins a token with a hidden state: 2 E^2."""
        return 2 * self.embed_dim**2

    def _of_further(self, count: Callable[[TransformerModel], int]) -> int:
        """Return a count of the blocks that predict further tokens: each is like the last layer."""
        if not self.mtp_layers:
            return 0
        last = word_of(self.period[-1]) if self.layer_pattern else ""
        alike = {"layer_pattern": last, "num_dense_layers": 0, "mtp_layers": 0}
        size = 1 if self.layer_pattern else len(self.period)
        without, whole = (self.model_copy(update={**alike, "num_layers": 2 * size - n}) for n in (1, 0))
        return self.mtp_layers * (count(whole) - count(without))

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""
        width, hidden = self.embed_dim, (self.num_experts or 1) * self.mlp_dim
        return ModelSizes(
            input_shape=(),
            num_token_ids=self.vocab_size,
            split_dims={
                "layers": {self._stacked_layers: self.num_stacked_layers, **self._unlike},
                "latent": {
                    f"model.{name}": size
                    for name in ("latent_rank", "query_rank")
                    if (size := getattr(self, name)) is not None
                }
                | self.state_sizes("latent"),
                "experts": {"model.num_experts": self.num_experts} if self.num_experts else {},
                "embed": {"model.embed_dim": width},
                "heads": {"model.num_heads": self.num_heads, **self.state_sizes("heads")},
                "kv_heads": {
                    "model.num_kv_heads": self.num_kv_heads,
                    **({"model.global_kv_heads": heads} if (heads := self.global_kv_heads) else {}),
                    **self.state_sizes("kv_heads"),
                },
                "mlp": {
                    "model.mlp_dim": self.mlp_dim,
                    **{
                        f"model.{name}": size
                        for name in ("dense_mlp_dim", "shared_mlp_dim")
                        if (size := getattr(self, name)) is not None
                    },
                },
                "vocab": {"model.vocab_size": self.vocab_size},
            },
            layer_outputs=width * self.num_layers,
            layer_outputs_rule="tokens x width x layers: one output of each block",
            widest_activation=max(width, self.num_heads * self.head_dim, hidden, self.vocab_size),
            scores=self.num_heads,
        )

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Return the stretches of layers, each of which has stacked parameters of its own."""
        if self.layer_pattern:
            kinds = tuple(kind_of(word, self.window) for word in words_of(self.layer_pattern))
            return stretches_of(kinds, self.num_layers)
        mlp, first = "mlp" if self.num_experts is None else "experts", self.num_dense_layers
        every, turned = self.global_every or 1, self.no_rope_every or 1
        period = tuple(
            LayerKind(
                "attention",
                mlp,
                window=None if self.global_every and number % every == 0 else self.window,
                has_positions=not (self.no_rope_every and number % turned == 0),
            )
            for number in range(1, math.lcm(every, turned) + 1)
        )
        layers = Stretch(LAYERS, period, self.num_layers - first, first)
        dense = (LayerKind("attention", "mlp", self.window),)
        return (Stretch(FIRST_LAYERS, dense, first, 0), layers) if first else (layers,)

    @property
    def kinds(self) -> Iterator[LayerKind]:
        """Return the kind of each layer."""
        return (kind for stretch in self.stretches for kind in stretch.kinds)

    @property
    def period(self) -> tuple[LayerKind, ...]:
        """Return the kinds of the layers that stages share; groups of layers repeat them."""
        return self.stretches[-1].period

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer of the period; None sees all positions, or is no attention."""
        return tuple(kind.window for kind in self.period)

    def count(self, *, mixer: str | None = None, mlp: str | None = None) -> int:
        """Return the number of layers with this mixer, or with this MLP.

        >>> from ._load import load_config
        >>> load_config("mixtral-8x7b").model.count(mlp="experts")
        32
        """
        return sum(stretch.count(mixer=mixer, mlp=mlp) for stretch in self.stretches)

    def group_size(self, remat: str) -> int:
        """Return the number of layers after which their kinds, and their policies under `remat`, repeat."""
        return math.lcm(len(self.period), len(block_policies(remat)))

    @property
    def num_first_layers(self) -> int:
        """Number of layers without experts before those that stages share."""
        return self.num_layers - self.num_stacked_layers

    @property
    def num_stacked_layers(self) -> int:
        """Number of layers that stages share: all but first ones without experts."""
        layers = self.stretches[-1]
        return layers.num_layers if layers.name == LAYERS else self.num_layers

    @property
    def _stacked_layers(self) -> str:
        """The words for `num_stacked_layers` in an error."""
        return "model.num_layers" + " - model.num_dense_layers" * (self.num_dense_layers > 0)

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        return self.count(mlp="experts")

    @property
    def num_attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.count(mixer="attention")

    @property
    def of_global_layers(self) -> TransformerModel | None:
        """Return the model whose attention is that of layers that see all positions, if that is another."""
        if self.global_head_dim is None:
            return None
        changes: dict[str, Any] = {"head_dim": self.global_head_dim, "global_head_dim": None}
        return self.model_copy(update={**changes, "num_kv_heads": self.global_kv_heads or self.num_kv_heads})

    @property
    def attentions(self) -> tuple[tuple[TransformerModel, int], ...]:
        """Return the models whose attention layers have, with the number of such layers."""
        unlike = self.of_global_layers
        if unlike is None:
            return ((self, self.num_attention_layers),)
        wide = sum(kind.mixer == "attention" and kind.window is None for kind in self.kinds)
        narrow = self.model_copy(update={"global_key_is_value": False})
        return (narrow, self.num_attention_layers - wide), (unlike, wide)

    def of_kind(self, kind: LayerKind) -> tuple[TransformerModel, str | None]:
        """Return the model whose attention a layer has, and the name of the layer's mixer among its parts."""
        if kind.mixer != "attention" or self.global_head_dim is None:
            return self, kind.mixer
        narrow, wide = self.attentions
        return (wide[0], GLOBAL_ATTENTION) if kind.window is None else (narrow[0], kind.mixer)

    @property
    def _unlike(self) -> dict[str, int]:
        """Return in words the most stages of layers that are not alike; nothing if all are alike."""
        size = len(self.period)
        if self.stretches[-1].name != LAYERS:
            return {"the most stages for a model.layer_pattern that does not repeat as a whole": 1}
        if size == 1:
            return {}
        whole = self.num_stacked_layers // size if self.num_stacked_layers % size == 0 else 1
        named = [name for name in ("global_every", "no_rope_every") if getattr(self, name) == size]
        named += ["layer_pattern"] if self.layer_pattern else []
        which = f"model.{named[0]} = {size} layers" if named else f"{size} layers"
        return {f"the most stages for whole groups of {which}": whole}

    def seen_positions(self, length: int) -> float:
        """Return the positions that a token of a sequence sees on average over tokens and layers.

        Half the sequence; with a window W in a longer sequence S, W - W^2 / (2 S); none in a layer without
        attention. Wider heads count by their width.

        >>> from ._load import load_config
        >>> load_config("llama3-8b").model.seen_positions(8192)
        4096.0
        """
        wider = (self.global_head_dim or self.head_dim) / self.head_dim
        seen = [
            (min(kind.window or length, length), wider if kind.window is None else 1.0)
            for kind in self.kinds
            if kind.mixer == "attention"
        ]
        return sum(width * (window - window**2 / (2 * length)) for window, width in seen) / self.num_layers

    @property
    def num_state_flops(self) -> int:
        """FLOPs of all layers' states for a token, forward: 6 K V of a head's, or 4 N P of Mamba-2's."""
        delta = 6 * (self.delta_heads or 0) * (self.delta_key_dim or 0) * (self.delta_value_dim or 0)
        mamba = 4 * (self.mamba_heads or 0) * (self.mamba_state_dim or 0) * (self.mamba_head_dim or 0)
        return self.count(mixer="delta") * delta + self.count(mixer="mamba") * mamba

    def unrolls(
        self, layer_loop: str, *, remat: str, platform: str, num_devices: int, num_layers: int
    ) -> bool:
        """Return whether a program has `num_layers` stacked layers without a loop.

        Args:
            layer_loop, remat: of the run.
            platform: the target's: "cuda", "tpu" or "cpu".
            num_devices: those of the mesh.
            num_layers: those of one stage.
        """
        if layer_loop != "auto":
            return layer_loop == "unroll"
        # On several GPUs XLA would join the messages of all layers into one that nothing hides. A block that
        # saves its input alone has little to copy; experts compile slowly, each by itself.
        one_gpu = platform == "cuda" and num_devices == 1
        worth = one_gpu and "full" not in block_policies(remat) and self.num_experts is None
        return worth and num_layers <= MOST_BY_ITSELF and len(self.period) == len(self.stretches) == 1

    @property
    def has_fp8_products(self) -> bool:
        """True: those of every token, and those of experts."""
        return True

    def length_problems(self, length: int) -> Iterator[Problem]:
        """Yield the problem of sequences that are longer than the learned positions."""
        if self.max_positions is not None and length > self.max_positions:
            what = f"= {length} is longer than model.max_positions = {self.max_positions} learned positions"
            yield "batch.sequence_length", what, f"use at most batch.sequence_length = {self.max_positions}"

    @property
    def _num_mlp_matrices(self) -> int:
        return 3 if self.mlp == "gated" else 2

    @property
    def num_mlp_parameters(self) -> int:
        """Number of weights of one MLP or one expert: G E M."""
        return self._num_mlp_matrices * self.embed_dim * self.mlp_dim

    @property
    def has_norm_biases(self) -> bool:
        """Return whether norms of the residual stream have biases."""
        return self.norm == "layer" and (self.bias or self.norm_bias)

    @property
    def shared_dim(self) -> int:
        """Hidden width of the shared experts of a layer together; 0 if there are none."""
        return self.shared_mlp_dim or self.num_shared_experts * self.mlp_dim

    @property
    def num_shared_parameters(self) -> int:
        """Number of weights of the shared experts of a layer, and of their gate."""
        gate = self.embed_dim if self.shared_gate else 0
        return self._num_mlp_matrices * self.embed_dim * self.shared_dim + gate

    @property
    def _num_expert_biases(self) -> int:
        """Number of biases of one expert: (G - 1) M + E."""
        return ((self._num_mlp_matrices - 1) * self.mlp_dim + self.embed_dim) * self.expert_bias

    @property
    def num_attention_parameters(self) -> int:
        """Number of weights of one layer's attention."""
        width, heads = self.embed_dim, self.num_heads
        if self.latent_rank is None:
            gate = width * heads * self.head_dim * self.attention_gate
            return 2 * width * heads * self.head_dim + self.num_key_parameters + gate
        rank, turned, value = self.latent_rank, self.rotary_dim or 0, self.value_dim or self.head_dim
        query = width * heads * self.head_dim
        if self.query_rank is not None:
            query = self.query_rank * (width + heads * self.head_dim)
        keys_and_values = width * (rank + turned) + rank * heads * (self.head_dim - turned + value)
        return query + keys_and_values + heads * value * width

    @property
    def num_key_parameters(self) -> int:
        """Number of weights of one layer's keys and values, without a latent."""
        return (2 - self.global_key_is_value) * self.embed_dim * self.num_kv_heads * self.head_dim

    @property
    def _num_attention_vectors(self) -> int:
        """Number of attention's parameters in one layer beside its weights."""
        vectors = (self.latent_rank or 0) + (self.query_rank or 0)
        vectors += self.num_heads * self.attention_sinks + self.embed_dim * self.output_bias
        if self.bias or self.qkv_bias:
            vectors += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.bias:
            vectors += self.embed_dim + self.attention_gate * self.num_heads * self.head_dim
        if self.qk_norm != "none":
            heads = (1, 1) if self.qk_norm == "head" else (self.num_heads, self.num_kv_heads)
            vectors += sum(heads) * self.head_dim
        return vectors

    @property
    def plain_mlp_dim(self) -> int:
        """Hidden width of an MLP in a layer without experts."""
        return self.mlp_dim if self.num_experts is None else self.dense_mlp_dim or 0

    @property
    def num_first_parameters(self) -> int:
        """Number of weights of the MLPs in layers without experts."""
        return self.count(mlp="mlp") * self._num_mlp_matrices * self.embed_dim * self.plain_mlp_dim

    @property
    def num_dense_parameters(self) -> int:
        """Number of weights of the MLPs that every token meets, in all layers; with shared experts."""
        return self.num_first_parameters + self.num_expert_layers * self.num_shared_parameters

    def _matmul_parameters(self, routed: int) -> int:
        """Return the weights of all layers: attention, dense MLPs, routers and `routed` experts of each."""
        each = self.embed_dim * (self.num_experts or 0) + routed * self.num_mlp_parameters
        return self.num_mixer_parameters + self.num_dense_parameters + self.num_expert_layers * each

    @property
    def num_mixer_parameters(self) -> int:
        """Number of weights of the mixers of all layers."""
        states = self.count(mixer="delta") * self.num_delta_matrix_parameters
        states += self.count(mixer="mamba") * self.num_mamba_matrix_parameters
        return states + sum(count * each.num_attention_parameters for each, count in self.attentions)

    @field_validator("head_dim", mode="before")
    @classmethod
    def _head_dim_is_given_or_follows(cls, value: object, info: ValidationInfo) -> object:
        embed, heads = info.data.get("embed_dim"), info.data.get("num_heads")
        if value == 0 and embed is not None and heads is not None and embed % heads:
            hint = f"set head_dim, or use num_heads = {or_list(near_divisors(embed, heads))}"
            raise_problems(
                [("", f"is missing, and {embed} / {heads} (embed_dim / num_heads) is not whole", hint)]
            )
        return value

    @model_validator(mode="after")
    def _check_keys(self) -> TransformerModel:
        raise_problems(list(transformer_problems(self)))
        return self


def block_policies(remat: str) -> tuple[str, ...]:
    """Return the policy of each block of a group; groups repeat. Most policies have groups of one block.

    >>> block_policies("dots")
    ('dots',)
    >>> block_policies("full-every-3")
    ('dots-attention', 'dots-attention', 'full')
    """
    policy, every, number = remat.partition("-every-")
    return (*("dots-attention",) * (int(number) - 1), policy) if every else (remat,)


def _default_head_dim(data: dict[str, Any]) -> int:
    """Return embed_dim / num_heads; 0 if that is not whole, which the field's validator refuses."""
    quotient, rest = divmod(data["embed_dim"], data["num_heads"])
    return 0 if rest else quotient
