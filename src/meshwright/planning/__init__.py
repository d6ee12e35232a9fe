"""Suggest changes that make a step smaller, and compare its memory with the rule of thumb.

Imports: `compiler`, `config`, `errors`, `hardware`, `ledger`, `units`. No jax. Used by: `results`, `report`
and `api`.
"""

from ._memory import HandRow as HandRow
from ._memory import HandSum as HandSum
from ._memory import Suggestion as Suggestion
from ._memory import hand_sum as hand_sum
from ._memory import suggestions as suggestions
