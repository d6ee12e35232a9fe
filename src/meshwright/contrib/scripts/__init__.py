"""Weigh training scripts in JAX, which run unchanged. Registers the kind `scripts`."""

from __future__ import annotations

from meshwright.programs import Kind

from ._script import is_command as is_command
from ._script import make as make
from ._script import script as script
from ._script import weigh_function as weigh_function

KIND = Kind(what="a script", claims=is_command, make=make, options=("all_calls", "auto_meshes"))
