"""Save a run's state in checkpoints, verify them, and restore them onto any layout.

A checkpoint is written in the background while the run continues, in the format of Orbax. Used by `loop`
and `cli`. Imports `errors`, `launch`, `units`, TensorStore and jax. Names are imported on first use, so that
the checkpoints of a folder can be listed without loading jax.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._checkpoints import Checkpoints as Checkpoints
    from ._checkpoints import Saved as Saved
    from ._checkpoints import SaveFailed as SaveFailed
    from ._folder import CheckpointFolder as CheckpointFolder
    from ._folder import Found as Found
    from ._folder import Rejected as Rejected
    from ._folder import checkpoint_of as checkpoint_of
    from ._folder import lock_folder as lock_folder
    from ._folder import newest_checkpoint as newest_checkpoint
    from ._folder import open_own as open_own
    from ._folder import path_for_arrays as path_for_arrays
    from ._folder import steps_in as steps_in
    from ._folder import unread_newest as unread_newest
    from ._folder import write_probe as write_probe
    from ._manifest import MANIFEST as MANIFEST
    from ._manifest import MANIFEST_HASH as MANIFEST_HASH
    from ._manifest import Damaged as Damaged
    from ._manifest import Manifest as Manifest
    from ._manifest import hash_line as hash_line
    from ._manifest import verified as verified
    from ._stored_arrays import StoredArray as StoredArray
    from ._stored_arrays import check_match as check_match
    from ._stored_arrays import export_parameters as export_parameters
    from ._stored_arrays import restore as restore
    from ._stored_arrays import whole_array as whole_array

__getattr__, __dir__ = names_on_first_use(__name__)
