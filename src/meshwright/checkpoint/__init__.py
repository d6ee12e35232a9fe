"""Save a run's state in checkpoints, verify them, and restore them onto any layout.

A checkpoint is written in the background while the run continues, in the format of Orbax. Used by `training`
and `cli`. Imports `errors`, `launch`, `units`, TensorStore and jax. Names are imported on first use, so that
the checkpoints of a folder can be listed without loading jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._arrays import check_match as check_match
    from ._arrays import export_parameters as export_parameters
    from ._arrays import restore as restore
    from ._checkpoints import Checkpoints as Checkpoints
    from ._checkpoints import Saved as Saved
    from ._checkpoints import SaveFailed as SaveFailed
    from ._folder import Found as Found
    from ._folder import Rejected as Rejected
    from ._folder import checkpoint_of as checkpoint_of
    from ._folder import lock_folder as lock_folder
    from ._folder import newest_checkpoint as newest_checkpoint
    from ._folder import open_own as open_own
    from ._folder import steps_in as steps_in
    from ._folder import unread_newest as unread_newest
    from ._folder import write_probe as write_probe

_NAMES = {
    "_arrays": ("check_match", "export_parameters", "restore"),
    "_checkpoints": ("Checkpoints", "SaveFailed", "Saved"),
    "_folder": (
        *("Found", "Rejected", "checkpoint_of", "lock_folder", "newest_checkpoint", "open_own"),
        *("steps_in", "unread_newest", "write_probe"),
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
