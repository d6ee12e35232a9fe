"""Explain JAX's sharding errors in terms of the user's layout.

Imports: `sharding`, `config`, `errors`, jax. Used by: the compile worker, by the entry point;
`contrib.instruments`; users as `mw.sharding_errors`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._sharding_errors import sharding_error as sharding_error
    from ._sharding_errors import sharding_errors as sharding_errors
    from ._uneven import Surroundings as Surroundings
    from ._uneven import does_not_divide as does_not_divide
    from ._uneven import indivisible as indivisible

__getattr__, __dir__ = names_on_first_use(__name__)
