"""Compile one program in a separate process: build the step by name, trace it, count its FLOPs, compile it.

Imports: everything up to `step`. Used by: `compiler`, which starts `meshwright.worker._main` by its name.
"""
