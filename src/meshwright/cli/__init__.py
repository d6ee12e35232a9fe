"""The command line: one verb per command, the only place that prints. Results to stdout, talk to stderr.
Imports: everything, but inside its functions: `--help` loads no jax, no numpy, no config.
"""

import sys


def main() -> None:
    """Run the command line and end the process with its exit status."""
    try:
        from ._app import main as run

        run()
    except KeyboardInterrupt:  # before a command begins, or after it has ended: commands catch it themselves
        sys.exit(130)
