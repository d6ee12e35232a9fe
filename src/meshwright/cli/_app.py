"""The command `meshwright`: its verbs, and what its exit status says.

0 done; 1 failed; 2 the user's input is wrong; 3 `--check` and it does not fit; 4 broke off: an error nobody
foresaw, or a run that hung; 130 stopped by Ctrl-C, 143 by SIGTERM (`train` has then saved a checkpoint).
"""

from __future__ import annotations

import sys
import traceback

import typer

from meshwright.errors import EXIT_BROKE_OFF, MeshwrightError
from meshwright.processes import leave

from ._account import account
from ._catalog import fleets, formats
from ._console import print_error
from ._data import data
from ._doctor import doctor
from ._export import export
from ._presets import presets
from ._probe import probe
from ._sample import sample
from ._sweep import sweep
from ._train import train
from ._weigh import weigh

app = typer.Typer(
    name="meshwright",
    help="Know what a training run costs before the machines are rented, then run it.",
    epilog="CONFIG: a preset, a TOML file, or package.module:function. Every command has --json and --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a bug keeps Python's own traceback
)
for command in (weigh, train, sample, export, sweep, account, probe, presets, fleets, formats, doctor):
    app.command()(command)
app.add_typer(data, name="data")


@app.callback()
def _root() -> None:
    """Keeps the verbs subcommands, however many there are."""


def main() -> None:
    """Run the command line and end the process with its exit status."""
    try:
        app(prog_name="meshwright")
    except MeshwrightError as error:
        print_error(error)
        leave(error.message, error.exit_code)
        sys.exit(error.exit_code)
    except Exception as error:  # Python's own status for it is 1, which says that there is a hint
        traceback.print_exc()
        words = f"{type(error).__name__}: {error}".splitlines()[0]
        leave(words, EXIT_BROKE_OFF, wait=True)  # a collective that has lost a peer breaks off as well
        sys.exit(EXIT_BROKE_OFF)
