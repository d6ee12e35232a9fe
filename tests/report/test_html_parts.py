import re

from meshwright.report._html_parts import (
    COLOURS,
    SPARE,
    bar,
    colours_of,
    legend,
    paragraph,
    section,
    table,
    text,
)


def test_what_is_written_is_text_and_never_markup():
    assert section("a < b", "<p>part</p>") == "<section>\n<h2>a &lt; b</h2>\n<p>part</p></section>\n"
    assert paragraph("<script>") == "<p>&lt;script&gt;</p>\n"
    assert paragraph("small print", "facts") == '<p class="facts">small print</p>\n'
    assert "<td>&amp;</td>" in table(("head",), [("&",)])


def test_columns_of_numbers_are_marked():
    text = table(("what", "bytes"), [("parameters", "12")], numbers=(1,))
    assert "<th class=number>bytes</th>" in text
    assert "<td>parameters</td><td class=number>12</td>" in text


def test_no_two_categories_share_a_colour():
    colours = colours_of([f"mine_{n}" for n in range(20)])
    assert len(colours) == len(COLOURS) + len(SPARE)
    named = {name: colour for name, colour in colours.items() if name not in ("training", "held out")}
    assert len(set(named.values())) == len(named)  # curves stand in pictures of their own
    assert all(re.fullmatch(r"#[0-9a-f]{6}", colour) for colour in colours.values())


def test_a_category_has_its_colour_whatever_it_stands_beside():
    assert colours_of(["gradients"])["gradients"] == colours_of(["mine", "parameters"])["gradients"]


def test_the_bar_reaches_as_far_as_its_parts():
    drawn = bar({"parameters": 30, "gradients": 10}, 80, COLOURS, "memory", mark=60)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
    assert widths == [37.5, 12.5]
    assert '<u style="left:75.000%"></u>' in drawn
    assert 'aria-label="memory"' in drawn


def test_the_legend_names_squares_dashes_and_shapes():
    shown = legend([("#111111", "a < b")], [("#222222", "peak")], [("x", "failed")])
    assert shown.count("<li>") == 3
    assert "a &lt; b" in shown
    assert "class=dash" in shown


def test_file_names_stay_whole_and_paths_break_at_their_slashes():
    assert text("in layers/up (my-model.py:297)") == (
        "in layers/<wbr>up (<span class=file>my-model.py:297</span>)"
    )
    assert text("runs/a/metrics.jsonl: no") == "runs/<wbr>a/<wbr><span class=file>metrics.jsonl</span>: no"
    assert text("</b> 3 / 4") == "&lt;/b&gt; 3 / 4"


def test_tables_of_many_columns_can_be_cards_on_a_narrow_page():
    row = [str(n) for n in range(5)]
    assert '<td data-head="c4">4</td>' in table([f"c{n}" for n in range(5)], [row])
    assert "data-head" not in table(["a", "b"], [row[:2]])
