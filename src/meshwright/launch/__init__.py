"""The processes of one run: how each finds the others, and what they tell each other beside the devices.
Imports: `errors`, jax (late). Imported by: `checkpoint`, `training`, `_train`, the command line.
"""

from ._join import COORDINATOR as COORDINATOR
from ._join import INDEX as INDEX
from ._join import NUM_PROCESSES as NUM_PROCESSES
from ._join import PARENT as PARENT
from ._join import Place as Place
from ._join import join as join
from ._join import leave as leave
from ._join import over as over
from ._join import place_in as place_in
from ._join import processes_of_this_run as processes_of_this_run
from ._peers import Alone as Alone
from ._peers import Peers as Peers
