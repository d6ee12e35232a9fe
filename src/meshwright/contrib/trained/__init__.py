"""Use what a run has trained: text that its model writes, and its parameters as a file.

Imports: all of the core. Used by: users, through `meshwright sample` and `meshwright export`;
`trainer.loop`, by entry points.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._sample import NUM_TOKENS as NUM_TOKENS
    from ._sample import TEMPERATURE as TEMPERATURE
    from ._sample import lowered_sample as lowered_sample
    from ._sample import sample_of as sample_of
    from ._sample import sample_tokens as sample_tokens
    from ._sample_run import sample_run as sample_run

__getattr__, __dir__ = names_on_first_use(__name__)
