"""Compare weighings, and hold them to budgets: `meshwright diff` and `meshwright check`.

A compiled program needs no measuring: its bytes, FLOPs and messages are exact and repeat. Imports: all of the
core. Used by: users, and a repository's continuous integration.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._check import Check as Check
    from ._check import check as check
    from ._difference import Difference as Difference
    from ._difference import difference_of as difference_of
    from ._figures import Figures as Figures
    from ._figures import figures_of as figures_of
    from ._outputs import LONGEST_COMMENT as LONGEST_COMMENT
    from ._outputs import annotations_of as annotations_of
    from ._outputs import comment_of as comment_of
    from ._outputs import junit_of as junit_of
    from ._outputs import sarif_of as sarif_of
    from ._verbs import diff as diff

__getattr__, __dir__ = names_on_first_use(__name__)
