"""The Python face: `weigh`, `train`, `sweep` and `explain`, re-exported by `meshwright`.

Imports: everything but `cli`. Used by: `meshwright` and the command line.
"""
