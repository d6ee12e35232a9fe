"""Read what an instruction's text says about it: phase, module and scopes; replica groups and mesh axes.

The training phase and the model module come from the path in its `op_name`.

Phase: JAX names what it traces. `jit(step)/jvp()/...` is forward, `transpose(jvp())` backward, and
`rematted_computation` recomputation. The caller sets the scope `optimizer`. XLA leaves some instructions
unnamed (its own copies, rewritten dots); they take the phase of their neighbours. XLA's rematerialisation
pass names its copies `NAME.remat`, `.remat2`, ... The first instruction of a NAME is not recomputation even
with such a suffix, because the pass may have moved the only one.

Module: JAX puts the caller's scopes (`jax.named_scope`, Flax modules) into the path, between names of its
own: transformations (`jvp(layers)`), loops, calls and, last, the primitive. The module of
"jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp_block/up/dot_general" is "layers/mlp_block/up".
A program whose author sets no scopes has the function and line of its source instead (`place_of_frames`).

Category: `held_as_C` says that what is computed under it counts as memory category C where no phase tells.

Share: some of Meshwright's scopes declare facts that the program alone does not show. `needed_A_of_B`: A / B
of the arithmetic is the model's. `busy_A_of_B`: a pipeline stage has a microbatch in A of its B runs; the
other runs are its bubble. `expected_N_trips`: a loop whose rounds only the data decides counts as N rounds.

Replica groups come in every form that XLA prints: lists `{{0,1},{2,3}}`; iota `[8,64]<=[64,8]T(1,0)` (the
numbers 0, 1, ... in the right shape, transposed, read in the left shape); a mesh `mesh['a'=4,'b'=2] {'a'}`,
possibly with reordered devices (`device_ids=([4,2]T(1,0))`) or with part of an axis (`{'a':(1)2}`);
source-target pairs for collective-permute.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._text import Computation, Instruction, Program

PHASES = ("forward", "backward", "recompute", "optimizer", "other")
_OPTIMIZER = re.compile(r"(^|[/(])optimizer([/)]|$)")
_REPEAT = re.compile(r"\.remat\d*(\.\d+)?(?=\.|$)")
# A value is used by its own phase and by later ones, and computed from values of its own and earlier ones.
_ORDER = ("forward", "recompute", "backward", "optimizer")


def phase_of(path: str, otherwise: str = "other") -> str:
    """Return the phase of an operation from the path of scopes and transformations that it was traced under.

    `otherwise`: the phase of a path that shows none.

    >>> phase_of("jit(step)/transpose(jvp(layers))/mlp/dot_general")
    'backward'
    """
    if "rematted_computation" in path:
        return "recompute"
    if "transpose(" in path:
        return "backward"
    if "jvp(" in path:
        return "forward"
    return "optimizer" if _OPTIMIZER.search(path) else otherwise


class ProgramPhases:
    """Find the phases of the instructions of one program."""

    def __init__(self, program: Program) -> None:
        names = {instruction.op_name for _, instruction in program.instructions()}
        differentiated = any("jvp(" in name or "transpose(" in name for name in names)
        self._otherwise = "other" if differentiated else "forward"
        self._repeated = {name for c in program.computations.values() for name in _repeated_in(c)}

    def is_repeated(self, instruction: Instruction) -> bool:
        """Return whether XLA's rematerialisation pass computes a value again here to save memory."""
        return instruction.name in self._repeated

    def of(self, computation: Computation, instruction: Instruction) -> str:
        """Return the phase from the instruction's own name, else from its neighbours in its computation.

        A value that XLA left unnamed has the earliest phase that uses it. If only the optimizer uses it, it
        has the latest phase that it is computed from.
        """
        if self.is_repeated(instruction):
            return "recompute"
        if instruction.has_path:
            return phase_of(instruction.op_name, self._otherwise)
        users = self._reached(instruction, lambda i: computation.users[i.name])
        for phase in _ORDER[:-1]:
            if phase in users:
                return phase
        makers = self._reached(instruction, lambda i: [computation.by_name[o.name] for o in i.operands])
        for phase in reversed(_ORDER[:-1]):
            if phase in makers:
                return phase
        return "optimizer" if "optimizer" in users else self._otherwise

    def named_near(self, computation: Computation, instruction: Instruction) -> Instruction | None:
        """Return the nearest named instruction that uses a value, else that it is computed from."""
        users = self._nearest(instruction, lambda i: computation.users[i.name])
        makers = self._nearest(instruction, lambda i: [computation.by_name[o.name] for o in i.operands])
        return next(itertools.chain(users, makers), None)

    def modules_near(self, computation: Computation, instruction: Instruction) -> list[str]:
        """Return the modules of the nearest named instructions of the same phase, the likeliest first.

        What follows a product in the forward pass is of its own module (a bias, a norm), and so is what it is
        computed from in the backward pass (the gradient of its result).
        """
        phase = self.of(computation, instruction)
        users = self._nearest(instruction, lambda i: computation.users[i.name])
        makers = self._nearest(instruction, lambda i: [computation.by_name[o.name] for o in i.operands])
        near = itertools.chain(*((users, makers) if phase == "forward" else (makers, users)))
        same = (module_of(i.op_name) for i in near if phase_of(i.op_name, self._otherwise) == phase)
        return list(dict.fromkeys(filter(None, same)))

    def _reached(self, start: Instruction, next_to: Callable[[Instruction], list[Instruction]]) -> set[str]:
        """Return the phases of the nearest named instructions, passing through unnamed ones."""
        return {phase_of(near.op_name, self._otherwise) for near in self._nearest(start, next_to)}

    def _nearest(
        self, start: Instruction, next_to: Callable[[Instruction], list[Instruction]]
    ) -> Iterator[Instruction]:
        """Yield the nearest named instructions, the fewest unnamed ones between first."""
        seen = {start.name}
        queue = deque(next_to(start))
        while queue:
            instruction = queue.popleft()
            if instruction.name in seen:
                continue
            seen.add(instruction.name)
            if instruction.has_path:
                yield instruction
            else:
                queue.extend(next_to(instruction))


def _repeated_in(computation: Computation) -> Iterator[str]:
    if not any(".remat" in instruction.name for instruction in computation.instructions):
        return
    seen: set[str] = set()
    for instruction in computation.instructions:
        original = _REPEAT.sub("", instruction.name)
        if original != instruction.name and original in seen:
            yield instruction.name
        seen.add(original)


# Names that JAX adds itself, and the scope of Meshwright's accumulation loop: never part of a model.
_OWN = frozenset((
    "while", "body", "cond", "scan", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation",
    "remat", "shard_map", "pjit", "custom_partitioning", "custom_jvp_call", "custom_vjp_call", "core_call",
    "custom_vjp_call_jaxpr", "xla_call", "fwd", "bwd", "microbatches", "static_sparsity_splash",
    "experts_by_matrix", "experts_by_transpose", "experts_of_matrices",
    "splash_mha_fwd_residuals", "splash_mha_dkv_no_residuals", "splash_mha_dq_no_residuals",
))  # fmt: skip
_HELD = re.compile(r"held_as_(\w+)")
_SHARE = re.compile(r"(needed|busy)_(\d+)_of_(\d+)(?!\w)")
_EXPECTED = re.compile(r"expected_(\d+)_trips(?!\w)")
_BRANCH = re.compile(r"branch_\d+_fun$")
_CALL = re.compile(r"(?:p?jit)\(.*\)$")
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap|pmap|remat|checkpoint)\((.*)\)$")
_EINSUM = re.compile(r"[A-Za-z. ]+(,[A-Za-z. ]+)*->[A-Za-z. ]*$")


def shares_of(scopes: str) -> dict[str, Fraction]:
    """Return the shares that the scopes of a path declare, by `needed` and `busy`.

    A scope may appear twice in the path, once from each side of a transformation. The outer one counts, which
    is that of the work as it runs; but work of which nothing is needed stays so inside other work.

    >>> shares_of("jit(step)/needed_5_of_8/dot_general")
    {'needed': Fraction(5, 8)}
    >>> shares_of("jit(step)/needed_5_of_8/needed_0_of_1/dot_general")
    {'needed': Fraction(0, 1)}
    """
    found = [(kind, Fraction(int(a), int(b))) for kind, a, b in reversed(_SHARE.findall(scopes))]
    return dict(found) | {kind: share for kind, share in found if not share}


def expected_trips(scopes: str) -> int | None:
    """Return how often a loop runs by the scope around it; None if no scope says so.

    >>> expected_trips("jit(step)/transpose(jvp(expected_0_trips))/while")
    0
    """
    found = _EXPECTED.findall(scopes)
    return int(found[-1]) if found else None


def twice_seen(length: int, window: int) -> int:
    """Return twice the pairs of causal attention in a window: 2 S W - W^2, as S^2 without one.

    >>> twice_seen(8192, 8192) == 8192**2
    True
    """
    window = min(window, length)
    return (2 * length - window) * window


@functools.lru_cache(maxsize=100_000)
def module_of(op_name: str) -> str:
    """Return the caller's scopes joined by "/", or "" where there are none or XLA named the instruction.

    Where XLA merged several operations ("up/(a/add:b/mul)"), return the scopes before the merged part.

    >>> module_of("jit(step)/transpose(jvp(layers))/while/body/closed_call/mlp_block/up/dot_general")
    'layers/mlp_block/up'
    """
    if "/" not in op_name:
        return ""
    path = op_name.split("(", 1)[0] if op_name.startswith("(") else op_name
    scopes = [scope for part in _parts(path)[:-1] if (scope := _scope(part))]
    # A scope appears twice where a transformation begins inside it: "jvp(loss)/transpose(loss)".
    return "/".join(scope for scope, _ in itertools.groupby(scopes))


MOST_FRAMES = 10  # of those that JAX writes into a program
Frame = tuple[str, str, int]  # file, function, line
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/meshwright/worker/", "<frozen ")


def place_of_frames(frames: Sequence[Frame]) -> str:
    """Return the place in the source that stands in for a module: "Block.__call__/model.py:31".

    The innermost frame that is in no installed library is taken, else the innermost.

    Args:
        frames: of one operation, innermost first; those beyond `MOST_FRAMES` are not looked at.

    >>> place_of_frames([("/x/site-packages/flax/linear.py", "dot", 7), ("/me/model.py", "f.<locals>.g", 3)])
    'g/model.py:3'
    """
    near = list(frames[:MOST_FRAMES])
    own = [frame for frame in near if not any(library in frame[0] for library in _LIBRARIES)]
    for file, function, line in own or near:
        return f"{function.rpartition('.<locals>.')[2]}/{file.rpartition('/')[2]}:{line}"
    return ""


def with_place(op_name: str, place: str) -> str:
    """Return an operation's path with a place in the source where it has no scope of the caller's.

    >>> with_place("jit(step)/jvp()/dot_general", "loss/model.py:3")
    'jit(step)/jvp()/loss/model.py:3/dot_general'
    """
    if not place or "/" not in op_name or op_name.startswith("(") or module_of(op_name):
        return op_name
    *scopes, operation = _parts(op_name)
    return "/".join((*scopes, place, operation))


def held_as(op_name: str) -> str:
    """Return the memory category that a scope of our step names for what it computes; "" if none does.

    >>> held_as("jit(step)/while/body/held_as_saved_activations/dynamic_slice")
    'saved_activations'
    """
    found = _HELD.findall(op_name)
    return found[-1] if found else ""


def _parts(path: str) -> list[str]:
    """Split a path at the slashes outside parentheses."""
    parts, depth, start = list[str](), 0, 0
    for place, sign in enumerate(path):
        depth += (sign == "(") - (sign == ")")
        if sign == "/" and not depth:
            parts.append(path[start:place])
            start = place + 1
    return [*parts, path[start:]]


def _scope(part: str) -> str:
    """Return the caller's scope in one part of a path, or "" where the part is not the caller's."""
    while match := _TRANSFORM.match(part):
        part = match[1]
    patterns = (_SHARE, _HELD, _BRANCH, _CALL, _EINSUM)
    own = part in _OWN or any(pattern.match(part) for pattern in patterns)
    return "" if own or part.startswith("(") else part


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


@functools.lru_cache(maxsize=10_000)
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


@functools.lru_cache(maxsize=100_000)
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
