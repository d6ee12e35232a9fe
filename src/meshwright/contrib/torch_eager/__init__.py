"""Count what a training step of a PyTorch module costs on each rank of a mesh, from fake tensors.

Imports: `compiler` (to find a function by name), `ledger` (its records), `hlo` (mesh axes), `hardware`,
`config`, `eager`, `children`, `records`, `formats`, `units`, `errors`; torch, and the modules that need it,
only inside functions.
Used by: `torch`, `torch_as_jax`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.lazy import names_on_first_use

from ._apart import account_named as account_named
from ._apart import answer_apart as answer_apart
from ._apart import serve as serve
from ._apart import text_in as text_in
from ._function import is_torch_module as is_torch_module
from ._function import knob_values as knob_values
from ._function import parts_of_function as parts_of_function
from ._function import require_torch as require_torch

if TYPE_CHECKING:  # imported on first use, by `__getattr__`: these import torch
    from ._fakes import Fakes as Fakes
    from ._fakes import as_given as as_given
    from ._fakes import check_parts as check_parts
    from ._fakes import explain_failure as explain_failure
    from ._fakes import mode_of as mode_of
    from ._kernels import is_given as is_given
    from ._kernels import whole_sequences as whole_sequences
    from ._mesh import repeated_blocks as repeated_blocks
    from ._mesh_step import account_on_mesh as account_on_mesh
    from ._step import ONE_SEQUENCE as ONE_SEQUENCE
    from ._step import surroundings as surroundings

__getattr__, __dir__ = names_on_first_use(__name__)
