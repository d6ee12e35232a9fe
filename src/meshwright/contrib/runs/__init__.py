"""List, find and compare what was run and weighed: `meshwright runs` and `meshwright compare`.

`found_runs()` returns all known runs with their states, `run_record(folder)` the one of a folder; a
`RunRecord` reads the curves, notices, phases, samples and checkpoints of its folder.
Imports: all of the core. Used by: users.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._buckets import Buckets as Buckets
    from ._buckets import Have as Have
    from ._comparison import Comparison as Comparison
    from ._comparison import compare as compare
    from ._found_runs import found_runs as found_runs
    from ._kept_figures import all_named as all_named
    from ._metrics import Metrics as Metrics
    from ._run_record import RunRecord as RunRecord
    from ._run_record import moment as moment
    from ._run_record import run_record as run_record
    from ._runs_list import Runs as Runs
    from ._runs_list import runs as runs

__getattr__, __dir__ = names_on_first_use(__name__)
