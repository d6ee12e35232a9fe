"""Define `RunConfig`, and its sections for data, batch, evaluation, checkpoints and faults."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from meshwright.errors import InputError
from meshwright.units import format_count

from ._layout import FoldedExperts, Layout, PipelineSchedule
from ._lora import LoraConfig, lora_room
from ._models import Model
from ._optimizers import ConstantSchedule, Optimizer, Schedule, least_steps, schedule_problems
from ._remat import Remat, remat_problems
from ._section import (
    Finite,
    NotNegativeFloat,
    OptionalNotNegative,
    OptionalPositive,
    OptionalPositiveFloat,
    Positive,
    PositiveFloat,
    Problem,
    Section,
    none_word,
    raise_problems,
)
from ._transformer import TransformerModel
from ._transformer_checks import dispatch_problems

Order = Literal["random", "epochs"]


HeldOut = Annotated[
    float,
    Field(
        gt=0,
        le=0.5,
        description="Share of the data that is kept for evaluation and never trained on.\n"
        "Effect: evaluation reads it; a larger share leaves less to train on.\nUnit: share",
    ),
]
InOrder = Annotated[
    Order,
    Field(
        description="Order of the windows; `epochs` takes each once before any comes again.\n"
        "Windows at random places may overlap. Every epoch of `epochs` has another order.\n"
        "Effect: which tokens a step reads; nothing that is weighed."
    ),
]


TokenFormat = Literal["raw", "megatron", "llm.c", "datatrove"]
TYPED_FORMATS = frozenset({"megatron", "llm.c"})
"""Formats whose files say the type of their ids."""
INDEXED_FORMATS = frozenset({"megatron", "datatrove"})
"""Formats whose files may say where documents end."""
Documents = Annotated[
    Literal["joined", "packed"],
    Field(
        description="Documents of one window: joined as one text, or each apart.\n"
        "`packed` keeps attention, positions and loss inside each document.\n"
        "Effect: `packed` adds a mask to attention, which may use another kernel."
    ),
]
Text = Annotated[str, Field(min_length=1)]
OptionalText = Annotated[Text | None, BeforeValidator(none_word, json_schema_input_type=Text | None)]
DocumentEnd = Annotated[
    OptionalNotNegative,
    Field(
        description='Id that ends each document; for `documents = "packed"` alone.\n'
        "Without it, the index of the formats `megatron` and `datatrove` says where documents end.\n"
        "Effect: where one document ends and the next begins. Unit: token id"
    ),
]


class DataSource(Section):
    """The base of every source: the entries that it gives, and the models that it suits."""

    gives: ClassVar[str] = ""
    suits: ClassVar[str] = ""
    """Name the input that a model must take ("images"), or the one kind of model ("linear"); "" for any."""


class SyntheticData(DataSource):
    """Random tokens, regression rows or images made from the seed; nothing is read."""

    source: Literal["synthetic"]
    """Source of the batches. Effect: the loss falls only as far as noise allows; weighing reads no data."""


class LineData(DataSource):
    """Points about a line, for a linear model of one input: slope x + intercept + noise x a normal number.

    x is standard normal too; every step has new points, made from the seed.
    """

    gives, suits = "points about a line", "linear"
    source: Literal["line"]
    """Source of the batches.
    Effect: the parameters to be found are known, so a run can be checked against them."""
    slope: Finite
    """Slope of the line. Effect: the weight that training should find. Unit: none"""
    intercept: Finite
    """Height of the line at x = 0. Effect: the bias that training should find. Unit: none"""
    noise: NotNegativeFloat
    """Standard deviation of the points about the line.
    Effect: the least squared error that can be reached is its square. Unit: none"""


class StdlibData(DataSource):
    """Bytes of the Python standard library's own sources; every n-th file is held out."""

    gives, suits = "tokens", "sequences"
    source: Literal["python-stdlib"]
    """Source of the batches.
    Effect: real text on every machine without a download; ids are bytes, and `model.vocab_size` at least 256.
    """
    held_out_fraction: HeldOut = 0.05
    order: InOrder = "random"


class TextData(DataSource):
    """Texts of your own, tokenized when a run begins and kept in the cache; their tail is held out."""

    gives, suits = "tokens", "sequences"
    source: Literal["text"]
    """Source of the batches. Effect: trains on your own text; `train --data FILE` writes this section."""
    path: Annotated[str, Field(min_length=1)]
    """A text file, `.jsonl`, `.ndjson` or `.parquet`, or a folder of these and of `.txt` files.
    In a file it is relative to that file's folder; on the command line, to the working directory.
    Effect: what is trained on; weighing does not open it."""
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    """`bytes`, or a Hugging Face `tokenizer.json` or its folder. It is found as `path` is.
    Effect: the ids of the text; `model.vocab_size` must hold them."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key of the text in a JSON line, or its column in Parquet. Effect: which text is read."""
    held_out_fraction: HeldOut = 0.05
    order: InOrder = "random"
    documents: Documents = "joined"
    end_of_document: OptionalText = None
    """The token that is put at the end of each document, or its id; 256 with `bytes`.
    Effect: the model sees where documents end; `documents = "packed"` needs it."""

    @model_validator(mode="after")
    def _documents_end(self) -> TextData:
        if self.documents == "packed" and self.end_of_document is None:
            what = "= 'packed' needs a token that ends a document"
            raise_problems([("documents", what, "set data.end_of_document, with bytes to 256")])
        return self


class TokenFileData(DataSource):
    """Files of token ids, made here or by another program; their tail is held out."""

    gives, suits = "tokens", "sequences"
    source: Literal["tokens"]
    """Source of the batches. Effect: trains on your own text; `meshwright data tokenize` makes the file."""
    path: Annotated[str, Field(min_length=1)]
    """The file of token ids, a folder of such files, or a pattern of their names, as in `web/part-*.bin`.
    Several files are read one after another, in the order of their names.
    In a file it is relative to that file's folder; on the command line, to the working directory.
    Effect: what is trained on; weighing does not open it."""
    format: TokenFormat = "raw"
    """Format of the files.
    `raw`: little-endian ids and nothing else, as nanoGPT and `meshwright data tokenize` write them.
    `megatron`: Megatron-LM's `.bin` and `.idx`. `llm.c`: ids behind a header of 1,024 bytes.
    `datatrove`: `.ds`, perhaps with `.ds.index`, as datatrove writes them for nanotron.
    Effect: how the files are read; a file of another format is refused where its bytes show it."""
    dtype: Annotated[
        Literal["int32", "uint16", "uint32"] | None,
        BeforeValidator(none_word, json_schema_input_type=Literal["int32", "uint16", "uint32", "none"]),
    ] = None
    """Type of one token id. Without it the file must say it: the formats `megatron` and `llm.c` do, and so
    does the metadata beside a file of `meshwright data tokenize` or of datatrove.
    Effect: how the file is read; another type than the file's own is refused where its bytes show it."""
    held_out_fraction: HeldOut = 0.05
    order: InOrder = "random"
    documents: Documents = "joined"
    end_of_document: DocumentEnd = None

    @model_validator(mode="after")
    def _agrees(self) -> TokenFileData:
        problems = _document_problems(self, has_index=self.format in INDEXED_FORMATS)
        if self.format in TYPED_FORMATS and self.dtype is not None:
            what = (
                f"= {self.dtype!r} has no effect: the files of data.format = {self.format!r} say their type"
            )
            problems.append(("dtype", what, 'leave it out, or use data.dtype = "none"'))
        raise_problems(problems)
        return self


class InstructionData(DataSource):
    """Conversations, a JSON object per line: messages, or prompt and completion, or instruction and output.

    Several stand in one window, each with attention and positions of its own.
    """

    gives, suits = "tokens", "sequences"
    source: Literal["instructions"]
    """Source of the batches. Effect: fine-tuning on answers; adds a mask to attention."""
    path: Annotated[str, Field(min_length=1)]
    """The file of JSON lines.
    In a file it is relative to that file's folder; on the command line, to the working directory.
    Effect: what is trained on; weighing does not open it."""
    tokenizer: Annotated[str, Field(min_length=1)]
    """Folder of the model's tokenizer, with its chat template; or `bytes`.
    It is found as `path` is. Effect: the ids of the text, and the words between messages."""
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens that are to be predicted: those of answers alone, or all.
    Effect: what is learned; nothing that is weighed."""
    too_long: Literal["refuse", "leave-out"] = "refuse"
    """The treatment of a conversation that is longer than a window. Effect: which conversations are read."""
    held_out_fraction: HeldOut = 0.05


class MixtureData(DataSource):
    """Several sources of token ids, mixed by weight; the tail of each is held out.

    A sequence comes from one source. Which one depends on seed and step alone.
    """

    gives, suits = "tokens", "sequences"
    source: Literal["mixture"]
    """Source of the batches. Effect: trains on several sources; each has its own epochs."""
    path: Annotated[str, Field(min_length=1)]
    """TOML file of the mixture: a table `[[source]]` each, with `path`, `weight`, `format` and `dtype`.
    In a file it is relative to that file's folder; on the command line, to the working directory.
    Effect: what is trained on; weighing does not open it."""
    held_out_fraction: HeldOut = 0.05
    order: InOrder = "random"
    documents: Documents = "joined"
    end_of_document: DocumentEnd = None

    @model_validator(mode="after")
    def _documents_end(self) -> MixtureData:
        raise_problems(_document_problems(self, has_index=True))  # the files are not known yet
        return self


def _document_problems(data: TokenFileData | MixtureData, *, has_index: bool) -> list[Problem]:
    """Return what is wrong with the end of documents; `has_index`: the files may say where it is."""
    problems: list[Problem] = []
    if data.documents == "packed" and data.end_of_document is None and not has_index:
        what = "= 'packed' needs the id that ends a document"
        problems.append(("documents", what, "set data.end_of_document, as the tokenizer has it"))
    if data.documents == "joined" and data.end_of_document is not None:
        what = f"= {data.end_of_document} has no effect while data.documents = 'joined'"
        problems.append(("end_of_document", what, 'use data.documents = "packed"'))
    return problems


class IdxData(DataSource):
    """Images and labels in the IDX files of MNIST and Fashion-MNIST, plain or gzipped.

    Images are resized to the model's size. Every image comes once before any comes again; an epoch's last
    batch may be short, and is then padded with rows of weight zero.
    """

    gives, suits = "images", "images"
    source: Literal["idx"]
    """Source of the batches. Effect: trains on images; epochs are counted."""
    folder: Annotated[str, Field(min_length=1)]
    """Folder of the four files, under their published names.
    In a file it is relative to that file's folder; on the command line, to the working directory.
    Effect: what is trained on; weighing does not open it."""


Data = Annotated[
    SyntheticData
    | LineData
    | StdlibData
    | TextData
    | TokenFileData
    | InstructionData
    | MixtureData
    | IdxData,
    Field(discriminator="source"),
]


class BatchConfig(Section):
    """The batch that one step reads; rows or images are meant where a model takes those."""

    sequences: Positive
    """Sequences that the whole fleet reads in one step.
    Effect: FLOPs of a step grow in proportion; data x fsdp x expert x microbatch must divide it.
    Unit: sequences"""
    sequence_length: Positive = 1
    """Positions of a sequence that are predicted; 1 for models of rows or images.
    Effect: FLOPs and saved activations grow in proportion, attention's FLOPs with the square. Unit: tokens"""
    microbatch_sequences: OptionalPositive = None
    """Sequences that one data replica handles at a time, at most; `none` is all of its share at once.
    Effect: fewer save activation memory; gradients are then summed over several passes. Unit: sequences"""
    sequences_per_replica: OptionalPositive = None
    """Sequences of each data replica, in place of `sequences`.
    Effect: `sequences` becomes this times the layout's data x fsdp x expert, so that it grows with the fleet.
    Unit: sequences"""
    base_sequences: OptionalPositive = None
    """Batch for which the learning rate was chosen; needed by `schedule.scale`.
    Effect: the learning rate follows the batch from here. Unit: sequences"""

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens that the whole fleet reads per step; rows or images if the model takes those."""
        return self.sequences * self.sequence_length


class EvaluationConfig(Section):
    """The loss on data that is not trained on."""

    every_steps: Positive = 100
    """Steps between two evaluations; one more comes before the first step and after the last.
    Effect: time of training; nothing that is weighed. Unit: steps"""
    batches: Positive = 8
    """Held-out batches of one evaluation. Effect: more give a steadier loss and take longer. Unit: batches"""


class CheckpointConfig(Section):
    """The checkpoints of a run, from which it can be resumed."""

    every_steps: OptionalPositive = 1000
    """Steps between two checkpoints; one more comes after the last step. `none` saves nothing.
    Effect: work lost by a crash, and disk traffic; nothing that is weighed. Unit: steps"""
    keep_last: Positive = 3
    """Newest checkpoints that are kept; older ones are deleted.
    Effect: disk space: parameters and moments in fp32 each. Unit: checkpoints"""
    keep_every: OptionalPositive = None
    """Checkpoints of steps that are multiples of this are kept for good as well.
    Effect: disk space that grows with the run. Unit: steps"""


class FaultConfig(Section):
    """The answer to a step that went wrong."""

    bad_step: Literal["stop", "skip", "rollback"] = "stop"
    """Answer to a step whose loss or gradient is not finite.
    Its update is never applied. `stop` saves and ends the run; `skip` goes on with the next batch; `rollback`
    goes back to the last checkpoint and leaves out the batches since then.
    Effect: nothing that is weighed."""
    most_bad_steps: Positive = 10
    """Bad steps in a row after which the run ends in any case.
    Effect: bounds what `skip` and `rollback` try. Unit: steps"""
    spike_sigmas: PositiveFloat = 6.0
    """Distance above the recent losses at which a loss is flagged as a spike.
    Effect: smaller values flag more steps; nothing is stopped. Unit: standard deviations"""
    startup_deadline_seconds: OptionalPositiveFloat = 3600.0
    """Time until the first step after which a run is ended as hung; `none` waits for ever.
    Effect: a run that hangs gives its machines back. Unit: seconds"""
    step_deadline_seconds: OptionalPositiveFloat = 1800.0
    """Time without progress after which a run is ended as hung; `none` waits for ever.
    Effect: a run that hangs gives its machines back. Unit: seconds"""


class StateConfig(Section):
    """The formats in which devices keep parameters and moments between steps.

    The update itself is computed in fp32: its results are rounded to these formats.
    """

    parameters: Literal["fp32", "bf16"] = "fp32"
    """Format of the parameters that are trained; those of norms, biases and routers stay in fp32.
    `bf16` without a copy in fp32 is what TRL, axolotl and torchtune call full fine-tuning in bf16.
    Effect: `bf16` halves the memory of the parameters; updates below 1/256 of a parameter are lost or, with
    `rounding = "stochastic"`, made now and then: [state in 16
    bits](../explanation/precision.md#state-in-16-bits)."""
    master: Literal["none", "fp32"] = "none"
    """Copy of the `bf16` parameters, from which updates are made: Megatron-LM's main parameters.
    The parameters are the copy's numbers, rounded to nearest.
    Effect: `fp32` loses no small update, and takes 4 bytes more a parameter, split and offloaded as moments
    are: [a copy in fp32](../explanation/precision.md#a-copy-in-fp32)."""
    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """Format of the optimizer's moments; counts of steps stay integers.
    `8bit` is that of AdamW8bit of bitsandbytes and torchao: a byte a number, and a scale for every 256.
    Norms, biases and small matrices keep theirs in fp32.
    Effect: `bf16` halves the memory of the moments, `8bit` divides it by four. In bf16, a mean that moves by
    less than 1/256 a step, as Adam's second moment does, stays where it is unless
    `rounding = "stochastic"`: [moments in 8 bits](../explanation/precision.md#moments-in-8-bits)."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Rounding of updated parameters and moments to `bf16`; 8 bits are always rounded to nearest.
    `stochastic` rounds up or down by chance, so that the mean is exact; it is drawn from the run's seed and
    step, and a resumed run draws the same.
    Effect: a few passes over the state."""

    @property
    def rounds(self) -> bool:
        """Return whether updates or moments are rounded to 16 bits, by what `rounding` says."""
        return self.moments == "bf16" or (self.parameters == "bf16" and self.master == "none")


LayerLoop = Literal["auto", "keep", "unroll"]
TEXT_OF_RESULTS = (".txtpb", ".pbtxt", ".textproto", ".prototxt", ".txt")
"""Endings by which XLA takes a file of autotuning results for text; all others are binary to it."""


MOST_ELEMENTS = 2**56
"""The most elements of one array. XLA counts bytes, and sums of several arrays, in signed 64-bit integers."""


class RunConfig(Section):
    """One run: the program that is weighed is the one that runs."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the preset, or of the file without its ending; no key of a file."""
    model: Model
    """The model and its sizes; `kind` chooses which."""
    data: Data
    """The source of the batches; `source` chooses which. Weighing reads no data."""
    optimizer: Optimizer
    """The update rule; `kind` chooses which. [Optimizers](../explanation/optimizers.md) compares them."""
    schedule: Schedule = ConstantSchedule(kind="constant")
    """The course of the learning rate; `kind` chooses which. Without this section the rate stays the same."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Format of the arithmetic; [state](#state) has the formats of parameters and moments.
    Effect: the rate of products, and bytes of activations and gradients:
    [precision](../explanation/precision.md)."""
    gradient_sum: Literal["fp32", "bf16", "all-fp32"] = "fp32"
    """Format in which gradients of matrices and tables are summed: over the microbatches of a step, and after
    them over `data` and `context`.
    `bf16` is for the precisions `bf16` and `fp8`. Sums over `fsdp`, and all sums of a single microbatch
    without stages, are made inside the backward pass, in the format of the products. With `all-fp32` they
    are in fp32 too, from the product that makes them; that is for transformers, and `zero1` needs stages.
    Effect: `bf16` halves the memory of the sum and the bytes of its reduction, and loses small gradients
    beside large sums; `all-fp32` doubles the bytes that `fsdp` scatters:
    [precision](../explanation/precision.md#sums-of-gradients)."""
    layout: str = "data=-1"
    """Mesh axes and their sizes, outermost first, as in `fsdp=64,tensor=8`; one size may be -1, the rest.
    Effect: what each device holds and sends: [layouts](../explanation/layouts.md)."""
    remat: Remat = Field(default_factory=lambda data: _default_remat(data))
    """Results that a block keeps for the backward pass.
    The others are computed again. {policies}, `full-every-N` only the input of every N-th block: the others
    are under `dots-attention`. `save:` and a list keeps the results that it names, and the block's input:
    `save:query,key,value`.
    Effect: less saved memory for more FLOPs: `full` repeats the forward pass.
    [Whose each is](../explanation/how-weighing-works.md#rematerialisation).
    Default: `dots-attention` for a transformer, else `none`"""
    layer_loop: LayerLoop = "auto"
    """The form of stacked layers: one loop (`keep`), or each layer written out (`unroll`).
    `auto` unrolls at most 16 layers on one GPU, without experts, and where no block is under `full`.
    Effect: a loop copies to a stack what its layers keep, so `unroll` is faster, and compiles longer the
    more layers there are. Arrays, checkpoints and results stay as they are. No effect in pipelines, whose
    stages have a loop of their own: [loops over
    layers](../explanation/how-weighing-works.md#loops-over-layers)."""
    zero1: bool = False
    """Split parameters and moments over `data` and `context` too; parameters are gathered once a step.
    What is no expert is split over `expert` in either case, and gathered once a step only with `zero1`.
    Effect: divides the state by `data` x `context`: [where it is
    stored](../explanation/optimizers.md#where-the-state-is-stored)."""
    fold_experts: FoldedExperts = "none"
    """Axes along which whole experts are spread, beside `expert`.
    With `tensor` the devices along it have experts of their own in place of a part of each, as with
    Megatron-LM's `expert_tensor_parallel_size` = 1. With `context` a group of experts shares its sequences,
    and the batch may have fewer than devices: `context=32` in place of `expert=32`.
    Effect: with `tensor`, matrices as wide as they are, and no gathers of experts' rows over it; with
    `context`, as many experts fewer on a device: [layouts](../explanation/layouts.md)."""
    expert_domains: OptionalPositive = None
    """Fast domains (hosts, racks) to each of which a token's row is sent once, for all its experts there.
    `1` sends a row for each choice; by default the fleet and the layout decide.
    Effect: fewer bytes cross the network, and rows are copied once more:
    [layouts](../explanation/layouts.md#experts-in-several-hosts). Unit: domains"""
    state: StateConfig = StateConfig()
    """The formats of parameters and moments."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters beside frozen products; without `rank` all parameters are trained."""
    offload: Literal["none", "optimizer", "activations", "both", "state", "all"] = "none"
    """Arrays that wait in the hosts' memory.
    Moments and the copy in fp32 wait between steps, activations until the backward pass; `both` is these.
    `state` is moments and the parameters of stacked layers, each fetched where a pass uses its layer; `all`
    is `state` and activations.
    Effect: saves device memory, and every byte crosses the host's link twice a step; a parameter twice a
    microbatch, or once more if it is computed again, and twice for the update. `activations` and `all` need
    `remat = "full"`: [with the host's memory](../how-to/fine-tuning-formats.md#with-the-hosts-memory)."""
    pipeline: PipelineSchedule = "1f1b"
    """Order in which microbatches pass the stages of a layout.
    Effect: activations of `1f1b` do not grow with the number of microbatches, as those of `gpipe` do."""
    pipeline_chunks: Positive = 1
    """Chunks of layers that each stage holds, apart in the model: Megatron's virtual pipeline stages.
    Effect: a smaller bubble and, from `1f1b`, fewer saved activations, for more messages between stages:
    [pipelines](../explanation/layouts.md#pipelines). Unit: chunks"""
    batch: BatchConfig
    """The batch that one step reads; rows or images are meant where a model takes those."""
    steps: OptionalPositive = None
    """Steps of the run; `train` needs them here or as `--steps`, `weigh` does not.
    Effect: schedules that fall end here; no figure of one step. Unit: steps"""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the parameters, the order of the data and dropout.
    Effect: another run of the same kind; nothing that is weighed. Unit: none"""
    deterministic: bool = False
    """Make repeats on one GPU bitwise equal; CPUs and TPUs repeat anyway. Effect: may cost speed on GPUs."""
    autotune_results: OptionalText = None
    """File of XLA's autotuning results: the kernels of one step that were the fastest on a GPU.
    Without it all products are calls of cuBLAS. If it does not exist, `train` on a GPU times kernels and
    writes it. Its name ends in .txtpb or .pbtxt. NVIDIA only.
    Effect: weighing and running take these kernels, also Triton's, and refuse a step of which the file does
    not know all: [a card's kernels](../explanation/how-weighing-works.md#the-kernels-of-a-card)."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The loss on data that is not trained on."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The checkpoints of a run, from which it can be resumed."""
    faults: FaultConfig = FaultConfig()
    """The answer to a step that went wrong: [training](../how-to/training.md)."""

    @property
    def num_trained_parameters(self) -> int:
        """Number of parameters that have gradients: all of them, or with `lora` those of the adapters."""
        if self.lora.rank is None:
            return self.model.num_parameters
        assert isinstance(self.model, TransformerModel), "lora_problems refuses adapters of other models"
        return lora_room().num_adapter_parameters(self.lora, self.model)

    @property
    def batch_unit(self) -> str:
        """Name what `tokens_per_step` counts: "tokens", or "rows" or "images" if the model takes those."""
        return "tokens" if self.model.takes == "sequences" else self.model.takes

    def waits(self, part: Literal["moments", "parameters", "activations"]) -> bool:
        """Return whether a part waits in the hosts' memory."""
        if self.offload == "none":
            return False
        from ._offload import OFFLOADED

        return part in OFFLOADED[self.offload]

    @property
    def has_documents(self) -> bool:
        """Return whether a window may hold several documents; batches then have segments."""
        packed = (
            isinstance(self.data, TextData | TokenFileData | MixtureData) and self.data.documents == "packed"
        )
        return packed or isinstance(self.data, InstructionData)

    @property
    def num_frozen_parameters(self) -> int:
        """Number of parameters that are only read: none, or with `lora` those of the model."""
        return 0 if self.lora.rank is None else self.model.num_parameters

    @property
    def horizon_steps(self) -> int:
        """Number of steps; if not given, as for weighing alone, the fewest that the schedule allows.

        The number is a constant of the program, and changes no byte and no FLOP of a step.
        """
        return self.steps or least_steps(self.schedule)

    @property
    def peak_learning_rate(self) -> float:
        """Peak learning rate: `optimizer.learning_rate`, scaled to the batch by `schedule.scale`."""
        rate, base = self.optimizer.learning_rate, self.batch.base_sequences
        if base is None:
            return rate
        times = self.batch.sequences / base
        return rate * (times if self.schedule.scale == "linear" else math.sqrt(times))

    @field_validator("layout")
    @classmethod
    def _layout_reads(cls, text: str) -> str:
        try:
            return str(Layout.parse(text))
        except InputError as error:
            raise_problems([("", f"= {text!r}: {error.message}", error.hint)])
        return text

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        raise_problems(
            [
                *self._model_problems(),
                *self._data_problems(),
                *self._offload_problems(),
                *(lora_room().lora_problems(self) if self.lora.rank is not None else ()),
                *self._batch_problems(),
                *schedule_problems(self.schedule, self.steps),
                *self._size_problems(),
            ]
        )
        return self

    def _offload_problems(self) -> Iterator[Problem]:
        if self.offload != "none":
            from meshwright.registry import room  # a room outside the core

            yield from room("offload").offload_problems(self)

    def _model_problems(self) -> Iterator[Problem]:
        """Yield settings that need blocks, sequences or products in eight bits, where the model has none."""
        model, length = self.model, self.batch.sequence_length
        if model.takes != "sequences" and length != 1:
            what = f"= {length}, but a {model.kind} model takes {model.takes}, not sequences"
            yield "batch.sequence_length", what, "use batch.sequence_length = 1"
        yield from model.length_problems(length)
        if self.remat != "none" and not model.has_blocks:
            what = f"= {self.remat!r} has no effect on a {model.kind} model"
            yield "remat", what, 'use remat = "none"'
        yield from remat_problems(self.remat, model)
        yield from self._fold_problems()
        if self.layer_loop != "auto" and not model.has_blocks:
            what = f"= {self.layer_loop!r} has no effect on a {model.kind} model"
            yield "layer_loop", what, 'use layer_loop = "auto"'
        if self.layer_loop == "keep" and isinstance(model, TransformerModel) and model.unroll:
            what = "= 'keep', but the layers are separate parameters (model.unroll), which no loop can take"
            yield "layer_loop", what, 'use layer_loop = "auto"'
        if self.gradient_sum == "bf16" and self.precision not in ("bf16", "fp8"):
            what = f'= "bf16", but precision = {self.precision!r} has no products in bf16'
            yield "gradient_sum", what, 'use gradient_sum = "fp32"'
        if self.gradient_sum == "all-fp32" and not isinstance(model, TransformerModel):
            what = f'= "all-fp32", but a {model.kind} model sums gradients in the format of its products'
            yield "gradient_sum", what, 'use gradient_sum = "fp32"'
        yield from self._state_problems()
        results = self.autotune_results
        if results is not None and not results.endswith(TEXT_OF_RESULTS):
            what = f"= {results!r}, but XLA writes and reads results as text only in files of certain names"
            yield "autotune_results", what, f"use a name that ends in {', '.join(TEXT_OF_RESULTS)}"
        if results is not None and self.deterministic:
            what = "has no effect with deterministic = true, for which XLA chooses no kernel by timing"
            yield "autotune_results", what, "leave one of them out"
        if self.precision == "fp8" and not model.has_fp8_products:
            what = f'= "fp8", but a {model.kind} model has no products in eight bits'
            yield "precision", what, 'use precision = "bf16"'

    def _fold_problems(self) -> Iterator[Problem]:
        """Yield the reasons why experts cannot be folded over other axes."""
        if self.fold_experts != "none" and not self.model.sizes.split_dims.get("experts"):
            what = f"= {self.fold_experts!r}, but the model has no experts"
            yield "fold_experts", what, 'use fold_experts = "none", or set model.num_experts'
        if self.fold_experts in ("context", "both") and self.lora.rank is not None:
            what = f"= {self.fold_experts!r}, but frozen experts are whole over context"
            yield "fold_experts", what, 'use fold_experts = "none" or "tensor" beside adapters'
        yield from dispatch_problems(self.model, self.expert_domains)

    def _state_problems(self) -> Iterator[Problem]:
        """Yield formats of the state that do not go with the arithmetic, and a rounding of nothing."""
        if self.state.parameters == "bf16" and self.precision not in ("bf16", "fp8"):
            what = f'= "bf16", but precision = {self.precision!r} computes with other numbers'
            yield "state.parameters", what, 'use precision = "bf16", or state.parameters = "fp32"'
        if self.state.master == "fp32" and self.state.parameters == "fp32":
            what = '= "fp32" has no effect: the parameters themselves are in fp32'
            yield "state.master", what, 'use state.parameters = "bf16", or leave it out'
        if self.state.parameters == "bf16" and self.gradient_sum == "all-fp32":
            what = '= "bf16", but gradient_sum = "all-fp32" needs parameters in fp32, whose gradients are too'
            yield "state.parameters", what, 'use gradient_sum = "fp32"'
        if self.state.rounding == "stochastic" and not self.state.rounds:
            formats = f"parameters are in {self.state.parameters}, moments in {self.state.moments}"
            what = f'= "stochastic" has no effect: {formats}'
            yield "state.rounding", what, 'use state.parameters = "bf16" or state.moments = "bf16"'

    def _size_problems(self) -> Iterator[Problem]:
        """Yield arrays with more elements than XLA can count; XLA would end without a message."""
        sizes, batch = self.model.sizes, self.batch
        widest = max(sizes.widest_activation, sizes.scores * batch.sequence_length)
        for path, count, what in (
            ("model", self.model.num_parameters, "parameters"),
            ("batch", batch.tokens_per_step * widest, "numbers in one activation"),
        ):
            if count > MOST_ELEMENTS:
                most = f"XLA can count {format_count(MOST_ELEMENTS)}"
                yield path, f"has {format_count(count)} {what}, and {most}", f"use a smaller {path}"

    def _batch_problems(self) -> Iterator[Problem]:
        """Yield problems with microbatches that do not divide the batch, and with `schedule.scale`."""
        batch, scale = self.batch, self.schedule.scale
        path, whole = "batch.sequences", batch.sequences
        if batch.sequences_per_replica is not None:
            path, whole = "batch.sequences_per_replica", batch.sequences_per_replica
        micro = batch.microbatch_sequences
        if micro is not None and whole > micro and whole % micro:
            what = f"= {whole} is not a multiple of batch.microbatch_sequences = {micro}"
            yield path, what, f"use {path} = {whole - whole % micro}"
        if scale != "none" and batch.base_sequences is None:
            what = f"= {scale!r}, but nothing says for which batch the learning rate was chosen"
            yield "schedule.scale", what, "set batch.base_sequences to that batch's sequences"
        if scale == "none" and batch.base_sequences is not None:
            what = f'= {batch.base_sequences} has no effect with schedule.scale = "none"'
            hint = 'use schedule.scale = "linear" or "sqrt", or leave it out'
            yield "batch.base_sequences", what, hint

    def _data_problems(self) -> Iterator[Problem]:
        """Yield data that do not suit the model."""
        model, data = self.model, self.data
        if data.suits not in ("", model.takes, model.kind):
            what = f"= {data.source!r} gives {data.gives}, but a {model.kind} model takes {model.takes}"
            yield "data.source", what, 'use data.source = "synthetic"'
        elif isinstance(data, LineData) and model.sizes.input_shape != (1,):
            what = f"= {model.sizes.input_shape[0]}, but data.source = {data.source!r} gives one input"
            yield "model.input_dim", what, 'use model.input_dim = 1, or data.source = "synthetic"'


def _default_remat(data: dict[str, Any]) -> str:
    """Return the default rematerialisation: keep products and attention, if the model has blocks."""
    return "dots-attention" if data["model"].has_blocks else "none"


def holds_nothing(run: RunConfig) -> bool:
    """Return whether a run reads random tokens, which no model can learn to predict."""
    return isinstance(run.data, SyntheticData) and run.model.takes == "sequences"
