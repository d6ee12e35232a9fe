"""The command line: one verb per command, the only place that prints. Results to stdout, talk to stderr.
Imports: everything, but inside its functions: `--help` loads no jax, no numpy, no config.
"""

from ._app import main as main
