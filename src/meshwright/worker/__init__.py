"""Compile one program in a separate process: build the step by name, trace it, count its FLOPs, compile it.

A live function is traced and lowered in its own process instead (`lowered_call`). Imports: everything up to
`step`. Used by: `compiler`, which starts `meshwright.worker._main` by its name, `programs`, and
`contrib.scripts`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._arguments import argument_paths as argument_paths
    from ._arguments import described as described
    from ._arguments import plain as plain
    from ._assembler import Gate as Gate
    from ._assembler import put_assembler as put_assembler
    from ._deviceless import libraries_of_plugin as libraries_of_plugin
    from ._foreign import JAX as JAX
    from ._foreign import checked_program as checked_program
    from ._foreign import foreign_program as foreign_program
    from ._foreign import lower_foreign as lower_foreign
    from ._foreign import on_the_fleet as on_the_fleet
    from ._kernels_alone import KernelsAlone as KernelsAlone
    from ._linear_algebra import LIBRARY as LIBRARY
    from ._live import LoweredText as LoweredText
    from ._live import argument_names as argument_names
    from ._live import lowered_call as lowered_call
    from ._live import lowered_text as lowered_text
    from ._main import check_mesh_of_slices as check_mesh_of_slices
    from ._main import device_coordinates as device_coordinates
    from ._main import set_environment as set_environment
    from ._optimised import is_steady as is_steady
    from ._optimised import may_fail_late as may_fail_late
    from ._optimised import optimised as optimised
    from ._reports import are_written as are_written
    from ._reports import bytes_in as bytes_in
    from ._reports import program_in as program_in
    from ._reports import texts_in as texts_in
    from ._shapes import held_as_shapes as held_as_shapes
    from ._shapes import replaced as replaced
    from ._shapes import unreplaced as unreplaced
    from ._stand_ins import as_the_fleet as as_the_fleet
    from ._traced import FREE as FREE
    from ._traced import RULES as RULES
    from ._traced import WALKED as WALKED
    from ._traced import count_traced as count_traced

__getattr__, __dir__ = names_on_first_use(__name__)
