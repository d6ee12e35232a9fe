"""Account for what a compiled program costs on each device: arithmetic, memory, traffic.

Imports: `compiler` (its record and texts), `hlo`, `hardware`, `formats`, `units`, `errors`. No jax, no clock.
Used by: `predict`, which walks the same `hlo.Program`, `reconciliation`, `planning`, `results`, `training`
(the allowance), `report`, `api`.
"""

from ._flops import executions_of as executions_of
from ._flops import instruction_work as instruction_work
from ._ledger import executions_in as executions_in
from ._ledger import ledger_of as ledger_of
from ._memory import allowance as allowance
from ._records import UNUSED as UNUSED
from ._records import Buffer as Buffer
from ._records import Collective as Collective
from ._records import Finding as Finding
from ._records import FlopLedger as FlopLedger
from ._records import Ledger as Ledger
from ._records import MemoryLedger as MemoryLedger
from ._records import Timeline as Timeline
from ._rules import Call as Call
from ._rules import Work as Work
from ._rules import register_call as register_call
from ._traffic import KINDS as KINDS
from ._traffic import Message as Message
from ._traffic import is_overlapped as is_overlapped
from ._traffic import message_of as message_of
from ._traffic import split_channels as split_channels
