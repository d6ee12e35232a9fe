"""Shard a module by FSDP2 as a person would who writes no plan: each repeated block, and the root.

FSDP2 gathers the parameters of a unit in one buffer, so all that are trained must have one number format. A
module whose parameters have another one, such as a router in fp32, becomes a unit of its own.
This module imports torch, so it is imported only while accounting.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import InputError

OWN_AXES = ("data", "fsdp")  # which need no plan of the user's
CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
MIXED_FORMATS = "uniform original parameter dtype"  # in FSDP2's own words
ONE_FORMAT = (
    "give the module one format, module.float() or module.to(torch.bfloat16), with products in bf16 by a "
    "MixedPrecisionPolicy; or let parallelize=f call fully_shard on the modules of the other format first"
)
MOST_NAMES = 5  # of parameters, in an error


def default_plan(module: torch.nn.Module, mesh: DeviceMesh, note: Callable[[str], None]) -> torch.nn.Module:
    """Shard each repeated block and the root by FSDP2 over `fsdp`, and replicate them over `data`.

    All of them are resharded after their forward pass. With `data` alone DDP replicates the module. `note` is
    called with a sentence that names units in another number format.

    Raises:
        InputError: FSDP2 cannot shard a parameter.
    """
    names = tuple(name for name in OWN_AXES if name in (mesh.mesh_dim_names or ()) and mesh[name].size() > 1)
    if not names:
        return module
    if names == ("data",):
        return torch.nn.parallel.DistributedDataParallel(module, process_group=mesh["data"].get_group())
    from torch.distributed.fsdp import fully_shard

    if scalars := [path for path, parameter in module.named_parameters() if not parameter.dim()]:
        raise InputError(
            f"FSDP2 divides parameters by their rows, and {', '.join(scalars)} is a single number",
            hint="make it a tensor of shape [1], as FSDP2 itself asks, or give parallelize=f that calls "
            "fully_shard with ignored_params",
        )
    blocks = repeated_blocks(module)
    if others := _units_of_other_formats(module, blocks):
        listed = ", ".join(_described(name for path in others for name in _names_in(others[path], path)))
        formats = {_format(parameter) for each in others.values() for parameter in each.parameters()}
        note(
            f"FSDP2 gathers parameters of one format together: {listed} ({' and '.join(sorted(formats))}) "
            "are units of their own."
        )
    for unit in (*others.values(), *blocks.values(), module):
        fully_shard(unit, mesh=mesh[names], reshard_after_forward=True)
    return module


def repeated_blocks(module: torch.nn.Module, path: str = "") -> dict[str, torch.nn.Module]:
    """Return by path the entries of each outermost list of modules of which several are of one class.

    Entries without parameters do not count. Where an entry is itself a list or dict of modules, which nobody
    calls, its entries are the blocks. `path`: that of the module itself, "" for a root.
    """
    kinds = Counter(type(entry) for entry in module.children() if any(True for _ in entry.parameters()))
    is_list = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential | torch.nn.ModuleDict)
    repeated = {kind for kind, times in kinds.items() if times > 1 and is_list}
    blocks: dict[str, torch.nn.Module] = {}
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        blocks |= _entries(child, inner) if type(child) in repeated else repeated_blocks(child, inner)
    return blocks


def _entries(block: torch.nn.Module, path: str) -> dict[str, torch.nn.Module]:
    """Return a block by its path, or the entries of a container, which FSDP2 cannot shard."""
    if not isinstance(block, torch.nn.ModuleList | torch.nn.ModuleDict):
        return {path: block}
    entries: dict[str, torch.nn.Module] = {}
    for name, child in block.named_children():
        entries |= _entries(child, f"{path}.{name}")
    return entries


def _units_of_other_formats(
    root: torch.nn.Module, blocks: dict[str, torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """Return by path the modules inside a block, or the root, that have another format than most of it.

    Raises:
        InputError: a parameter of another format lies in no module of its own. The message names it.
    """
    inside = {id(block) for block in blocks.values()}
    found: dict[str, torch.nn.Module] = {}
    left: list[str] = []
    for path, unit in (*blocks.items(), ("", root)):
        sizes = Counter[torch.dtype]()
        for _, parameter in _trained(unit, path, inside - {id(unit)}):
            sizes[parameter.dtype] += parameter.numel()
        if len(sizes) > 1:
            most = sizes.most_common(1)[0][0]
            left += _separate(unit, path, most, inside - {id(unit)}, found)
    if left:
        raise mixed_formats(left)
    return found


def _separate(
    module: torch.nn.Module,
    path: str,
    most: torch.dtype,
    apart: Collection[int],
    found: dict[str, torch.nn.Module],
) -> list[str]:
    """Add the outermost modules below `module` of one format that is not `most`.

    Return the parameters that lie in no such module. `apart`: identities of modules that are units already.
    """
    own = (
        (f"{path}.{name}" if path else name, each) for name, each in module.named_parameters(recurse=False)
    )
    left = [name for name, each in own if each.requires_grad and each.dtype != most]
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        formats = {parameter.dtype for _, parameter in _trained(child, inner, apart)}
        if id(child) in apart or not formats - {most}:
            continue
        if len(formats) == 1 and not isinstance(child, CONTAINERS):
            found[inner] = child
        else:
            left += _separate(child, inner, most, apart, found)
    return left


def _trained(
    module: torch.nn.Module, path: str, apart: Collection[int]
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters below a module that are trained, without those of the modules in `apart`."""
    if id(module) in apart:
        return
    for name, parameter in module.named_parameters(path, recurse=False):
        if parameter.requires_grad:
            yield name, parameter
    for name, child in module.named_children():
        yield from _trained(child, f"{path}.{name}" if path else name, apart)


def mixed_formats(names: Iterable[str]) -> InputError:
    """Return the error for parameters whose format is not that of the unit of FSDP2 that they are in."""
    return InputError(
        "FSDP2 gathers parameters of one format together, and these have another than the rest of their "
        f"unit, here as on real ranks: {', '.join(_described(names))}",
        hint=ONE_FORMAT,
    )


def unusual_formats(module: torch.nn.Module) -> list[str]:
    """Return the trained parameters of a module whose format few others have, each with its format."""
    sizes = Counter[torch.dtype]()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel() * parameter.requires_grad
    most = sizes.most_common(1)[0][0] if sizes else None
    named = ((name, each) for name, each in module.named_parameters() if each.requires_grad)
    return [
        f"{name} ({str(each.dtype).removeprefix('torch.')})" for name, each in named if each.dtype != most
    ]


def _names_in(module: torch.nn.Module, path: str) -> list[str]:
    return [name for name, _ in module.named_parameters(path)]


def _format(parameter: torch.Tensor) -> str:
    return str(parameter.dtype).removeprefix("torch.")


def _described(names: Iterable[str]) -> list[str]:
    """Return names of parameters, those that differ only by the numbers of lists as one with a star."""
    alike = dict.fromkeys(re.sub(r"(?<![^.])\d+(?=\.)", "*", name) for name in names)
    shown = list(alike)[:MOST_NAMES]
    return [*shown, f"{len(alike) - MOST_NAMES} more"] if len(alike) > MOST_NAMES else shown
