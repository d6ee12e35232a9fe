import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config import AXES, Layout, layout_reading, load_config, near_divisors
from meshwright.errors import InputError

sizes = st.integers(1, 64)
layouts = st.lists(st.tuples(st.sampled_from(AXES), sizes), min_size=1, unique_by=lambda axis: axis[0]).map(
    lambda axes: Layout(axes=tuple(axes))
)


@given(layouts)
def test_a_layout_reads_back_what_it_prints(layout: Layout):
    assert Layout.parse(str(layout)) == layout


@given(layouts, st.data())
def test_the_open_axis_takes_what_is_left(layout: Layout, data: st.DataObject):
    opened = data.draw(st.sampled_from(layout.names))
    text = ",".join(f"{n}={-1 if n == opened else s}" for n, s in layout.axes)
    assert Layout.parse(text).resolve(math.prod(layout.sizes)) == layout


@given(layouts, sizes)
def test_resolving_uses_each_device_once_or_refuses(layout: Layout, num_devices: int):
    try:
        assert layout.resolve(num_devices).num_devices == num_devices
    except InputError:
        assert math.prod(layout.sizes) != num_devices


def test_the_order_written_is_kept():
    layout = Layout.parse(" tensor=8, fsdp=64 ")
    assert layout.names == ("tensor", "fsdp")
    assert layout.sizes == (8, 64)
    assert layout.size("fsdp") == 64
    assert layout.size("data") == 1


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("dp=8", "data=8"),
        ("pp=2,dp=-1,tp=4", "stage=2,data=-1,tensor=4"),
        ("dp_replicate=2,dp_shard=4", "data=2,fsdp=4"),
        ("EP=2, cp=4", "expert=2,context=4"),
    ],
)
def test_common_aliases_of_axes_are_read_and_said(text: str, read: str):
    assert str(Layout.parse(text)) == read
    assert layout_reading(text) == f"layout {text!r} read as {read}"
    assert load_config("bytes-nano", [f"layout={text}"]).layout == read
    assert Layout.parse(text, free_names=True).names[0] == text.partition("=")[0]


def test_nothing_is_said_of_a_layout_without_aliases():
    assert layout_reading(" fsdp=4, tensor=2") == ""


def test_a_foreign_program_names_its_own_axes():
    assert Layout.parse("x=2,y=4", free_names=True).names == ("x", "y")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("tenosr=8", "layout 'tenosr=8': unknown axis 'tenosr'", "did you mean 'tensor'?"),
        ("dp=2,data=4", "axis 'data' is written twice", "keep one data=..."),
        ("sp=2", "axis 'sp' has several meanings", "context=..."),
        ("mp=2", "axis 'mp' has several meanings", "tensor=... for a split of each matrix, or stage=..."),
        ("data=2,data=4", "axis 'data' is written twice", "keep one data=..."),
        ("data=0", "data=0 is not a number of devices", "data=-1"),
        ("data=-2", "data=-2 is not a number of devices", "data=-1"),
        ("data", "cannot read 'data'", "fsdp=64,tensor=8"),
        ("", "cannot read ''", "fsdp=64,tensor=8"),
        ("data=2,", "cannot read ''", "fsdp=64,tensor=8"),
        ("data=2 fsdp=4", "cannot read 'data=2 fsdp=4'", "fsdp=64,tensor=8"),
        ("data=-1,fsdp=-1", "data and fsdp are -1, and only one", "give fsdp a size"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, message: str, hint: str):
    with pytest.raises(InputError) as caught:
        Layout.parse(text)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "num_devices", "message", "hint"),
    [
        ("fsdp=64,tensor=16", 512, "fsdp * tensor = 1024 is not the fleet's 512 devices", "use fsdp=32"),
        ("fsdp=-1,tensor=7", 512, "tensor = 7 does not divide the fleet's 512 devices", "use tensor=4 or 8"),
        ("data=-1,fsdp=16", 8, "fsdp = 16 does not divide the fleet's 8 devices", "use fsdp=8"),
        ("data=5,fsdp=5", 512, "data * fsdp = 25 is not the fleet's 512", "use a fleet of 25 devices"),
        ("data=-1,fsdp=5,tensor=3", 31, "fsdp * tensor = 15 does not divide", "fleet of 30 or 45 devices"),
    ],
)
def test_a_layout_that_does_not_multiply_to_the_fleet_is_refused(
    text: str, num_devices: int, message: str, hint: str
):
    with pytest.raises(InputError) as caught:
        Layout.parse(text).resolve(num_devices)
    assert message in caught.value.message
    assert hint in caught.value.hint


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_near_divisors_are_the_nearest(number: int, wanted: int):
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    expected = [max(d for d in divisors if d <= wanted), *[d for d in divisors if d > wanted][:1]]
    assert near_divisors(number, wanted) == expected
