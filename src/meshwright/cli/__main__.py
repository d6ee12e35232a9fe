"""`python -m meshwright.cli` is the command `meshwright`."""

from meshwright.cli import main

main()
