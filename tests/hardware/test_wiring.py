"""The rates of groups where GPUs are wired in pairs, by rings counted over the published wiring."""

from functools import cache
from itertools import permutations

import pytest

from meshwright.hardware import Fleet, find_chip
from meshwright.predict import machine_of

LINK = 25e9  # one NVLink 2 in one direction

# The number of NVLinks between two GPUs of a DGX-1 with V100, by `nvidia-smi topo -m`
# (gist.github.com/ashwin/e139748bdba15f5af63f0146d01ee4c3). NVIDIA/nccl issue 671 has the first four rows as
# NCCL's topology file, and NVIDIA/nccl-tests issue 68 the wiring of a host of four, a Dell C4140.
CUBE_MESH = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
ALL_PAIRS = tuple(tuple(2 * (one != other) for other in range(4)) for one in range(4))


def rings_of(links, members):
    """The largest number of directed rings through all members that share no direction of a link."""
    first, *others = members
    circles = [(first, *order) for order in permutations(others)]
    ways = [tuple(zip(c, (*c[1:], c[0]), strict=True)) for c in circles]
    ways = [way for way in ways if all(links[a][b] for a, b in way)]
    most = min(sum(links[a][b] for b in members) for a in members)

    @cache
    def best(start, used):
        """Return how many rings beside those `used`, by the ways from `start` on."""
        taken = dict(used)
        found = 0
        for place in range(start, len(ways)):
            if all(taken.get(arc, 0) < links[arc[0]][arc[1]] for arc in ways[place]):
                more = {arc: taken.get(arc, 0) + 1 for arc in ways[place]}
                found = max(found, 1 + best(place, tuple(sorted({**taken, **more}.items()))))
            if found + sum(n for (a, _), n in used if a == first) == most:
                break
        return found

    return best(0, ())


@pytest.mark.parametrize("chip", ["V100-16GB", "V100-32GB"])
@pytest.mark.parametrize(("links", "members"), [(CUBE_MESH, 2), (CUBE_MESH, 4), (CUBE_MESH, 8)])
def test_a_group_of_neighbours_in_a_dgx_1_has_the_rings_that_its_wiring_allows(chip, links, members):
    groups = [range(start, start + members) for start in range(0, 8, members)]
    fewest = min(rings_of(links, group) for group in groups)  # a step waits for the slowest group
    machine = machine_of(Fleet.parse(f"8x{chip}"), None)
    assert machine.inside_rate(members) == fewest * LINK


@pytest.mark.parametrize("members", [2, 4])
def test_a_group_in_a_host_of_four_has_the_rings_of_two_links_for_each_pair(members):
    machine = machine_of(Fleet.parse("2x4xV100-32GB"), None)
    assert machine.inside_rate(members) == rings_of(ALL_PAIRS, range(members)) * LINK


def test_every_device_of_the_wiring_has_six_links():
    assert {sum(row) for row in (*CUBE_MESH, *ALL_PAIRS)} == {6}
    assert find_chip("V100").inside.bytes_per_second == 6 * LINK


def test_a_size_between_two_stated_ones_has_the_rate_of_the_smaller():
    machine = machine_of(Fleet.parse("16xV100"), None)
    assert [machine.inside_rate(members) / LINK for members in range(2, 9)] == [1, 1, 4, 4, 4, 4, 6]


@pytest.mark.parametrize("fleet", ["8xH100", "8xT4", "8xA100-80GB", "72xGB200"])
def test_groups_behind_a_switch_have_the_rate_of_their_link(fleet):
    machine = machine_of(Fleet.parse(fleet), None)
    assert {machine.inside_rate(members) for members in range(1, 9)} == {machine.inside_bytes_per_second}
