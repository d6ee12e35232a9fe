"""From a layout to a mesh, and from named dimensions to the axes that split them.
Imports: `config` (axis names), jax. Imported by: `models`, `step`, `training`, the compile worker.
"""

from ._mesh import mesh_of as mesh_of
from ._rules import ACTIVATION_RULES as ACTIVATION_RULES
from ._rules import PARAMETER_RULES as PARAMETER_RULES
from ._rules import activation_spec as activation_spec
from ._rules import batch_axes as batch_axes
from ._rules import gather as gather
from ._rules import look_up as look_up
from ._rules import parameter_spec as parameter_spec
from ._rules import pin as pin
