"""Explain what ran out of memory, from what is left of it: `meshwright explain`.

A log, a snapshot, a dump or a profile is a stranger's file: nothing of it is executed. Imports: all of the
core. Used by: users.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._explain_verb import explain_file as explain_file
    from ._explanation import Explanation as Explanation
    from ._explanation import Held as Held

__getattr__, __dir__ = names_on_first_use(__name__)
