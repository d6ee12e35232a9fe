"""Register functions that return a PyTorch module, and models of Hugging Face; refuse PyTorch scripts.

A function is one of PyTorch if its file imports PyTorch and not JAX. No torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.contrib.hub import huggingface_model
from meshwright.errors import InputError
from meshwright.files import MOST_SOURCE_BYTES, read_text
from meshwright.hardware import Fleet
from meshwright.programs import Kind, Program, Settings
from meshwright.results import Weighing

from ._recognise import imports_torch_alone, torch_script_error, torch_script_of

JAX, TORCH = "jax", "torch"


def _claims(words: Sequence[str]) -> bool:
    return len(words) == 1 and (_is_of_torch(words[0]) or huggingface_model(words[0]) is not None)


def _make(words: Sequence[str], as_: str | None = None) -> Program:
    """Return the program of a function by its name, or of a Hugging Face model.

    Args:
        as_: "jax" makes a JAX program of the module; "torch" and None leave it as PyTorch runs it.

    Raises:
        InputError: `as_` is neither.
    """
    from ._torch_step import torch_step

    if as_ not in (None, JAX, TORCH):
        raise InputError(f"a module cannot be weighed as {as_!r}", hint=f"as {TORCH!r} or {JAX!r}")
    if as_ is None and not is_function(words[0]):
        from ._transformers_step import transformers_step

        return transformers_step(words[0], is_asked_for=False)
    step = torch_step(words[0])
    return step.as_jax() if as_ == JAX else step


def is_function(text: str) -> bool:
    """Return whether a text names a function, "package.module:function", and not a file or a model's id."""
    return ":" in text and not os.path.exists(text)


def _is_of_torch(name: str) -> bool:
    """Return whether the file of a function imports PyTorch, or a library of its models, and not JAX.

    The file is read and not run: a function of PyTorch is to be called on the meta device.
    """
    module_name, colon, _ = name.rpartition(":")
    if not colon:
        return False
    try:
        text = _source(module_name)
    except (OSError, ValueError):
        return False
    return imports_torch_alone(text)


def _source(module_name: str) -> str:
    """Return the text of a module's file, which is looked up first in the working directory; "" if none."""
    parts = module_name.removesuffix(".py").replace("/", ".").split(".")
    if module_name.endswith(".py"):
        return read_text(module_name, MOST_SOURCE_BYTES)
    for file in (Path(*parts).with_suffix(".py"), Path(*parts, "__init__.py")):
        if file.is_file():
            return read_text(file, MOST_SOURCE_BYTES)
    if importlib.util.find_spec(parts[0]) is None:
        return ""
    try:
        spec = importlib.util.find_spec(module_name)
    except ModuleNotFoundError:
        return ""
    origin = None if spec is None else spec.origin
    return read_text(origin, MOST_SOURCE_BYTES) if origin and os.path.isfile(origin) else ""


@dataclass(frozen=True, slots=True)
class TorchScript(Program):
    """A PyTorch script, which would really train here. It is refused, with what to write instead."""

    script: Path

    @property
    def name(self) -> str:
        """The script's file."""
        return str(self.script)

    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Raise: nothing of the script is run.

        Raises:
            InputError: always. Its hint is a file that `weigh` takes.
        """
        raise torch_script_error(self.script, fleet.name)


def _make_script(words: Sequence[str], **of_scripts: bool) -> Program:
    """Return a script as a program that refuses to be weighed, whatever is asked of it."""
    script = torch_script_of(words)
    assert script is not None, "the words are claimed"
    return TorchScript(script)


SCRIPT_KIND = Kind(
    what="a script",
    claims=lambda words: torch_script_of(words) is not None,
    make=_make_script,
    options=("all_calls", "auto_meshes"),
)
KIND = Kind(what="a PyTorch module", claims=_claims, make=_make, options=("as_",))
