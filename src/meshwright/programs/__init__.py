"""Say what is weighed: one class for each kind of program, behind one interface.

A run configuration is here. Steps in JAX, scripts and PyTorch modules are kinds of other rooms. Imports:
`results` and what lies below it. Used by: `api`, `cli` and those rooms.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._candidates import CandidatePrograms as CandidatePrograms
    from ._candidates import Candidates as Candidates
    from ._configured import Configured as Configured
    from ._configured import load as load
    from ._configured import resolved as resolved
    from ._configured import run_named as run_named
    from ._configured import weigh_run as weigh_run
    from ._configured_plan import REST as REST
    from ._configured_plan import changes_for_tokens as changes_for_tokens
    from ._kinds import Kind as Kind
    from ._kinds import program_named as program_named
    from ._kinds import program_of as program_of
    from ._kinds import without_interpreter as without_interpreter
    from ._program import Program as Program
    from ._program import RunFacts as RunFacts
    from ._program import RunLength as RunLength
    from ._program import Settings as Settings
    from ._program import fleet_of as fleet_of
    from ._program import knobs_of as knobs_of
    from ._program import name_of as name_of
    from ._program import run_length_of as run_length_of
    from ._program import step_facts as step_facts
    from ._weighed import request_of as request_of
    from ._weighed import weigh_lowered as weigh_lowered
    from ._weighed import weigh_request as weigh_request

__getattr__, __dir__ = names_on_first_use(__name__)
