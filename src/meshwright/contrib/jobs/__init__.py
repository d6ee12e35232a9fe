"""Write job files that make a scheduler start `meshwright train --resume` on all hosts of a fleet.

Imports: `hardware`, `files`, `trainer.launch` (names of variables). Registers the kinds of `plan --emit`.
Used by: users as `meshwright.contrib.jobs.job_file`.
"""

from ._job_files import K8S as K8S
from ._job_files import KINDS as KINDS
from ._job_files import SKYPILOT as SKYPILOT
from ._job_files import SLURM as SLURM
from ._job_files import job_file as job_file
