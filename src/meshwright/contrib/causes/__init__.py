"""Say why a step takes longer than it should: a trace of anybody's run, next to the weighing's prediction.

A trace is a stranger's file: nothing of it is executed. Imports: all of the core. Used by: users, through
`meshwright reconcile` and `mw.reconcile`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._cause import Asked as Asked
    from ._cause import Cause as Cause
    from ._cause import Gap as Gap
    from ._gap import gap_of as gap_of
    from ._kineto_trace import kineto_trace as kineto_trace
    from ._own_runs import History as History
    from ._own_runs import history as history
    from ._reconcile_verb import reconcile as reconcile
    from ._recorded import HostSpan as HostSpan
    from ._recorded import Recorded as Recorded
    from ._recorded import RecordedStep as RecordedStep
    from ._recorded import Work as Work

__getattr__, __dir__ = names_on_first_use(__name__)
