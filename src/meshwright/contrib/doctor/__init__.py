"""Examine this machine: what it can compile for and run on, and the rates of its device.

Imports: all of the core. Used by: users, through `meshwright doctor` and `meshwright probe`.
"""
