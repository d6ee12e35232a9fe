"""Define the kinds of models: their keys, parameter counts in closed form, and what the axes split.

A new kind is a record below `ModelKind` here, listed in `Model`; a module of `meshwright.models` with its
class; and a line in `models.MODELS`. What other packages ask of any model is a member of `ModelKind`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ._base import (
    LARGEST,
    Fraction,
    NotNegative,
    NotNegativeFloat,
    OptionalPositive,
    OptionalPositiveFloat,
    Positive,
    PositiveFloat,
    Problem,
    Section,
    Share,
    near_divisors,
    or_list,
    raise_problems,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that other packages read, whatever its kind.

    `input_shape`: that of one row or image; empty for one token. `num_token_ids`: 0 without tokens.
    `split_dims`: sizes by the named dimension that the axes of its rule split (`PARAMETER_RULES`), each with
    the key that sets it, or words where no key does. `layer_outputs`: numbers in the outputs of all layers
    but the last, per row, image or token; `layer_outputs_rule` says how they are counted.
    `widest_activation`: the most numbers in one activation per row, image or token, without attention's
    scores. `scores`: the number of attention scores per position of the sequence.
    """

    input_shape: tuple[int, ...]
    num_token_ids: int = 0
    split_dims: Mapping[str, Mapping[str, int]]
    layer_outputs: int
    layer_outputs_rule: str
    widest_activation: int
    scores: int = 0


class ModelKind(Section):
    """The base of every kind: what other packages ask of a model before it is built."""

    takes: ClassVar[Literal["rows", "images", "sequences"]]
    """The entries of a batch: rows of numbers, square images, or sequences of token ids."""
    has_blocks: ClassVar[bool] = False
    """True for a stack of blocks, whose saved activations `remat` and `offload` choose."""
    has_answer: ClassVar[bool] = True
    """False if the targets of synthetic rows do not follow from the inputs."""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters, each counted once."""

    @property
    @abstractmethod
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply every row, token or position of an image."""

    @property
    @abstractmethod
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""

    @property
    def has_fp8_products(self) -> bool:
        """True if the layers' products can run in eight bits."""
        return False

    def length_problems(self, length: int) -> Iterator[Problem]:
        """Yield the problems with `batch.sequence_length`; paths start at the run."""
        yield from ()


class LinearModel(ModelKind):
    """Linear regression: one row of `input_dim` numbers in, one number out."""

    takes = "rows"
    kind: Literal["linear"]
    """Kind of model. Effect: a single product of a vector and a number; for learning and for tests."""
    input_dim: Positive
    """Numbers in one row. Effect: as many parameters; `fsdp` must divide it. Unit: numbers"""
    bias: bool = False
    """Add a learned constant. Effect: one parameter more."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: D weights, and one bias if enabled."""
        return self.input_dim + int(self.bias)

    @property
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply every row: D."""
        return self.input_dim

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""
        return ModelSizes(
            input_shape=(self.input_dim,),
            split_dims={"embed": {"model.input_dim": self.input_dim}},
            layer_outputs=0,
            layer_outputs_rule="no layer before the output, so no activation",
            widest_activation=self.input_dim,
        )


MOST_UNROLLED = 10_000
"""Layers that are written out one by one; more would fill the memory before the compiler sees them."""


class CruncherModel(ModelKind):
    """The deep linear model: `num_layers` maps of width D to D, then one to a single number; no biases."""

    takes = "rows"
    has_answer = False
    kind: Literal["cruncher"]
    """Kind of model. Effect: nothing but products of matrices, so that its figures can be counted by hand."""
    width: Positive
    """Numbers in one row, and in the result of every layer.
    Effect: parameters and FLOPs grow with its square; `fsdp` and `tensor` must divide it. Unit: numbers"""
    num_layers: Annotated[int, Field(ge=1, le=MOST_UNROLLED)]
    """Square maps before the last one.
    Effect: parameters, FLOPs and saved activations grow in proportion. Unit: layers"""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: L D^2 + D."""
        return self.num_layers * self.width**2 + self.width

    @property
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply every row: all L D^2 + D."""
        return self.num_parameters

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""
        return ModelSizes(
            input_shape=(self.width,),
            split_dims={dim: {"model.width": self.width} for dim in ("embed", "mlp")},
            layer_outputs=self.width * self.num_layers,
            layer_outputs_rule="batch x width x layers",
            widest_activation=self.width,
        )


class LeNetModel(ModelKind):
    """LeNet for images of 28 x 28 pixels in one channel and ten classes; its sizes are fixed.

    Convolution 3 x 3 to 20 channels, ReLU, mean of 2 x 2; convolution 5 x 5 to 50 channels, ReLU, mean of
    2 x 2; 50 x 4 x 4 = 800 numbers to 128, ReLU, to 10 logits. No padding; a bias after each.
    """

    takes = "images"
    kind: Literal["lenet"]
    """Kind of model. Effect: a convolutional network of 129,068 parameters."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: 129,068, which are the weights and 20 + 50 + 128 + 10 biases."""
        return self.num_matmul_parameters + 20 + 50 + 128 + 10

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights: 128,860 = 20 x 1 x 3 x 3 + 50 x 20 x 5 x 5 + 800 x 128 + 128 x 10.

        A kernel multiplies at many positions of an image.
        """
        return 20 * 1 * 3 * 3 + 50 * 20 * 5 * 5 + 800 * 128 + 128 * 10

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read; the outputs are 20 x 26 x 26, 50 x 9 x 9 and 128 numbers."""
        return ModelSizes(
            input_shape=(1, 28, 28),
            split_dims={"embed": {"the inputs of the hidden layer": 800}, "mlp": {"the hidden units": 128}},
            layer_outputs=20 * 26 * 26 + 50 * 9 * 9 + 128,
            layer_outputs_rule="images x outputs of the two convolutions and the hidden layer",
            widest_activation=20 * 28**2,
        )


class ResNetModel(ModelKind):
    """ResNet-18 for square images in one channel and ten classes; all its sizes but the image's are fixed."""

    takes = "images"
    kind: Literal["resnet18"]
    """Kind of model. Effect: a convolutional network of 11,173,578 parameters."""
    image_size: Annotated[int, Field(ge=32, le=LARGEST)]
    """Side of an image; image files are resized to it.
    Effect: FLOPs and saved activations grow with its square. Unit: pixels"""
    batch_norm: Literal["global", "replica"] = "global"
    """Rows over which training takes the statistics: the whole batch of a pass, or each replica's rows.
    Effect: `global` sums over the replicas in every normalisation, and gives one result on any layout."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: 11,173,578.

        They are the weights, two numbers for each of 3,904 normalised channels, and 10 biases. Normalised are
        the stem's 64 channels, and four times the 64, 128, 256 and 512 of the stages.
        """
        return self.num_matmul_parameters + 2 * (64 + 4 * (64 + 128 + 256 + 512)) + 10

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights in the kernels and the head.

        The stem has 49 x 64 and the head 512 x 10. A stage from C to D channels has 9 (C D + 3 D D) weights
        in kernels of 3 x 3. The three stages with C not equal to D have C D more in a kernel of 1 x 1.
        """
        stages = ((64, 64), (64, 128), (128, 256), (256, 512))
        kernels = sum(9 * (c * d + 3 * d * d) + (c * d if c != d else 0) for c, d in stages)
        return 49 * 64 + kernels + 512 * 10

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read.

        The stem has 64 channels at half the image's side. Each stage has four convolutions of its width, and
        every stage but the first has a fifth, of size 1 x 1.
        """
        side = (self.image_size + 1) // 2
        outputs = 64 * side**2
        for width in (64, 128, 256, 512):
            side = (side + 1) // 2
            outputs += (4 if width == 64 else 5) * width * side**2
        return ModelSizes(
            input_shape=(1, self.image_size, self.image_size),
            split_dims={"embed": {"the inputs of the head": 512}},
            layer_outputs=outputs,
            layer_outputs_rule="images x outputs of the convolutions",
            widest_activation=64 * self.image_size**2,
        )


class TransformerModel(ModelKind):
    """A decoder: token embedding, `num_layers` blocks of attention and MLP, each after a norm; norm, head.

    With `num_experts` each block has that many MLPs of `mlp_dim`, and a router in float32 that sends each
    token to `experts_per_token` of them.
    """

    takes = "sequences"
    has_blocks = True
    kind: Literal["transformer"]
    """Kind of model. Effect: GPT, Llama and Mixtral are this one with other sizes."""
    num_layers: Positive
    """Blocks of attention and MLP.
    Effect: parameters, FLOPs and saved activations grow in proportion; `stage` must divide it.
    Unit: layers"""
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
    Effect: fewer save parameters and the keys and values that `context` sends; `tensor` must divide it.
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
    Effect: both tables and the logits grow in proportion; ids of the data must be below it. Unit: tokens"""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm, before attention, MLP and head.
    Effect: the arithmetic of norms; a LayerNorm takes part in `bias`."""
    norm_epsilon: PositiveFloat = 1e-5
    """Number added to the mean square under the norm's root.
    Effect: bounds the norm of a vector that is nearly zero; nothing that is weighed. Unit: none"""
    position: Literal["rotary", "learned"] = "rotary"
    """Rotary positions, or a learned table that is added.
    Rotary ones turn queries and keys by angles.
    Effect: `rotary` needs `rope_theta`, `learned` needs `max_positions`."""
    max_positions: OptionalPositive = None
    """Rows of the learned position table.
    Effect: the longest sequence; a row of `embed_dim` parameters each. Unit: positions"""
    rope_theta: OptionalPositiveFloat = None
    """Base of the rotary wavelengths.
    Effect: larger bases suit longer sequences; nothing that is weighed. Unit: none"""
    rope_factor: OptionalPositiveFloat = None
    """How many times longer the slow rotary wavelengths become, as Llama 3.1 stretches them.
    Wavelengths above `rope_original_positions` / `rope_low_factor` are stretched, those below
    `rope_original_positions` / `rope_high_factor` are not, and those between in part.
    Effect: positions beyond the length of pretraining stay apart; nothing that is weighed. Unit: none"""
    rope_low_factor: PositiveFloat = 1.0
    """Divides `rope_original_positions` to give the wavelength above which all are stretched.
    Effect: that of `rope_factor`, without which it has none. Unit: none"""
    rope_high_factor: PositiveFloat = 4.0
    """Divides `rope_original_positions` to give the wavelength below which none is stretched.
    Effect: that of `rope_factor`, without which it has none. Unit: none"""
    rope_original_positions: OptionalPositive = None
    """Length of the sequences of pretraining, before the wavelengths were stretched.
    Effect: that of `rope_factor`, which needs it. Unit: positions"""
    mlp: Literal["gated", "plain"] = "gated"
    """Form of the MLP.
    `gated` is activation(gate) x up, then down (three matrices); `plain` is up, activation, down (two).
    Effect: `gated` has half as many parameters again at the same `mlp_dim`. Gated with silu is SwiGLU."""
    activation: Literal["silu", "gelu", "gelu-erf", "relu"] = "silu"
    """Activation of the MLP; `gelu` is the tanh form that GPT-2 uses, `gelu-erf` the exact one.
    Effect: elementwise arithmetic."""
    tied_embeddings: bool = False
    """Use the embedding table, transposed, as the head.
    Effect: `vocab_size` x `embed_dim` parameters fewer; the FLOPs stay."""
    bias: bool = False
    """Biases on linear maps and LayerNorms; the head and RMSNorms have none.
    Effect: a few vectors of parameters per layer."""
    qkv_bias: bool = False
    """Biases on queries, keys and values alone, as Qwen2 has them; not with `bias`.
    Effect: three vectors of parameters per layer."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys before positions turn them.
    `head` is over the numbers of each head (Qwen3), `all` over those of all heads together (OLMo 2).
    Effect: two vectors of parameters per layer; with `all`, a sum over `tensor`."""
    scaled_embedding: bool = False
    """Multiply embeddings by the root of `embed_dim`, as Gemma does.
    Effect: nothing that is weighed but one product per number."""
    norm_place: Literal["before", "after", "both"] = "before"
    """Where the norms of attention and MLP stand: before each, after each (OLMo 2), or both (Gemma 2).
    Effect: `both` has two vectors of `embed_dim` parameters more per layer."""
    parallel: bool = False
    """Add attention and MLP to the same input, as GPT-NeoX does, instead of one after the other.
    Effect: both products can overlap; the parameters stay."""
    rotary_share: Share = 1.0
    """Share of each head's numbers that rotary positions turn; the first ones. GPT-NeoX turns a quarter.
    Effect: nothing that is weighed. Unit: share"""
    window: OptionalPositive = None
    """Positions that attention sees, its own and those before it, as in Mistral.
    Effect: on longer sequences attention's FLOPs grow with the window in place of the sequence; not with
    `context`. Unit: positions"""
    global_every: OptionalPositive = None
    """Every that many layers, the last one sees all positions, and the others `window` (Gemma 2: 2).
    Effect: that of `window`, on the other layers alone; `stage` must divide whole groups. Unit: layers"""
    rope_local_theta: OptionalPositiveFloat = None
    """Base of the rotary wavelengths of layers with a window, which are not stretched (Gemma 3).
    Effect: nothing that is weighed. Unit: none
    Default: as in the other layers"""
    dropout: Fraction = 0.0
    """Share of numbers set to zero on the embeddings and on each residual branch.
    Effect: above 0 it draws random numbers and saves masks. Unit: share"""
    unroll: bool = False
    """Write the blocks out one after the other instead of scanning over them.
    Effect: a longer compilation; on a CPU a faster step; not with `stage`."""
    loss_chunk: Positive = 512
    """Positions of each sequence whose logits are held at once.
    Logits are the largest array of a small model; whole in fp32 those of a large vocabulary would not fit.
    Effect: larger chunks need more memory and fewer passes; it must divide the sequence. Unit: positions"""
    num_experts: OptionalPositive = None
    """Experts of each block, of which a token meets `experts_per_token`; `none` is one MLP for all.
    Effect: parameters grow in proportion, FLOPs do not; `expert` must divide it. Unit: experts"""
    experts_per_token: OptionalPositive = None
    """Experts that each token is sent to.
    Effect: the MLP's FLOPs and messages over `expert` grow in proportion. Unit: experts"""
    num_shared_experts: NotNegative = 0
    """Experts beside those that every token meets.
    Effect: parameters and FLOPs of as many MLPs more. Unit: experts"""
    capacity_factor: OptionalPositiveFloat = None
    """Most tokens of a device that an expert takes, in multiples of its fair share; others are dropped.
    Effect: larger factors pad more and drop less; `none` drops nothing and pads most. Unit: fair shares"""
    balancing_loss: NotNegativeFloat = 0.0
    """Weight of the load-balancing loss in the loss of training.
    Effect: spreads the tokens over the experts; nothing that is weighed. Unit: none"""

    @property
    def num_parameters(self) -> int:
        """Number of parameters, each counted once (a tied head adds none).

        With V vocabulary, E embed, L layers, H heads and K key-value heads of size D, M hidden of the
        MLP with G matrices (3 gated, 2 plain), P learned positions (0 if rotary), n = E per norm
        (2 E for a LayerNorm with bias):
            V E (+ V E if the head is its own) + P E + n + L (2 n + attention + MLP)
            attention = E H D + 2 E K D + H D E    (+ H D + 2 K D + E biases; + 2 D for norms of heads,
                                                    or (H + K) D for one of all)
            MLP       = G E M                      (+ (G - 1) M + E biases)
        With X routed and S shared experts, MLP = (X + S) G E M, and the router adds E X.
        """
        norm = self.embed_dim * (2 if self.norm == "layer" and self.bias else 1)
        block = 2 * norm + self._block_matmul_parameters(self.num_experts or 0)
        if self.bias or self.qkv_bias:
            block += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        if self.bias:
            block += self.embed_dim + (self._num_mlp_matrices - 1) * self.mlp_dim + self.embed_dim
        if self.qk_norm != "none":
            heads = (1, 1) if self.qk_norm == "head" else (self.num_heads, self.num_kv_heads)
            block += sum(heads) * self.head_dim
        if self.norm_place == "both":
            block += 2 * norm
        tables = self.vocab_size * (1 if self.tied_embeddings else 2) + (self.max_positions or 0)
        return tables * self.embed_dim + norm + self.num_layers * block

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that one token uses: all but those of the experts to which it is not sent.

        The unused experts have L (X - k) G E M. This number is published as "active": 12.9B of Mixtral 8x7B's
        46.7B (https://arxiv.org/abs/2401.04088).
        """
        idle = (self.num_experts or 0) - (self.experts_per_token or 0)
        return self.num_parameters - self.num_layers * idle * self._mlp_parameters

    @property
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply a token: L (attention + MLP weights) + V E for the head.

        The head counts even if it is tied. The embedding, which is a lookup, does not count, nor do norms and
        biases. Of X experts only the k to which a token is sent count; the shared experts and the router
        count too.
        """
        block = self._block_matmul_parameters(self.experts_per_token or 0)
        return self.num_layers * block + self.vocab_size * self.embed_dim

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""
        width, hidden = self.embed_dim, (self.num_experts or 1) * self.mlp_dim
        return ModelSizes(
            input_shape=(),
            num_token_ids=self.vocab_size,
            split_dims={
                "layers": {"model.num_layers": self.num_layers, **self._groups},
                "experts": {"model.num_experts": self.num_experts} if self.num_experts else {},
                "embed": {"model.embed_dim": width},
                "heads": {"model.num_heads": self.num_heads},
                "kv_heads": {"model.num_kv_heads": self.num_kv_heads},
                "mlp": {"model.mlp_dim": self.mlp_dim},
                "vocab": {"model.vocab_size": self.vocab_size},
            },
            layer_outputs=width * self.num_layers,
            layer_outputs_rule="tokens x width x layers: one output of each block",
            widest_activation=max(width, self.num_heads * self.head_dim, hidden, self.vocab_size),
            scores=self.num_heads,
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer of a group; groups of layers repeat. None sees all positions."""
        if self.global_every is None:
            return (self.window,)
        return (*(self.window,) * (self.global_every - 1), None)

    @property
    def _groups(self) -> dict[str, int]:
        """Return in words how many groups of layers stages can share; nothing if each layer is a group."""
        size = len(self.windows)
        if size == 1:
            return {}
        whole = self.num_layers // size if self.num_layers % size == 0 else 1
        return {f"the groups of model.global_every = {size} layers, which stages hold whole,": whole}

    def not_in_a_ring(self, length: int) -> str:
        """Return in words what attention over `context` cannot do on such sequences; "" if it can do all."""
        return (
            f"window shorter than the sequence (model.window = {self.window})"
            if (self.window is not None and self.window < length)
            else ""
        )

    def seen_positions(self, length: int) -> float:
        """Return the positions that a token of a sequence sees on average over tokens and layers.

        Half the sequence; with a window W in a longer sequence S, W - W^2 / (2 S).

        >>> from ._load import load_config
        >>> load_config("llama3-8b").model.seen_positions(8192)
        4096.0
        """
        seen = [min(window or length, length) for window in self.windows]
        each = [seen[layer % len(seen)] for layer in range(self.num_layers)]
        return sum(window - window**2 / (2 * length) for window in each) / self.num_layers

    @property
    def has_fp8_products(self) -> bool:
        """True without experts."""
        return self.num_experts is None

    def length_problems(self, length: int) -> Iterator[Problem]:
        """Yield the problems of sequences longer than the positions, or not in whole chunks of the loss."""
        if self.max_positions is not None and length > self.max_positions:
            what = f"= {length} is longer than model.max_positions = {self.max_positions} learned positions"
            yield "batch.sequence_length", what, f"use at most batch.sequence_length = {self.max_positions}"
        chunk = min(self.loss_chunk, length)
        if length % chunk:
            what = f"= {self.loss_chunk} does not divide batch.sequence_length = {length}"
            yield "model.loss_chunk", what, f"use model.loss_chunk = {near_divisors(length, chunk)[0]}"

    @property
    def _num_mlp_matrices(self) -> int:
        return 3 if self.mlp == "gated" else 2

    @property
    def _mlp_parameters(self) -> int:
        """Number of weights of one MLP or one expert: G E M."""
        return self._num_mlp_matrices * self.embed_dim * self.mlp_dim

    def _block_matmul_parameters(self, routed: int) -> int:
        """Return the weights of attention and of the MLP.

        With experts these are attention's, the router's, and those of the shared and of `routed` other
        experts.
        """
        attention = 2 * self.embed_dim * (self.num_heads + self.num_kv_heads) * self.head_dim
        if self.num_experts is None:
            return attention + self._mlp_parameters
        router = self.embed_dim * self.num_experts
        return attention + router + (routed + self.num_shared_experts) * self._mlp_parameters

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
        problems = (self._layer_problems, self._position_problems, self._window_problems)
        raise_problems([problem for each in (*problems, self._expert_problems) for problem in each()])
        return self

    def _window_problems(self) -> Iterator[Problem]:
        """Yield the problems with windows: some keys need another."""
        if self.window is None and self.global_every is not None:
            what = f"= {self.global_every} has no effect without window"
            yield "global_every", what, "leave global_every out"
        if self.rope_local_theta is not None and (self.global_every is None or self.rope_theta is None):
            needs = "rope_theta" if self.rope_theta is None else "global_every"
            what = f"= {self.rope_local_theta} has no effect without {needs}"
            yield "rope_local_theta", what, "leave rope_local_theta out"

    def _layer_problems(self) -> Iterator[Problem]:
        if self.num_heads % self.num_kv_heads:
            what = f"= {self.num_kv_heads} does not divide num_heads = {self.num_heads}"
            nearest = near_divisors(self.num_heads, self.num_kv_heads)[0]
            yield "num_kv_heads", what, f"use num_kv_heads = {nearest}"
        if self.bias and self.qkv_bias:
            yield "qkv_bias", "= true has no effect with bias = true", "leave qkv_bias out"
        if self.unroll and self.num_layers > MOST_UNROLLED:
            what = (
                f"= true writes out num_layers = {self.num_layers} blocks, and at most {MOST_UNROLLED} can be"
            )
            yield "unroll", what, "use unroll = false"

    def _expert_problems(self) -> Iterator[Problem]:
        """Yield the problems with experts: they have no biases, and their keys need `num_experts`."""
        if self.num_experts is None:
            for name in ("experts_per_token", "num_shared_experts", "capacity_factor", "balancing_loss"):
                if value := getattr(self, name):
                    yield name, f"= {value} has no effect without num_experts", f"leave {name} out"
            return
        if self.experts_per_token is None:
            what = f"is missing; num_experts = {self.num_experts} needs it"
            yield "experts_per_token", what, "set experts_per_token to 1 or 2"
        elif self.experts_per_token > self.num_experts:
            what = f"= {self.experts_per_token} is more than num_experts = {self.num_experts}"
            yield "experts_per_token", what, f"use {self.num_experts} at most"
        if self.bias:
            yield "bias", "= true, but experts have no biases", "use bias = false"

    def _position_problems(self) -> Iterator[Problem]:
        """Yield the problems with positions: each scheme needs its own key, and the other's has no effect."""
        needed, unused, example = "rope_theta", "max_positions", "10000.0"
        if self.position == "learned":
            needed, unused, example = unused, needed, "the longest sequence, e.g. 1024"
        if getattr(self, needed) is None:
            what = f"is missing; position = {self.position!r} needs it"
            yield needed, what, f"set {needed} to {example}"
        if (value := getattr(self, unused)) is not None:
            what = f"= {value} has no effect with position = {self.position!r}"
            yield unused, what, f'leave {unused} out, or set {unused} = "none"'
        if self.rope_factor is not None and self.rope_theta is None:
            yield "rope_factor", "has no effect without rope_theta", "leave rope_factor out"
        if (self.rope_factor is None) != (self.rope_original_positions is None):
            what = "and rope_original_positions need each other"
            yield "rope_factor", what, "set both, or neither"
        if self.rope_low_factor >= self.rope_high_factor:
            what = f"= {self.rope_low_factor} is not below rope_high_factor = {self.rope_high_factor}"
            yield "rope_low_factor", what, "use rope_low_factor = 1.0"
        if self.position == "rotary" and self.head_dim % 2:
            what = f"= {self.head_dim} is odd; rotary positions turn pairs of numbers"
            yield "head_dim", what, f"use head_dim = {self.head_dim + 1}"


def _default_head_dim(data: dict[str, Any]) -> int:
    """Return embed_dim / num_heads; 0 if that is not whole, which the field's validator refuses."""
    quotient, rest = divmod(data["embed_dim"], data["num_heads"])
    return 0 if rest else quotient


Model = Annotated[
    LinearModel | CruncherModel | LeNetModel | ResNetModel | TransformerModel, Field(discriminator="kind")
]
