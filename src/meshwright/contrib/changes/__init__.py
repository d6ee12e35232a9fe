"""Compile changes to a weighed step: those that would help, and the longest sequence or batch that fits.

Imports: all of the core. Used by: users, as `mw.explain` and `mw.largest`; `cli`, by entry points;
`contrib.causes`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._changes import Changes as Changes
    from ._largest import Largest as Largest
    from ._largest import answer_largest as answer_largest
    from ._largest import largest as largest
    from ._largest import search as search
    from ._smaller_memory import suggestions as suggestions
    from ._weighed_changes import change_between as change_between
    from ._weighed_changes import explain as explain
    from ._weighed_changes import failed_change as failed_change
    from ._weighed_changes import faster as faster
    from ._weighed_changes import weighed_change as weighed_change

__getattr__, __dir__ = names_on_first_use(__name__)
