"""Checkpoints of a run's state: written beside the run, verified, restored onto any layout.
Imports: `errors`, `processes`, `units`, jax. Imported by: `training`, `api`, the command line.

Names are imported on first use: which checkpoints a folder holds is known without loading jax.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._checkpoints import Checkpoints as Checkpoints
    from ._copy import host_copy_bytes as host_copy_bytes
    from ._export import export_parameters as export_parameters
    from ._folder import lock_folder as lock_folder
    from ._folder import open_own as open_own
    from ._folder import steps_in as steps_in
    from ._folder import write_probe as write_probe
    from ._newest import checkpoint_of as checkpoint_of
    from ._newest import newest_checkpoint as newest_checkpoint
    from ._newest import unread_newest as unread_newest
    from ._records import Found as Found
    from ._records import Rejected as Rejected
    from ._records import Saved as Saved
    from ._records import SaveFailed as SaveFailed
    from ._restore import check_match as check_match
    from ._restore import restore as restore

_HOMES = {
    "Checkpoints": "_checkpoints",
    "host_copy_bytes": "_copy",
    "export_parameters": "_export",
    "lock_folder": "_folder",
    "open_own": "_folder",
    "steps_in": "_folder",
    "write_probe": "_folder",
    "unread_newest": "_newest",
    "checkpoint_of": "_newest",
    "newest_checkpoint": "_newest",
    "Found": "_records",
    "Rejected": "_records",
    "Saved": "_records",
    "SaveFailed": "_records",
    "check_match": "_restore",
    "restore": "_restore",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
