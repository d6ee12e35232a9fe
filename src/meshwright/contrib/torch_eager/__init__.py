"""Count what a training step of a PyTorch module costs on each rank of a mesh, from fake tensors.

Imports: `jax_steps` (to find a function by name), `ledger` (its records), `hlo` (mesh axes), `hardware`,
`config`, `eager`, `subprocesses`, `json_records`, `formats`, `units`, `errors`; torch, and the modules that
need it, only inside functions. Used by: `torch`, `torch_as_jax`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

from ._account_process import account_named as account_named
from ._account_process import answer_apart as answer_apart
from ._account_process import serve as serve
from ._account_process import text_in as text_in
from ._module_function import is_torch_module as is_torch_module
from ._module_function import parts_of_function as parts_of_function
from ._module_function import require_torch as require_torch

if TYPE_CHECKING:  # imported on first use, by `__getattr__`: these import torch
    from ._allocator import MIB as MIB
    from ._allocator import CachingAllocator as CachingAllocator
    from ._allocator import segments_expand as segments_expand
    from ._aten_flops import NAMES as NAMES
    from ._aten_flops import call_of as call_of
    from ._aten_flops import format_name as format_name
    from ._aten_flops import is_silent as is_silent
    from ._aten_flops import tensor_text as tensor_text
    from ._attention_kernels import is_given as is_given
    from ._attention_kernels import whole_sequences as whole_sequences
    from ._autocast import APPENDED as APPENDED
    from ._autocast import LOWER as LOWER
    from ._autocast import WIDEST as WIDEST
    from ._autocast import WITH_FORMAT as WITH_FORMAT
    from ._default_plan import repeated_blocks as repeated_blocks
    from ._eager_step import ONE_SEQUENCE as ONE_SEQUENCE
    from ._eager_step import surroundings as surroundings
    from ._fakes import Fakes as Fakes
    from ._fakes import as_given as as_given
    from ._fakes import check_parts as check_parts
    from ._fakes import explain_failure as explain_failure
    from ._fakes import mode_of as mode_of
    from ._mesh_step import account_on_mesh as account_on_mesh
    from ._queue import MAIN as MAIN
    from ._queue import Queue as Queue
    from ._watch import SAVED as SAVED
    from ._watch import TEMPORARY as TEMPORARY
    from ._watch import ModuleStack as ModuleStack
    from ._watch import Storages as Storages
    from ._watch import kind_of as kind_of

__getattr__, __dir__ = names_on_first_use(__name__)
