"""Count decompositions, linear systems and Fourier transforms of a step by textbook formula.

Imports: `hlo` (its types). Used by: `ledger` (a compiled program) and `worker` (a traced one), by the entry
point.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._compiled_calls import compiled_work as compiled_work
    from ._textbook import NO_VECTORS as NO_VECTORS
    from ._textbook import ROUTINES as ROUTINES
    from ._textbook import THIN_VECTORS as THIN_VECTORS
    from ._textbook import fft_flops as fft_flops
    from ._textbook import library_flops as library_flops
    from ._traced_equations import TRACED as TRACED
    from ._traced_equations import traced_work as traced_work

__getattr__, __dir__ = names_on_first_use(__name__)
