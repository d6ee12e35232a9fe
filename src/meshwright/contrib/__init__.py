"""Kinds of program and formats that stand beside the core.

A room here may import the core. The core imports none of them: each registers itself by an entry point. Each
has its own tests and its own extra.
"""
