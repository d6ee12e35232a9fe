import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.units import aligned, format_bytes, format_count, format_rate, format_seconds, parse_count


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.5 * 2**20, "1.50 MiB"),
        (84_942_979_072, "79.1 GiB"),
        (2**40 - 1, "1.00 TiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_memory_is_printed_in_powers_of_1024(num_bytes: float, text: str):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (8, "8"),
        (999, "999"),
        (1000, "1K"),
        (124_439_808, "124M"),
        (8_030_261_248, "8.03B"),
        (999_999_999, "1B"),
        (15e12, "15T"),
        (3.14e23, "3.14e23"),
        (0.25, "0.25"),
    ],
)
def test_counts_are_printed_as_people_say_them(count: float, text: str):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (989.4e12, "FLOP/s", "989 TFLOP/s"),
        (3.35e12, "B/s", "3.35 TB/s"),
        (12.5e9, "B", "12.5 GB"),
        (999.6e6, "B/s", "1.00 GB/s"),
        (0, "B", "0.00 B"),
        (35, "token/s", "35.0 token/s"),
    ],
)
def test_rates_have_a_decimal_prefix(value: float, unit: str, text: str):
    assert format_rate(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12e-6, "12.0 us"),
        (0.842, "842 ms"),
        (0.9999, "1.00 s"),
        (1.73, "1.73 s"),
        (744, "12.4 min"),
        (11_520, "3.20 h"),
        (77.1 * 86400, "77.1 days"),
    ],
)
def test_durations_have_the_unit_people_would_use(seconds: float, text: str):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("15T", 15 * 10**12),
        ("300e9", 300 * 10**9),
        ("4M", 4_000_000),
        ("1.5b", 1_500_000_000),
        (" 4_096 ", 4096),
        ("4,096", 4096),
        ("1.5e3K", 1_500_000),
        ("0", 0),
    ],
)
def test_counts_are_read_as_people_write_them(text: str, count: int):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "T", "many", "-4", "1e-3", "4 MB", "nan", "inf", "1e999", "0x10"])
def test_what_is_no_count_is_refused_with_examples(text: str):
    with pytest.raises(InputError, match="cannot read") as refused:
        parse_count(text)
    assert "15T" in refused.value.hint


def test_a_broken_count_is_refused_with_the_whole_number_below():
    with pytest.raises(InputError, match="which is not a whole number") as refused:
        parse_count("1.5")
    assert refused.value.hint == "use 1"


@given(st.integers(0, 10**18))
def test_a_whole_number_is_read_back_exactly(count: int):
    assert parse_count(str(count)) == count
    assert parse_count(f"{count:_}") == count


@given(st.integers(0, 10**17))
def test_a_printed_count_is_read_back_within_its_three_digits(count: int):
    assert parse_count(format_count(count)) == pytest.approx(count, rel=0.0051)


@given(st.floats(1, 1e17), st.floats(1, 1e17))
def test_printing_keeps_the_order_of_memory_sizes(one: float, other: float):
    powers = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4, "PiB": 5}

    def read(text: str) -> float:
        digits, unit = text.split()
        return float(digits) * 1024 ** powers[unit]

    small, large = sorted((one, other))
    assert read(format_bytes(small)) <= read(format_bytes(large))
    assert math.isclose(read(format_bytes(large)), large, rel_tol=0.0051, abs_tol=0.51)


def test_columns_stand_below_each_other_and_numbers_end_together():
    text = aligned(("what", "bytes"), [("weights", "4"), ("bias", "1,024")], right={"bytes"}, indent="  ")
    assert text == "  what     bytes\n  weights      4\n  bias     1,024"


def test_a_line_has_no_spaces_at_its_end():
    assert aligned(("a", "note"), [("b", "")]) == "a  note\nb"


def test_a_row_of_another_length_is_a_mistake_of_ours():
    with pytest.raises((ValueError, IndexError)):
        aligned(("a", "b"), [("1",)])


def test_the_ends_of_an_interval_have_one_unit():
    assert [format_seconds(hours * 3600, like=2.1 * 86400) for hours in (44.9, 57.6)] == [
        "1.87 days",
        "2.40 days",
    ]
    assert format_seconds(2e-3, like=650e-6) == "2,000 us"
    assert format_seconds(1e-3, like=1.0) == "0.001 s"
    assert format_seconds(0, like=1.0) == "0.00 s"
