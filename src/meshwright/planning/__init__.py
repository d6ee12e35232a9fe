"""Choose layouts and settings: enumerate them, estimate them, and decide which to compile; suggest changes.

Imports: `compiler` (its record only), `config`, `hardware`, `ledger`, `predict`, numpy. No jax. Used by:
`results`, `report` and `api`.
"""

from ._estimates import Estimates as Estimates
from ._estimates import estimate as estimate
from ._search import Outcome as Outcome
from ._search import Search as Search
from ._space import Candidates as Candidates
from ._space import Space as Space
from ._space import parsed_knobs as parsed_knobs
from ._space import space_of as space_of
from ._suggestions import HandSum as HandSum
from ._suggestions import Suggestion as Suggestion
from ._suggestions import fleet_times as fleet_times
from ._suggestions import hand_sum as hand_sum
from ._suggestions import suggestions as suggestions
