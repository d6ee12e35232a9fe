"""Account for what a compiled program costs on each device: arithmetic, memory, traffic.

Imports: `compiler` (its record and texts), `hlo`, `hardware`, `formats`, `units`, `errors`. No jax, no clock.
Used by: `predict`, which walks the same `hlo.Program`, `planning`, `measure`, `eager`, `trainer.loop` (the
allowance), `results`, `programs`, `report`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: the records are read where nothing is reckoned
    from ._findings import Replication as Replication
    from ._findings import axes_of_sharding as axes_of_sharding
    from ._findings import findings_of as findings_of
    from ._flops import Unnamed as Unnamed
    from ._flops import executed_flops as executed_flops
    from ._flops import executions_of as executions_of
    from ._flops import first_runs as first_runs
    from ._flops import homes_of as homes_of
    from ._flops import instruction_work as instruction_work
    from ._flops import shared_out as shared_out
    from ._ledger import executions_in as executions_in
    from ._ledger import ledger_of as ledger_of
    from ._ledger_records import RESERVED as RESERVED
    from ._ledger_records import Buffer as Buffer
    from ._ledger_records import Collective as Collective
    from ._ledger_records import Finding as Finding
    from ._ledger_records import FlopLedger as FlopLedger
    from ._ledger_records import Ledger as Ledger
    from ._ledger_records import MemoryLedger as MemoryLedger
    from ._ledger_records import Timeline as Timeline
    from ._ledger_records import allowance as allowance
    from ._ledger_records import usable_bytes as usable_bytes
    from ._library_calls import FOURIER as FOURIER
    from ._library_calls import LINEAR_ALGEBRA as LINEAR_ALGEBRA
    from ._memory_ledger import LiveRange as LiveRange
    from ._memory_ledger import LiveValue as LiveValue
    from ._memory_ledger import Owners as Owners
    from ._memory_ledger import memory_of as memory_of
    from ._memory_ledger import parse_assignment as parse_assignment
    from ._traffic import EXCHANGES as EXCHANGES
    from ._traffic import Message as Message
    from ._traffic import channels_through_loops as channels_through_loops
    from ._traffic import crossing_bytes as crossing_bytes
    from ._traffic import domains_of as domains_of
    from ._traffic import is_of_experts as is_of_experts
    from ._traffic import is_overlapped as is_overlapped
    from ._traffic import message_of as message_of
    from ._traffic import span_of as span_of
    from ._traffic import split_channels as split_channels
    from ._traffic import traffic_of as traffic_of
    from ._work_rules import CustomCall as CustomCall
    from ._work_rules import MultiplyAdds as MultiplyAdds
    from ._work_rules import calls_the_host as calls_the_host
    from ._work_rules import elementwise_of as elementwise_of
    from ._work_rules import is_ragged_call as is_ragged_call
    from ._work_rules import left_dimensions as left_dimensions
    from ._work_rules import mark_kernels as mark_kernels
    from ._work_rules import register_call as register_call
    from ._work_rules import registered_targets as registered_targets
    from ._work_rules import traced_kernel_of as traced_kernel_of
    from ._work_rules import work_of as work_of

__getattr__, __dir__ = names_on_first_use(__name__)
