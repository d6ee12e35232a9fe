"""A PyTorch module's training loss and step as a JAX program.

Imports: `torch_eager` (fake tensors), `jax_steps`, `trainer.models` (cuDNN's attention). Used by:
`torch`, when such a program is asked for, and users as `mw.module_as_jax`. `_export` alone imports torch
before a function is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

from ._export_process import exported_named as exported_named
from ._exported_json import ExportedFunction as ExportedFunction
from ._module import JaxModule as JaxModule
from ._module import module_as_jax as module_as_jax
from ._module_program import AS_WRITTEN as AS_WRITTEN
from ._module_program import ModuleProgram as ModuleProgram
from ._module_step import ModuleStep as ModuleStep
from ._module_step import attention_on as attention_on
from ._module_step import name_and_options as name_and_options
from ._module_step import optimizer_named as optimizer_named

if TYPE_CHECKING:  # imported on first use, by `__getattr__`: it imports torch
    from ._export import exported as exported

__getattr__, __dir__ = names_on_first_use(__name__)
