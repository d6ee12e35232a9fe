"""Weigh a user's own train step in JAX: find it, trace and lower it for a fleet, name its arguments.

Imports: `programs`, `worker`, `compiler`, `sharding`, jax inside its modules. Used by: `worker` and
`programs`, by the entry point; users, as `mw.jax_step`; `contrib.causes`, `contrib.scripts`, `contrib.torch`,
`contrib.torch_eager`, `contrib.instruments`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._arguments import argument_paths as argument_paths
    from ._arguments import described as described
    from ._arguments import plain as plain
    from ._find_function import USERS_FAILURES as USERS_FAILURES
    from ._find_function import find_function as find_function
    from ._find_function import needs as needs
    from ._find_function import place_of as place_of
    from ._find_function import where as where
    from ._foreign import JAX as JAX
    from ._foreign import checked_program as checked_program
    from ._foreign import declared as declared
    from ._foreign import foreign_program as foreign_program
    from ._foreign import lower_foreign as lower_foreign
    from ._foreign import on_the_fleet as on_the_fleet
    from ._jax_step import NamedStep as NamedStep
    from ._jax_step import jax_step as jax_step
    from ._leaks import explaining_leaks as explaining_leaks
    from ._leaks import leak_error as leak_error
    from ._leaks import refuse_traced as refuse_traced
    from ._live import LoweredText as LoweredText
    from ._live import argument_names as argument_names
    from ._live import arguments_on_mesh as arguments_on_mesh
    from ._live import compiled_text as compiled_text
    from ._live import lowered_call as lowered_call
    from ._live import lowered_text as lowered_text
    from ._partitioning import ask_in as ask_in
    from ._place import abstract as abstract
    from ._place import place as place
    from ._shapes import held_as_shapes as held_as_shapes
    from ._shapes import replaced as replaced
    from ._shapes import unreplaced as unreplaced
    from ._stand_ins import as_the_fleet as as_the_fleet

__getattr__, __dir__ = names_on_first_use(__name__)
