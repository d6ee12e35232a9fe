"""`python -m meshwright` is the command `meshwright`."""

from meshwright.cli import main

main()
