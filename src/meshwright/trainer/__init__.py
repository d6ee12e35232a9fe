"""Build the one train step, and run it: models, step, data, checkpoints, the loop, and what starts processes.

Each is a package of its own; nothing is imported here. Imports: `measure`, `sharding`, `compiler` and what
lies below. Used by: `worker`, which compiles the step, and the verbs that run it.
"""
