"""Provide the verbs of the Python interface, one a module, which `meshwright` exports.

Imports: everything but `cli`. Used by: `meshwright` and `cli`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # beyond the verbs: what their commands need
    from ._history import add_to_history as add_to_history
    from ._history import history_path as history_path
    from ._history import row_in as row_in
    from ._planned_run import run_to_write as run_to_write
    from ._trackers import check_trackers as check_trackers
    from ._train import Session as Session
    from ._train import named_run as named_run
    from ._train import new_folder as new_folder
    from ._train import train as train
    from ._weigh import weigh_unkept as weigh_unkept

__getattr__, __dir__ = names_on_first_use(__name__)
