"""Choose layouts and settings: enumerate them, estimate them, and decide which to compile; suggest changes.

Imports: `config`, `hardware`, `ledger`, `predict`, numpy. No jax. Used by: `results`, `programs`, `report`
and `api`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._closed_form import Form as Form
    from ._estimates import Estimates as Estimates
    from ._estimates import estimate as estimate
    from ._messages import seconds_of as seconds_of
    from ._search import Priors as Priors
    from ._search import Search as Search
    from ._search import SearchOutcome as SearchOutcome
    from ._search import fitting_probability as fitting_probability
    from ._search import promise_of as promise_of
    from ._simplest import simplest_rows as simplest_rows
    from ._slice_layouts import inside_slices as inside_slices
    from ._space import Candidates as Candidates
    from ._space import Space as Space
    from ._space import candidates_of as candidates_of
    from ._space import knobs_of_run as knobs_of_run
    from ._space import parsed_knobs as parsed_knobs
    from ._space import room_of as room_of
    from ._space import settings_words as settings_words
    from ._space import space_of as space_of
    from ._space import values_by_knob as values_by_knob
    from ._suggestions import BYTES as BYTES
    from ._suggestions import HandRow as HandRow
    from ._suggestions import RuleOfThumb as RuleOfThumb
    from ._suggestions import Suggestion as Suggestion

__getattr__, __dir__ = names_on_first_use(__name__)
