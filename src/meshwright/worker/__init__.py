"""Compile one program in a separate process: build the step by name, trace it, count its FLOPs, compile it.

A live function is traced and lowered in its own process instead (`lowered_call` of `contrib.jax_steps`).
Imports: everything up to `trainer.step`. Used by: `compiler`, which starts `meshwright.worker._main` by its
name, `contrib.jax_steps` and `contrib.scripts`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._deviceless import callbacks_without_devices as callbacks_without_devices
    from ._deviceless import devices_of_kind as devices_of_kind
    from ._deviceless import libraries_of_plugin as libraries_of_plugin
    from ._kernels_alone import KernelsAlone as KernelsAlone
    from ._main import check_mesh_of_slices as check_mesh_of_slices
    from ._main import device_coordinates as device_coordinates
    from ._main import set_environment as set_environment
    from ._optimised import Gate as Gate
    from ._optimised import is_steady as is_steady
    from ._optimised import may_fail_late as may_fail_late
    from ._optimised import optimised as optimised
    from ._optimised import put_assembler as put_assembler
    from ._reports import are_written as are_written
    from ._reports import bytes_in as bytes_in
    from ._reports import could_not_compile as could_not_compile
    from ._reports import program_in as program_in
    from ._reports import texts_in as texts_in
    from ._traced import FREE as FREE
    from ._traced import LIBRARY as LIBRARY
    from ._traced import RULES as RULES
    from ._traced import WALKED as WALKED
    from ._traced import count_traced as count_traced
    from ._traced import inner_program as inner_program

__getattr__, __dir__ = names_on_first_use(__name__)
