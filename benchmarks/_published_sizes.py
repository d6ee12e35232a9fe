"""Hold the sizes of a published run that the models of its software count with."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Layout, RunConfig, TransformerModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a run that the counts below need, by one device and microbatch."""

    model: TransformerModel
    tokens: int
    length: int
    tensor: int
    layers: float  # of a stage
    microbatches: int
    ticks: float  # microbatches, and those that the pipeline's fill and drain take
    stages: int
    replicas: int
    gathered: int  # devices over which a rank's weights are sharded, and gathered for use
    sharded: int  # devices over which its optimizer is sharded
    repeats: bool
    experts_apart: int = 1  # devices over which experts lie
    tensor_of_experts: int = 1  # devices that share the matrices of one
    folds_experts: bool = False  # whole experts over devices of `tensor` too

    @property
    def tokens_of_experts(self) -> float:
        """Tokens whose rows a device of experts has, on average."""
        return self.tokens / (self.tensor if self.folds_experts else 1)

    @property
    def weights(self) -> float:
        """Weights of a layer on one rank of `tensor`, its own experts' among them."""
        model = self.model
        head = self.model.embed_dim * model.vocab_size
        met = (model.num_matmul_parameters - head) / model.num_layers / self.tensor
        if model.num_experts is None or model.experts_per_token is None:
            return met
        local = model.num_experts / self.experts_apart - model.experts_per_token
        local *= model.num_expert_layers / model.num_layers
        return met + local * model.num_mlp_parameters / self.tensor_of_experts

    @classmethod
    def of(cls, config: RunConfig) -> Sizes:
        """Return the sizes of a run, its sequence split over `context`."""
        assert isinstance(config.model, TransformerModel)
        layout, batch = Layout.parse(config.layout), config.batch
        micro = batch.microbatch_sequences or 1
        replicas = layout.num_replicas
        stages, folds = layout.size("stage"), config.fold_experts == "tensor"
        microbatches = batch.sequences // (micro * replicas)
        return cls(
            model=config.model,
            tokens=micro * batch.sequence_length // layout.size("context"),
            length=batch.sequence_length,
            tensor=layout.size("tensor"),
            layers=config.model.num_layers / stages,
            microbatches=microbatches,
            ticks=microbatches + (stages - 1) / config.pipeline_chunks,
            stages=stages,
            replicas=replicas,
            gathered=layout.size("fsdp"),
            sharded=layout.size("fsdp")
            * (layout.size("data") * layout.size("context") if config.zero1 else 1),
            repeats=config.remat == "full",
            experts_apart=layout.size("expert") * (layout.size("tensor") if folds else 1),
            tensor_of_experts=1 if folds else layout.size("tensor"),
            folds_experts=folds,
        )
