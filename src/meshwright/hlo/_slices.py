"""Read the program of several TPU slices as one program of all their devices.

XLA compiles one program that each slice runs (libtpu 0.0.42 and 0.0.50). Its collectives join devices of one
slice, numbered from 0 in each, and what crosses slices leaves by the hosts, as a `send` to "megascale", the
runtime that joins slices, and a `recv` from it. XLA has divided a collective that crosses slices by then: a
sum is reduced and scattered inside each slice, summed between slices and gathered inside; a gather goes
between slices first, while the parts are small.

`joined_slices` returns the program as if the exchange of the hosts were one asynchronous collective over all
devices: the `send` starts it and the `recv-done` awaits it. All groups have the numbers of the mesh.

Exchanges of unknown kinds, and those whose start and end are in different computations, stay as they are:
the ledger lists them as unpriced.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ._annotations import parse_groups
from ._text import Computation, Instruction, Operand, Program, Shape

SLICE = 100_000
"""The numbers of a slice's devices begin at a multiple of this, those of the first slice at one."""
_KINDS = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_KIND = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target=(?:"([^"]*)"|(\{\{.*?\}\}))')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}$")
_GROUPS = ("replica_groups", "source_target_pairs")
_FREE = "after-all"


def joined_slices(program: Program, device_ids: Sequence[int]) -> Program:
    """Return the program of one slice as that of all slices.

    Args:
        device_ids: libtpu's number of each device of the mesh, in the mesh's order.

    Raises:
        ValueError: groups or devices between slices have no known form.
    """
    joined = _Joined(device_ids)
    made = {name: joined.computation(each) for name, each in program.computations.items()}
    return replace(program, computations=made, entry=made[program.entry.name])


class _Joined:
    """Number the devices of all slices as the mesh does."""

    def __init__(self, device_ids: Sequence[int]) -> None:
        self._places = {number: place for place, number in enumerate(device_ids)}
        by_slice: dict[int, list[int]] = {}
        for place, number in enumerate(device_ids):
            by_slice.setdefault(number // SLICE, []).append(place)
        self._slices = list(by_slice.values())
        self._size = len(self._slices[0])
        self._known: dict[str, str] = {}

    def computation(self, old: Computation) -> Computation:
        """Return a computation with the numbers of the mesh, and with collectives between slices."""
        changes: dict[str, Instruction] = {}
        for send in old.instructions:
            if send.opcode == "send" and (target := _target_of(send)):
                changes |= self._exchange(old, send, *target)
        for each in old.instructions:
            groups = {key: each.attributes[key] for key in _GROUPS if key in each.attributes}
            if each.collective and groups and each.name not in changes:
                own = {key: self._of_all_slices(text) for key, text in groups.items()}
                changes[each.name] = replace(each, attributes={**each.attributes, **own})
        if not changes:
            return old
        made = [changes.get(each.name, each) for each in old.instructions]
        return Computation(name=old.name, instructions=tuple(made), root=changes.get(old.root.name, old.root))

    def _exchange(
        self, home: Computation, send: Instruction, kind: str, target: str
    ) -> dict[str, Instruction]:
        """Return the instructions of one exchange between slices, changed to an asynchronous collective."""
        key = _rendezvous(send)
        received = [i for i in home.instructions if i.opcode == "recv" and _rendezvous(i) == key]
        ends = [i for recv in received for i in home.users[recv.name] if i.opcode == "recv-done"]
        if len(ends) != 1 or not isinstance(ends[0].shape, tuple):
            return {}
        (recv,), (end,) = received, ends
        array, payload = ends[0].shape[0], send.operands[0]
        attribute = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
        groups = {"channel_id": send.attributes.get("channel_id", ""), attribute: self._between(target)}
        sent = home.operand_shape(payload)
        start: Shape = (sent, array) if kind == "all-gather" else sent
        changed = {
            send.name: _as(send, f"{kind}-start", start, (payload,), groups),
            recv.name: replace(recv, opcode=_FREE),
            end.name: _as(end, f"{kind}-done", array, (Operand(name=send.name), Operand(name=recv.name)), {}),
        }
        for user in home.users[send.name]:
            changed[user.name] = replace(user, opcode=_FREE)
        for user in home.users[end.name]:
            is_result = user.opcode == "get-tuple-element" and user.attributes.get("index") == "0"
            changed[user.name] = replace(user, opcode="bitcast" if is_result else _FREE)
        return changed

    def _of_all_slices(self, text: str) -> str:
        """Return the groups of one slice's devices as those of all slices."""
        if text not in self._known:
            groups = parse_groups(text, self._size)
            all_groups = ([places[i] for i in group] for places in self._slices for group in groups)
            self._known[text] = _text(all_groups)
        return self._known[text]

    def _between(self, target: str) -> str:
        """Return the groups of an exchange between slices, from its devices as megascale numbers them."""
        if product := _PRODUCT.match(target):
            slices, devices = (_ranges(part) for part in product.groups())
            numbers: Iterable[Sequence[int]] = (
                [each * SLICE + device for each in slices] for device in devices
            )
        elif re.fullmatch(r"\{(\{[\d,]+(->\d+)?\},?)+\}", target):
            numbers = ([int(n) for n in re.findall(r"\d+", part)] for part in target[2:-2].split("},{"))
        else:
            raise ValueError(f"an exchange between slices has devices of no known form: {target[:200]!r}")
        try:
            return _text([self._places[number] for number in group] for group in numbers)
        except KeyError as unknown:
            raise ValueError(f"an exchange between slices names {unknown}, no device of the mesh") from None


def _as(
    old: Instruction,
    opcode: str,
    shape: Shape,
    operands: tuple[Operand, ...],
    attributes: dict[str, str],
) -> Instruction:
    kept = {key: text for key, text in old.attributes.items() if key == "metadata"}
    return replace(old, opcode=opcode, shape=shape, operands=operands, attributes={**kept, **attributes})


def _target_of(send: Instruction) -> tuple[str, str] | None:
    """Return the kind of an exchange between slices and its devices; None for any other transfer."""
    text = send.attributes.get("frontend_attributes", "")
    kind, target = _KIND.search(text), _TARGET.search(text)
    if kind is None or target is None or kind[1] not in _KINDS:
        return None
    return _KINDS[kind[1]], target[1] or target[2]


def _rendezvous(instruction: Instruction) -> str:
    found = _RENDEZVOUS.search(instruction.attributes.get("frontend_attributes", ""))
    return found[1] if found else ""


def _ranges(text: str) -> list[int]:
    """Return the numbers of a text such as "1,2,8:11", both ends of a range included."""
    ends = (part.split(":") for part in text.split(","))
    return list(itertools.chain(*(range(int(pair[0]), int(pair[-1]) + 1) for pair in ends)))


def _text(groups: Iterable[Sequence[int]]) -> str:
    return f"{{{','.join('{' + ','.join(map(str, group)) + '}' for group in groups)}}}"
