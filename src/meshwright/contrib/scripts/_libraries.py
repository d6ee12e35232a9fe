"""Change what a script's libraries do while it runs: meshes of JAX, checkpoints of Orbax, steps of PyTorch.

A checkpoint manager of Orbax has no checkpoints and writes none, since arrays have no values.
Imports jax: only the process that runs a script may import this module.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from jax.sharding import AxisType

from meshwright.contrib.jax_steps import replaced
from meshwright.errors import InputError


@contextlib.contextmanager
def meshes_without_types(say: Callable[[], None], *, auto: bool) -> Iterator[None]:
    """See calls of `jax.make_mesh` without `axis_types` in the block, whose axes JAX makes Explicit.

    `say`: called at each. `auto`: make the axes Auto, as they were before JAX 0.9.
    """

    def make(original: Any, axis_shapes: Any, axis_names: Any, axis_types: Any = None, **rest: Any) -> Any:
        if axis_types is None:
            say()
            axis_types = (AxisType.Auto,) * len(axis_names) if auto else None
        return original(axis_shapes, axis_names, axis_types, **rest)

    with replaced("jax", "make_mesh", make):
        yield


def without_checkpoints(say: Callable[[str], None]) -> None:
    """Keep Orbax from writing, if the script imports it. `say`: called with what is left out."""
    sys.meta_path.insert(0, _Changed("orbax.checkpoint", lambda orbax: _without_files(orbax, say)))


def at_torch_steps(stop: Callable[[], None]) -> None:
    """Call `stop` before each step of an optimizer of PyTorch, if the script imports it."""

    def change(torch: Any) -> None:
        hook = sys.modules["torch.optim.optimizer"].register_optimizer_step_pre_hook
        hook(lambda optimizer, args, kwargs: stop())

    sys.meta_path.insert(0, _Changed("torch", change))


class _Changed(MetaPathFinder):
    """Find one module, and change it once it is loaded."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of the one module; None for any other."""
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_change(module: Any) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = load_and_change  # pyright: ignore[reportAttributeAccessIssue]
        return spec


def _without_files(orbax: Any, say: Callable[[str], None]) -> None:
    """Let the checkpoint managers of Orbax save nothing and find nothing."""

    def save(manager: Any, *args: Any, **kwargs: Any) -> bool:
        say("the checkpoint that is saved")
        return True

    def restore(manager: Any, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "the script restores a checkpoint, and arrays are held as shapes",
            hint="let it start from scratch: the step is the same",
        )

    def keep_folder(manager: Any, directory: Any = None, *args: Any, **kwargs: Any) -> None:
        manager._directory = directory

    manager: dict[str, Any] = {
        "__init__": keep_folder,
        "directory": property(lambda self: self._directory),
        "save": save,
        "restore": restore,
        "should_save": lambda self, *args, **kwargs: True,
        "reached_preemption": lambda self, *args, **kwargs: False,
        "all_steps": lambda self, *args, **kwargs: [],
        "__enter__": lambda self: self,
    }
    nothing = ("latest_step", "best_step", "wait_until_finished", "check_for_errors", "reload", "delete")
    nothing += ("close", "__exit__")
    manager |= dict.fromkeys(nothing, lambda self, *args, **kwargs: None)
    for name, instead in manager.items():
        setattr(orbax.CheckpointManager, name, instead)
    for kind in (orbax.Checkpointer, orbax.AsyncCheckpointer):
        kind.save = save
