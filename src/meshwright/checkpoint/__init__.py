"""Save a run's state in checkpoints, verify them, and restore them onto any layout.

A checkpoint is written in the background while the run continues. Used by `training` and `cli`. Imports
`errors`, `launch`, `units` and jax. Names are imported on first use, so that the checkpoints of a folder can
be listed without loading jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._checkpoints import Checkpoints as Checkpoints
    from ._folder import checkpoint_of as checkpoint_of
    from ._folder import lock_folder as lock_folder
    from ._folder import newest_checkpoint as newest_checkpoint
    from ._folder import open_own as open_own
    from ._folder import steps_in as steps_in
    from ._folder import unread_newest as unread_newest
    from ._folder import write_probe as write_probe
    from ._records import Found as Found
    from ._records import Rejected as Rejected
    from ._records import Saved as Saved
    from ._records import SaveFailed as SaveFailed
    from ._restore import check_match as check_match
    from ._restore import export_parameters as export_parameters
    from ._restore import host_copy_bytes as host_copy_bytes
    from ._restore import restore as restore

_HOMES = {
    "Checkpoints": "_checkpoints",
    "checkpoint_of": "_folder",
    "lock_folder": "_folder",
    "newest_checkpoint": "_folder",
    "open_own": "_folder",
    "steps_in": "_folder",
    "unread_newest": "_folder",
    "write_probe": "_folder",
    "Found": "_records",
    "Rejected": "_records",
    "SaveFailed": "_records",
    "Saved": "_records",
    "check_match": "_restore",
    "export_parameters": "_restore",
    "host_copy_bytes": "_restore",
    "restore": "_restore",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
