"""Keep parts of a run in the hosts' memory: moments between steps, and layers until a pass uses them.

Imports: `config`, `trainer.step`, `trainer.models`, jax. Used by: `config` and `trainer`, by the entry point,
for a run with `offload`; `contrib.trained`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: a configuration's checks need no jax
    from ._offload_checks import offload_problems as offload_problems
    from ._waiting_update import updated as updated
    from .host_layers import fetched as fetched
    from .host_layers import with_stand_ins as with_stand_ins

__getattr__, __dir__ = names_on_first_use(__name__)
