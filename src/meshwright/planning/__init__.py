"""Suggest changes that make a step smaller, and compare its memory with the rule of thumb.

Imports: `compiler`, `config`, `errors`, `hardware`, `ledger`, `units`. No jax. Used by: `results`, `report`
and `api`.
"""

from ._rule_of_thumb import HandRow as HandRow
from ._rule_of_thumb import HandSum as HandSum
from ._rule_of_thumb import hand_sum as hand_sum
from ._suggestions import Suggestion as Suggestion
from ._suggestions import suggestions as suggestions
