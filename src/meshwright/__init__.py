"""Meshwright: what a training run costs before the machines are rented, and then the run itself."""
