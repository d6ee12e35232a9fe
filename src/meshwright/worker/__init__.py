"""Compile one program in a separate process: build the step by name, trace it, count its FLOPs, compile it.

A live function is traced and lowered in its own process instead (`lowered_call`). Imports: everything up to
`step`. Used by: `compiler`, which starts `meshwright.worker._main` by its name, and `api`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._live import lowered_call as lowered_call

__getattr__, __dir__ = names_on_first_use(__name__)
