"""Parse replica groups in every form that XLA prints, and find the mesh axes that they span.

Forms: lists `{{0,1},{2,3}}`; iota `[8,64]<=[64,8]T(1,0)` (the numbers 0, 1, ... in the right shape,
transposed, read in the left shape); a mesh `mesh['a'=4,'b'=2] {'a'}`, possibly with reordered devices
(`device_ids=([4,2]T(1,0))`) or with part of an axis (`{'a':(1)2}`); source-target pairs for
collective-permute.
"""

from __future__ import annotations

import functools
import itertools
import math
import re

Axes = tuple[tuple[str, int], ...]
Groups = tuple[tuple[int, ...], ...]
Coordinates = tuple[tuple[int, ...], ...]  # one tuple for each device, in the mesh's order
DIMENSIONS = ("x", "y", "z", "core")  # a TPU's coordinates as JAX orders them, then the core on the chip

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}$")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)$")
_USED_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?$")
_REORDERED = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")


@functools.lru_cache(maxsize=10_000)
def parse_groups(text: str, num_devices: int) -> Groups:
    """Return the groups of device numbers; `{}` means one group of all devices.

    Raises:
        ValueError: the text has none of the known forms, or names a device beyond `num_devices`.

    >>> parse_groups("[2,2]<=[2,2]T(1,0)", num_devices=4)
    ((0, 2), (1, 3))
    """
    if match := _IOTA.match(text):
        numbers = iota_of(_numbers(match[2]), _numbers(match[3] or ""))
        num_groups, size = _numbers(match[1])
        groups = tuple(tuple(numbers[g * size : (g + 1) * size]) for g in range(num_groups))
    elif match := _MESH.match(text):
        groups = _mesh_groups(match[1], match[2], match[3])
    elif re.fullmatch(r"\{\s*\}", text):
        groups = (tuple(range(num_devices)),)
    elif re.fullmatch(r"\{(\{[\d,\s]*\}[,\s]*)+\}", text):
        groups = tuple(_numbers(inner) for inner in re.findall(r"\{([\d,\s]*)\}", text))
    else:
        raise ValueError(f"replica groups {text!r} have no known form")
    if any(not 0 <= device < num_devices for group in groups for device in group):
        raise ValueError(f"replica groups {text!r} name a device beyond the program's {num_devices}")
    return groups


@functools.lru_cache(maxsize=10_000)
def leaves_the_domain(text: str, num_devices: int, devices_per_domain: int) -> bool:
    """Return whether any group, or any pair of a collective-permute, spans several fast domains."""
    groups = parse_groups(text, num_devices)
    return any(len({device // devices_per_domain for device in group}) > 1 for group in groups)


@functools.lru_cache(maxsize=10_000)
def axes_of(groups: Groups, mesh_axes: Axes) -> tuple[str, ...] | None:
    """Return the mesh axes along which members of a group differ; None if a group is not a block of the mesh.

    Device numbers run over `mesh_axes` in row-major order. A group may cover part of an axis.

    >>> axes_of(((0, 2), (1, 3)), (("data", 2), ("tensor", 2)))
    ('data',)
    """
    spanned: set[str] = set()
    for group in groups:
        positions = [_position(device, mesh_axes) for device in group]
        along = [sorted(set(values)) for values in zip(*positions, strict=True)]
        if math.prod(map(len, along)) != len(set(group)):
            return None
        spanned |= {name for (name, _), values in zip(mesh_axes, along, strict=True) if len(values) > 1}
    return tuple(name for name, _ in mesh_axes if name in spanned)


def axes_of_pairs(pairs: Groups, mesh_axes: Axes) -> tuple[str, ...]:
    """Return the mesh axes along which any (source, target) pair of a collective-permute differs."""
    spanned: set[str] = set()
    for source, target in pairs:
        there, here = _position(source, mesh_axes), _position(target, mesh_axes)
        spanned |= {name for (name, _), a, b in zip(mesh_axes, there, here, strict=True) if a != b}
    return tuple(name for name, _ in mesh_axes if name in spanned)


@functools.lru_cache(maxsize=10_000)
def dimensions_of(groups: Groups, coordinates: Coordinates) -> tuple[str, ...]:
    """Return the torus dimensions along which members of any group differ; empty without coordinates."""
    if not coordinates:
        return ()
    along: set[int] = set()
    for group in groups:
        places = [coordinates[device] for device in group]
        along |= {d for d, values in enumerate(zip(*places, strict=True)) if len(set(values)) > 1}
    return tuple(DIMENSIONS[d] for d in sorted(along))


def _position(device: int, mesh_axes: Axes) -> tuple[int, ...]:
    position: list[int] = []
    for _, size in reversed(mesh_axes):
        device, along = divmod(device, size)
        position.append(along)
    return tuple(reversed(position))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def iota_of(dims: tuple[int, ...], order: tuple[int, ...]) -> list[int]:
    """Return 0, 1, 2, ... in shape `dims`, transposed by `order` and then flattened.

    >>> iota_of((2, 3), (1, 0))
    [0, 3, 1, 4, 2, 5]
    """
    order = order or tuple(range(len(dims)))
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    ranges = [range(dims[d]) for d in order]
    return [sum(i * strides[d] for i, d in zip(at, order, strict=True)) for at in itertools.product(*ranges)]


def _mesh_groups(axes_text: str, devices_text: str | None, used_text: str) -> Groups:
    axes = [_matched(_MESH_AXIS, part.strip()) for part in axes_text.split(",")]
    sizes = {name: int(size) for name, size in axes}
    if devices_text is None:
        devices = list(range(math.prod(sizes.values())))
    elif "[" in devices_text:
        dims, order = _matched(_REORDERED, devices_text)
        devices = iota_of(_numbers(dims), _numbers(order))
    else:
        devices = list(_numbers(devices_text))
    # Split each axis into (before, used, after). Only the used part varies within a group.
    parts = {name: (size, 1, 1) for name, size in sizes.items()}
    for part in filter(None, (p.strip() for p in used_text.split(","))):
        name, before, used = _matched(_USED_AXIS, part)
        if not used:
            parts[name] = (1, sizes[name], 1)
        else:
            parts[name] = (int(before), int(used), sizes[name] // (int(before) * int(used)))
    shape = [size for three in parts.values() for size in three]
    within = [d for d in range(len(shape)) if d % 3 == 1]
    between = [d for d in range(len(shape)) if d % 3 != 1]
    size = math.prod(shape[d] for d in within)
    places = iota_of(tuple(shape), (*between, *within))
    return tuple(tuple(devices[p] for p in places[at : at + size]) for at in range(0, len(places), size))


def _matched(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    match = pattern.match(text)
    if not match:
        raise ValueError(f"replica groups: {text!r} is not understood")
    return match.groups("")
