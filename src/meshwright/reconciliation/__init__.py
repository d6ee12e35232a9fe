"""Compare the predicted quantities of a step with the measured ones. Pure: records in, a record out.

Imports: `records`, `hardware`, `ledger`, `predict`. No jax, no clock. Imported by: `measure` (for
`Percentiles`), `training`, `report`, `api`, `cli`.
"""

from ._measurement import Measurement as Measurement
from ._measurement import Percentiles as Percentiles
from ._reconcile import Reconciliation as Reconciliation
from ._reconcile import Row as Row
from ._reconcile import first_steps as first_steps
from ._reconcile import reconcile as reconcile
