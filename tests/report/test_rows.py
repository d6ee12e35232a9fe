from __future__ import annotations

import pytest

from meshwright.predict import Interval
from meshwright.reconciliation import Reconciliation, Row
from meshwright.report._wording import (
    comparison_rows,
    elementwise_words,
    ends_words,
    help_rows,
    kind_words,
    link_words,
    program_line,
)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("bytes", "2.00 KiB"),
        ("FLOP", "2.05 kFLOP"),
        ("seconds", "34.1 min"),
        ("share", "204800.0 %"),
        ("tokens per second", "2.05K tokens per second"),
    ],
)
def test_each_unit_is_printed_as_people_write_it(unit: str, expected: str):
    row = Row(quantity="q", unit=unit, predicted=2048, measured=1024, how="by hand")
    assert comparison_rows(Reconciliation(same_program=True, rows=(row,), not_compared={}))[0][1] == expected


def test_the_error_is_signed_and_absent_where_nothing_was_measured():
    rows = tuple(
        Row(quantity="q", unit="bytes", predicted=2048, measured=measured, how="by hand")
        for measured in (1024, 4096, 0)
    )
    assert [
        row[3] for row in comparison_rows(Reconciliation(same_program=True, rows=rows, not_compared={}))
    ] == [
        "+100.0 %",
        "-50.0 %",
        "",
    ]


def test_an_interval_stands_beside_its_expected_value():
    row = Row(quantity="q", unit="seconds", predicted=2, measured=2, how="by hand", low=1, high=3)
    assert (
        comparison_rows(Reconciliation(same_program=True, rows=(row,), not_compared={}))[0][1]
        == "2.00 s (1.00 s to 3.00 s)"
    )


def test_a_program_that_is_not_the_weighed_one_is_said_loudly():
    assert "NOT THE PROGRAM" in program_line(Reconciliation(same_program=False, rows=(), not_compared={}))
    assert "equal" in program_line(Reconciliation(same_program=True, rows=(), not_compared={}))


def test_elementwise_work_reads_as_people_count():
    assert elementwise_words({"arithmetic": 12 * 10**11, "comparison": 34 * 10**9}) == (
        "arithmetic 1.2T, comparison 34B"
    )
    assert elementwise_words({}) == ""


def test_a_links_dimensions_follow_its_name():
    assert link_words("inside", ("x", "y")) == "inside x+y"
    assert link_words("inside", ()) == "inside"


def test_kinds_of_time_are_shares_of_all_of_it():
    words = kind_words({"compute": 3.0, "communication": 0.5, "idle": 0.5})
    assert words == "compute 75.0 %, exposed communication 12.5 %, idle between kernels 12.5 % of the step"


@pytest.mark.parametrize(
    ("low", "high", "reasons", "expected"),
    [
        (1.0, 2.0, (), "between 1.00 s and 2.00 s"),
        (1.0, 2.0, ("no table", "old rates"), "between 1.00 s and 2.00 s: no table; old rates"),
        (1.0, None, ("not priced: a sort",), "at least 1.00 s, no upper end: not priced: a sort"),
        (None, None, ("fp32",), "no interval: fp32"),
    ],
)
def test_an_interval_says_its_ends_and_why_it_is_wide_or_lacks_one(low, high, reasons, expected):
    assert ends_words(Interval(low=low, expected=1.5, high=high), reasons) == expected


def test_a_bound_saves_at_most_and_a_change_is_what_the_command_line_takes():
    order = "--layout fsdp=2,data=4"
    assert help_rows([("no gaps", 0.5, "", "bound"), ("the order", 1.0, order, "walked whole")], 4.0) == [
        ("no gaps", "at most 500 ms", "12.5 %", "bound"),
        (order, "1.00 s", "25.0 %", "walked whole"),
    ]
