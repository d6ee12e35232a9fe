"""Parse the text of an optimised XLA program: instructions, shapes, groups, trip counts, scopes, data flow.

Imports nothing of Meshwright, and no jax. Used by: `ledger`, `predict`, `worker`
(scopes of a traced program), and rooms of `contrib`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._annotations import PHASES as PHASES
    from ._annotations import Axes as Axes
    from ._annotations import Coordinates as Coordinates
    from ._annotations import Frame as Frame
    from ._annotations import ProgramPhases as ProgramPhases
    from ._annotations import axes_of as axes_of
    from ._annotations import axes_of_pairs as axes_of_pairs
    from ._annotations import dimensions_of as dimensions_of
    from ._annotations import expected_trips as expected_trips
    from ._annotations import held_as as held_as
    from ._annotations import iota_of as iota_of
    from ._annotations import leaves_the_domain as leaves_the_domain
    from ._annotations import module_of as module_of
    from ._annotations import parse_groups as parse_groups
    from ._annotations import phase_of as phase_of
    from ._annotations import place_of_frames as place_of_frames
    from ._annotations import shares_of as shares_of
    from ._annotations import twice_seen as twice_seen
    from ._annotations import with_place as with_place
    from ._slices import joined_slices as joined_slices
    from ._text import COLLECTIVES as COLLECTIVES
    from ._text import FREE as FREE
    from ._text import OTHER_EXCHANGES as OTHER_EXCHANGES
    from ._text import RUNNING as RUNNING
    from ._text import Array as Array
    from ._text import Computation as Computation
    from ._text import Instruction as Instruction
    from ._text import Operand as Operand
    from ._text import Program as Program
    from ._text import Shape as Shape
    from ._text import leaves_of as leaves_of
    from ._text import parse_program as parse_program
    from ._text import parse_shape as parse_shape
    from ._walks import Dataflow as Dataflow
    from ._walks import Execution as Execution
    from ._walks import Executions as Executions
    from ._walks import Place as Place
    from ._walks import trips_of as trips_of

__getattr__, __dir__ = names_on_first_use(__name__)
