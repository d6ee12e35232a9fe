"""Compile one program in a process of its own: build the step by name, trace it, count its FLOPs, compile it.

Imports: everything up to `step`. Used by: `compiler`, which starts `meshwright.worker._main` by its name.
"""
