"""Checkpoints of a run's state: written beside the run, verified, restored onto any layout.
Imports: `errors`, `processes`, `units`, jax. Imported by: `training`, `api`, the command line.
"""

from ._checkpoints import Checkpoints as Checkpoints
from ._copy import host_copy_bytes as host_copy_bytes
from ._export import export_parameters as export_parameters
from ._newest import checkpoint_of as checkpoint_of
from ._newest import newest_checkpoint as newest_checkpoint
from ._records import Found as Found
from ._records import Rejected as Rejected
from ._records import Saved as Saved
from ._records import SaveFailed as SaveFailed
from ._restore import restore as restore
