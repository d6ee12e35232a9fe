"""Checkpoints of a run's state: written beside the run, verified, restored onto any layout.
Imports: `errors`; jax and Orbax. Imported by: `training`, `api`.
"""
