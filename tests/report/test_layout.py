from rich.console import Group
from rich.text import Text

from meshwright.report._terminal_parts import add_row, heading, indented, plain_table, spaced


def test_a_table_stands_below_its_heading_with_numbers_at_the_right(plain):
    table = plain_table("what", "size", right=("size",))
    add_row(table, "[tensor]", "4 B")
    add_row(table, "b", "1,024 B")
    assert plain(Group(heading("Memory"), indented(table))) == (
        "Memory\n  what         size\n  [tensor]      4 B\n  b         1,024 B\n"
    )


def test_a_name_is_spoken_with_spaces():
    assert spaced("saved_activations") == "saved activations"


def test_text_is_indented_by_two(plain):
    assert plain(indented(Text("a"))) == "  a\n"
