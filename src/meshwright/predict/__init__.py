"""What a step will take: a walk over the compiled schedule with kernel and collective models.

Imports: `ledger`, `compiler` (its record only), `hardware`, `errors`, `formats`, numpy. No jax, no clock.
Used by: `reconcile`, `plan`, `report`, `api`. Coefficients: rates.toml, by benchmarks/fit_rates.py.
"""

from ._predict import predict as predict
from ._predict import predicted_trace as predicted_trace
from ._records import Help as Help
from ._records import Interval as Interval
from ._records import Prediction as Prediction
from ._records import RunTotal as RunTotal
from ._records import Slice as Slice
from ._records import checked_price as checked_price
from ._records import run_total as run_total
from ._records import steps_for as steps_for
