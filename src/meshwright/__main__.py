"""`python -m meshwright` is the command `meshwright`."""

import os
import sys

try:
    from meshwright.cli import main
except KeyboardInterrupt:  # Ctrl-C while the command was being imported
    sys.exit(130)

try:
    # `python -m` looks there first: a file `secrets.py` would run in place of the standard library's.
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]
except FileNotFoundError:  # the working directory has gone, and nothing can be in it
    sys.path[:] = [folder for folder in sys.path if folder]


main()
