"""Provide the command line: one verb per command, and the only package that prints.

Results go to stdout, messages to stderr. Imports: everything, but inside its functions: `--help` loads no
jax, no numpy and no config.
"""

import sys
from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._app import Command as Command
    from ._app import Verbs as Verbs
    from ._app import app_for as app_for
    from ._console import EXIT_INTERRUPTED as EXIT_INTERRUPTED
    from ._console import JsonFlag as JsonFlag
    from ._console import answer as answer
    from ._console import answer_with as answer_with
    from ._console import bar as bar
    from ._console import complete_config as complete_config
    from ._console import console as console
    from ._console import phases as phases
    from ._console import print_json as print_json
    from ._console import say as say
    from ._console import say_readings as say_readings
    from ._console import show as show
    from ._console import table as table
    from ._plan_progress import end_search as end_search
    from ._plan_progress import ended_by_signals as ended_by_signals
    from ._plan_progress import plan_progress as plan_progress
    from ._progress import bars as bars
    from ._progress import own_command_for_children as own_command_for_children
    from ._train_command import OnOption as OnOption
    from ._weigh_command import Config as Config
    from ._weigh_command import LayoutOption as LayoutOption
    from ._weigh_command import LoraOption as LoraOption
    from ._weigh_command import SetOption as SetOption
    from ._weigh_command import with_lora as with_lora

__getattr__, __dir__ = names_on_first_use(__name__)


def main() -> None:
    """Run the command line and end the process with its exit status."""
    try:
        from ._app import main as run

        run()
    except KeyboardInterrupt:  # before a command begins or after it ends: commands handle Ctrl-C themselves
        sys.exit(130)
