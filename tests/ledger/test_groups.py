import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.hlo import axes_of, axes_of_pairs, leaves_the_domain, parse_groups

MESH = (("data", 2), ("fsdp", 4), ("tensor", 3))


def groups_by_numpy(sizes, kept):
    """Devices that differ only along the axes `kept`, by an array of device numbers."""
    devices = np.arange(int(np.prod(sizes))).reshape(sizes)
    order = [a for a in range(len(sizes)) if a not in kept] + list(kept)
    size = int(np.prod([sizes[a] for a in kept]))
    return sorted(map(tuple, devices.transpose(order).reshape(-1, size).tolist()))


meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(meshes, st.data())
def test_every_form_names_the_groups_that_numpy_finds(sizes, data):
    kept = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    total = int(np.prod(sizes))
    expected = groups_by_numpy(sizes, kept)
    size = len(expected[0])
    order = [a for a in range(len(sizes)) if a not in kept] + kept
    mesh = ",".join(f"'axis_{a}'={n}" for a, n in enumerate(sizes))
    for text in (
        "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in expected) + "}",
        f"[{total // size},{size}]<={str(sizes).replace(' ', '')}T({','.join(map(str, order))})",
        f"mesh[{mesh}] {{{','.join(f'{chr(39)}axis_{a}{chr(39)}' for a in kept)}}}",
    ):
        assert sorted(parse_groups(text, total)) == expected, text


@given(meshes, st.data())
def test_the_axes_of_a_group_are_those_it_was_made_over(sizes, data):
    kept = sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1)))
    mesh = tuple((f"a{n}", size) for n, size in enumerate(sizes))
    spanned = axes_of(tuple(groups_by_numpy(sizes, kept)), mesh)
    assert spanned == tuple(f"a{n}" for n in kept if sizes[n] > 1)


def test_reordered_devices_are_looked_up():
    groups = parse_groups("mesh['x'=2,'y'=1,'z'=4], device_ids=([4,2]T(1,0)) {'z'}", 8)
    assert sorted(groups) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    groups = parse_groups("mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}", 4)
    assert sorted(groups) == [(2, 0), (3, 1)]


def test_a_part_of_an_axis_is_cut_out_of_it():
    assert sorted(parse_groups("mesh['x'=8] {'x':(2)2}", 8)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    groups = parse_groups("mesh['x'=8] {'x':(1)4}", 8)
    assert axes_of(groups, (("x", 8),)) == ("x",)


def test_empty_braces_are_everybody():
    assert parse_groups("{}", 3) == ((0, 1, 2),)


def test_a_plain_iota_runs_in_order():
    assert parse_groups("[2,3]<=[6]", 6) == ((0, 1, 2), (3, 4, 5))


def test_a_group_that_is_no_block_of_the_mesh_has_no_axes():
    assert axes_of(((0, 4),), (("a", 2), ("b", 2), ("c", 2))) == ("a",)
    assert axes_of(((0, 3),), (("a", 2), ("b", 2))) is None


def test_pairs_span_the_axes_along_which_they_differ():
    ring = parse_groups("{{0,3},{3,6},{6,9},{9,0}}", 24)
    assert axes_of_pairs(ring, MESH) == ("fsdp",)
    assert axes_of_pairs(((0, 13),), MESH) == ("data", "tensor")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("everyone", "replica groups 'everyone' have no known form"),
        ("[2,4]<=8", "replica groups '[2,4]<=8' have no known form"),
        ("{{0,1},{2,9}}", "replica groups '{{0,1},{2,9}}' name a device beyond the program's 4"),
        ("mesh[x=4] {'x'}", "replica groups: 'x=4' is not understood"),
        ("mesh['x'=4] {x}", "replica groups: 'x' is not understood"),
        ("mesh['x'=4], device_ids=([a]) {'x'}", "replica groups: '[a]' is not understood"),
    ],
)
def test_unknown_groups_raise(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_groups(text, 4)


@pytest.mark.parametrize(
    ("text", "leaves"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", False),
        ("{{0,4},{1,5},{2,6},{3,7}}", True),
        ("[2,4]<=[8]", False),
        ("[4,2]<=[2,4]T(1,0)", True),
        ("{}", True),
        ("{{3,4}}", True),  # a pair of a collective-permute
    ],
)
def test_a_group_whose_members_lie_in_two_hosts_of_four_leaves_the_host(text, leaves):
    assert leaves_the_domain(text, 8, 4) is leaves
