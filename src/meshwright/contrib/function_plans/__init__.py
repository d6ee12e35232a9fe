"""Plan the step of a user's function: list the meshes and arguments that it may have on a fleet.

Imports: `programs`, `planning`, `compiler`. Used by: `contrib.jax_steps`; `contrib.torch`, whose modules are
planned as functions are.
"""

from ._foreign_programs import ForeignPrograms as ForeignPrograms
from ._function_plan import checked_space as checked_space
from ._function_plan import function_candidates as function_candidates
from ._function_plan import room_for as room_for
from ._function_space import FUNCTION_PRIORS as FUNCTION_PRIORS
from ._function_space import FunctionSpace as FunctionSpace
from ._function_space import function_space as function_space
