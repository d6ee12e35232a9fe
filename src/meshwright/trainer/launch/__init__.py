"""Find this process's place in its run, and compare what the processes of a run are about to do.

Used by `checkpoint`, `loop`, `api` and `cli`. Imports `errors`, `registry`, and jax only when it is
needed.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._alike import Facts as Facts
    from ._alike import agreed as agreed
    from ._join import COORDINATOR as COORDINATOR
    from ._join import INDEX as INDEX
    from ._join import JAX_COORDINATOR as JAX_COORDINATOR
    from ._join import NUM_PROCESSES as NUM_PROCESSES
    from ._join import PARENT as PARENT
    from ._join import Place as Place
    from ._join import await_verdict as await_verdict
    from ._join import join as join
    from ._join import leave as leave
    from ._join import noting_signals as noting_signals
    from ._join import over as over
    from ._join import place_in as place_in
    from ._join import processes_of_this_run as processes_of_this_run
    from ._single_process import SINGLE_PROCESS as SINGLE_PROCESS
    from ._single_process import SingleProcess as SingleProcess

__getattr__, __dir__ = names_on_first_use(__name__)
