"""Compile one program in a separate process: build the step by name, trace it, count its FLOPs, compile it.

A live function is traced and lowered in its own process instead (`lowered_call`). Imports: everything up to
`step`. Used by: `compiler`, which starts `meshwright.worker._main` by its name, and `api`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._arguments import argument_paths as argument_paths
    from ._foreign import foreign_program as foreign_program
    from ._foreign import lower_foreign as lower_foreign
    from ._foreign import on_the_fleet as on_the_fleet
    from ._live import lowered_call as lowered_call
    from ._main import check_mesh_of_slices as check_mesh_of_slices
    from ._main import device_coordinates as device_coordinates
    from ._traced import count_traced as count_traced

__getattr__, __dir__ = names_on_first_use(__name__)
