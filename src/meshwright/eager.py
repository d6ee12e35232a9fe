"""Hold what a step that no compiler has made costs on each rank of a mesh. No torch.

Imports: `ledger`, `predict`, `json_records`. Used by: `results`, `report`, and what runs PyTorch on fake
tensors.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from .json_records import read_record
from .ledger import Ledger
from .predict import Busy, Prediction

NO_BACKWARD = "Nothing requires a gradient: there is no backward pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessage:
    """Collectives of one kind over the same axes in one phase, on one rank in one step.

    payload_bytes, wire_bytes, overlapped_count: as in `ledger.Collective`.
    array_bytes: the whole arrays: the result of an all-gather, the operand of a reduce-scatter.
    phase: forward | backward | recomputed | optimizer.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    phase: str
    count: int
    payload_bytes: int
    wire_bytes: int
    array_bytes: int
    overlapped_count: int

    def __add__(self, other: RankMessage) -> RankMessage:
        names = ("count", "payload_bytes", "wire_bytes", "array_bytes", "overlapped_count")
        return dataclasses.replace(
            self, **{name: getattr(self, name) + getattr(other, name) for name in names}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCount:
    """Holds what one rank keeps in memory and executes.

    Bytes are those of the storages; FLOPs are those of this rank alone.
    parameters_bytes, gradients_bytes, optimizer_state_bytes: its shards, at the end of the step, also those
        in the host's memory. Inputs that require a gradient have one too.
    buffers_bytes, inputs_bytes: the module's buffers; the inputs, and tensors that the module or the loss
        takes from elsewhere.
    saved_activation_bytes: storages that autograd keeps, at the end of the forward pass.
    peak_bytes: the most that is alive at one instant. reserved_bytes: what the caching allocator then has.
    peak_phase: forward | backward | recomputed | optimizer, that of the peak.
    bytes_by_format: category of memory -> number format -> bytes, after the step; of saved activations at the
        end of the forward pass.
    flops_by_phase: forward | backward | recomputed | optimizer; `backward` is without `recomputed`.
    flops_by_operation: PyTorch's operations, "aten.mm", of all phases together.
    """

    rank: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    saved_activation_bytes: int
    peak_bytes: int
    reserved_bytes: int
    flops_by_phase: dict[str, int]
    buffers_bytes: int = 0
    inputs_bytes: int = 0
    peak_phase: str = ""
    bytes_by_format: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    flops_by_operation: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def rule_of_thumb_bytes(self) -> int:
        """Parameters, gradients, optimizer state and saved activations: the usual sum by hand."""
        state = self.parameters_bytes + self.gradients_bytes + self.optimizer_state_bytes
        return state + self.saved_activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCount:
    """Cost of the modules of one scope on the first rank, including everything inside them.

    scope: as in the ledger's FLOPs by module: "layers/*/mlp", and "" for the module itself.
    kind: their class; "" for what `parallelize` put there. num_modules, num_parameters: of the whole mesh.
    flops_by_phase: forward | backward | recomputed, of the modules and their children. Work outside of all
        modules, such as a loss function, is in no row.
    saved_activation_bytes: kept at the end of the forward pass. Each storage belongs to the module that first
        kept it.
    """

    scope: str
    kind: str
    num_modules: int
    num_parameters: int
    flops_by_phase: dict[str, int]
    saved_activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerAccount:
    """The cost of one training step of a PyTorch module on a mesh, as PyTorch runs it.

    name: of the module or of the function that returned it.
    num_parameters: of the whole module.
    ledger: memory and traffic of the rank that needs the most memory, FLOPs of the fleet.
    messages: that rank's collectives by kind, axes and phase.
    ranks: the ranks that were run: the first, and the last, whose shards may be smaller.
    modules: the scopes of the module, in its order.
    seconds: of processor time that the account took.
    prediction: the time of the first rank's step; None where there is none, and `no_prediction` says why.
    busy: what its streams do through that step.
    by_inductor: the memory is that of Inductor's kernels, by a model, where modules are compiled.
    """

    name: str
    num_parameters: int
    ledger: Ledger
    messages: tuple[RankMessage, ...]
    ranks: tuple[RankCount, ...]
    torch_version: str
    seconds: float
    prediction: Prediction | None = None
    busy: Busy | None = None
    modules: tuple[ModuleCount, ...] = ()
    no_prediction: str = ""
    by_inductor: bool = False

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> EagerAccount:
        """Read the text of `to_json`."""
        return read_record(
            EagerAccount, text, name="a module's account", hint="Meshwright wrote it: report it"
        )

    def fields(self) -> dict[str, Any]:
        """Return what a weighing adds to its ledger in JSON: messages, ranks, modules and versions."""
        return {
            "messages": [dataclasses.asdict(message) for message in self.messages],
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "modules": [dataclasses.asdict(module) for module in self.modules],
            "torch_version": self.torch_version,
            "by_inductor": self.by_inductor,
            "seconds": self.seconds,
        }
