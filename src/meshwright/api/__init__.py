"""Provide the verbs of the Python interface, one a module, which `meshwright` exports.

Imports: everything but `cli`. Used by: `meshwright` and `cli`.
"""
