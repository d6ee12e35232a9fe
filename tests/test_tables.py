import pytest

from meshwright.units import aligned


def test_columns_stand_below_each_other_and_numbers_end_together():
    text = aligned(("what", "bytes"), [("weights", "4"), ("bias", "1,024")], right={"bytes"}, indent="  ")
    assert text == "  what     bytes\n  weights      4\n  bias     1,024"


def test_a_line_has_no_spaces_at_its_end():
    assert aligned(("a", "note"), [("b", "")]) == "a  note\nb"


def test_a_row_of_another_length_is_a_mistake_of_ours():
    with pytest.raises((ValueError, IndexError)):
        aligned(("a", "b"), [("1",)])
