"""What was predicted beside what was measured. Pure: records in, a record out.
Imports: `ledger`, `predict`. No jax, no clock. Imported by: `training` (for `Measurement`), `report`, `api`.
"""

from ._measurement import Measurement as Measurement
from ._reconcile import first_steps as first_steps
from ._reconcile import reconcile as reconcile
from ._records import Reconciliation as Reconciliation
from ._records import Row as Row
