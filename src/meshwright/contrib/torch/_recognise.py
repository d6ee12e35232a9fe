"""Recognise a PyTorch script on the road of JAX scripts, and say what to write instead.

A script of PyTorch has no jitted call, and its step would run for real on this machine. So its file is read
before anything runs: it imports PyTorch or a library of it, and neither it nor a file next to it that it
imports uses JAX. What it says about its module makes the function that `weigh` takes.

Used by: `_kind`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.errors import InputError
from meshwright.programs import without_interpreter

TORCH = {
    "torch",
    "torchvision",
    "diffusers",
    "timm",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "deepspeed",
}
TORCH |= {"deepspeed", "lightning", "pytorch_lightning", "torchtitan", "torchtune", "composer"}
JAX = {"jax", "jaxlib", "flax", "optax", "equinox", "haiku", "keras", "numpyro", "orbax"}
LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "composer", "lightning"}
LAUNCHING_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
WRAPPERS = {"DDP", "DistributedDataParallel", "DataParallel", "FSDP", "FullyShardedDataParallel"}
MOVES = ("to", "cuda", "train")
MOST_BYTES, MOST_FILES = 2_000_000, 200
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_FORMAT = re.compile(r"torch\.(bfloat16|half|float\w*|double)")
_REQUIREMENT = re.compile(r"[\w-]+")


def launched_script(command: Sequence[str]) -> str | None:
    """Return the script that a launcher of PyTorch runs: "train.py" of "torchrun --nproc 8 train.py --lr 1".

    None if the command has no such launcher, or names no script.
    """
    words = list(command)
    named = words[:1] and Path(words[0]).name in LAUNCHERS
    if not named and not ("-m" in words and any(word in LAUNCHING_MODULES for word in words)):
        return None
    return next((word for word in words if word.endswith(".py")), None)


def torch_script_of(words: Sequence[str]) -> Path | None:
    """Return the PyTorch script that a command runs, with or without a launcher; None if it runs none.

    Args:
        words: as for the shell: ["python", "train.py"], ["-m", "package"], ["torchrun", "train.py"].
    """
    launched = launched_script(words)
    rest = without_interpreter(words)
    named = rest[0] if rest and rest[0].endswith(".py") else None
    if rest[:1] == ["-m"] and len(rest) > 1:
        named = str(Path(*rest[1].split(".")).with_suffix(".py"))
    found = (Path(each) for each in (launched, named) if each is not None)
    return next((each for each in found if each.is_file() and is_torch_script(each)), None)


def imports_torch_alone(text: str) -> bool:
    """Return whether the text of a file imports PyTorch, or a library of its models, and not JAX.

    >>> imports_torch_alone("import time, torch"), imports_torch_alone("import jax, torch")
    (True, False)
    """
    try:
        found = {name.partition(".")[0] for name in _imported(ast.parse(text))}
    except (SyntaxError, ValueError, RecursionError):
        return False
    return bool(found & TORCH) and not found & JAX


def is_torch_script(file: Path) -> bool:
    """Return whether a script uses PyTorch and not JAX, by its imports and those of files next to it."""
    found = _imports(file)
    if not found & TORCH or found & (JAX | {"meshwright"}):
        return False
    return not any(_needs_jax(name) for name in found - TORCH - set(sys.stdlib_module_names))


def torch_script_error(file: Path, fleet: str) -> InputError:
    """Return the error for a PyTorch script. Its hint is a file that `weigh` takes, as far as it is known."""
    tree = _parsed(file) or ast.Module([], [])
    module, inputs, line = _step_of(tree)
    about = f"  # as {file.name}:{line} makes it" if module else "  # your torch.nn.Module"
    given = f'"inputs": ({inputs or "BATCH"},), "optimizer": torch.optim.AdamW'
    lines = [
        "let a function return its module and one batch, in a file:",
        "    # weigh_model.py",
        "    import torch",
        *(f"    {each}" for each in _needed(tree, file.stem, f"{module} {inputs}")),
        "    def build():",
        f"        module = {module or 'MODEL'}{about}",
        f'        return {{"module": module, {given}}}',
        f"and `meshwright weigh weigh_model.py:build --on {fleet}`; docs/how-to/pytorch.md says more",
    ]
    return InputError(
        f"{file} trains with PyTorch, and this command weighs scripts of JAX; nothing of it was run",
        hint="\n".join(lines),
    )


def _imports(first: Path) -> set[str]:
    """Return the outermost names of what a file imports, and of what the local files that it imports do."""
    found: set[str] = set()
    waiting, seen = [first], set[Path]()
    while waiting and len(seen) < MOST_FILES:
        file = waiting.pop()
        if file in seen or (tree := _parsed(file)) is None:
            continue
        seen.add(file)
        for name in _imported(tree):
            local = [first.parent.joinpath(*name.split(".")), file.parent.joinpath(*name.split("."))]
            files = [path for each in local for path in (each.with_suffix(".py"), each / "__init__.py")]
            here = [path for path in files if path.is_file()]
            waiting += here
            if not here:
                found.add(name.partition(".")[0])
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules that a file imports anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.module
            if node.level or node.module:  # `from package import module`
                yield from (f"{node.module}.{a.name}" if node.module else a.name for a in node.names)


def _parsed(file: Path) -> ast.Module | None:
    """Return the syntax tree of a file; None if it is no Python of a usual size."""
    try:
        if not file.is_file() or file.stat().st_size > MOST_BYTES:
            return None
        return ast.parse(file.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _needs_jax(name: str) -> bool:
    """Return whether an installed package that provides a module requires JAX."""
    for distribution in importlib.metadata.packages_distributions().get(name, ()):
        required = importlib.metadata.requires(distribution) or ()
        names = [_REQUIREMENT.match(each) for each in required if "extra ==" not in each]
        if any(each is not None and each[0].lower() in JAX for each in names):
            return True
    return False


def _step_of(tree: ast.Module) -> tuple[str, str, int]:
    """Return the expressions of a script's module and of its first input, and the line of the module.

    The module is what an optimizer takes the parameters of. Empty texts and 0 for what is not found.
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trained = [
        node.func.value.id
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and node.func.attr in ("parameters", "named_parameters")
        and isinstance(node.func.value, ast.Name)
    ]
    if not trained:
        return "", "", 0
    name, module, line = trained[0], "", 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            if name in {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}:
                continue  # wrapped: model = torch.compile(model)
            module, line = ast.unparse(_Unspread().visit(node.value)), node.lineno
            break
    given = [
        node.args[0]
        for node in calls
        if isinstance(node.func, ast.Name) and node.func.id == name and node.args
    ]
    inputs = ast.unparse(given[0]) if given and isinstance(given[0], ast.Call) else ""
    return (module if len(module) <= 100 else ""), (inputs if len(inputs) <= 80 else ""), line


def _needed(tree: ast.Module, stem: str, text: str) -> Iterator[str]:
    """Yield the lines that give a file the names in `text`, as the script has them; `stem`: the script's."""
    names = set(_NAME.findall(text)) - {"torch"}
    guarded = any("__name__" in ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If))
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if names & {(alias.asname or alias.name).partition(".")[0] for alias in node.names}:
                yield ast.unparse(node)
            continue
        given = {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set[str]()
        if isinstance(node, ast.Assign):
            given = {each.id for each in node.targets if isinstance(each, ast.Name)}
        for name in sorted(given & names):
            yield (
                f"from {stem} import {name}"
                if guarded
                else f"# and {name}, as {stem}.py:{node.lineno} has it"
            )


class _Unspread(ast.NodeTransformer):
    """Take from the expression of a module what needs devices: wrappers that spread it, and moves to one.

    A number format stays, for it decides the bytes: `.to(device, torch.bfloat16)` is `.to(torch.bfloat16)`.
    """

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in WRAPPERS and node.args:
            return node.args[0]
        if not isinstance(called, ast.Attribute) or name not in MOVES:
            return node
        given = [*node.args, *(each.value for each in node.keywords)]
        formats = [each for each in given if _FORMAT.fullmatch(ast.unparse(each))]
        return ast.Call(called, formats[:1], []) if formats else called.value
