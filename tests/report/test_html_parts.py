from meshwright.report._html_parts import paragraph, section, table


def test_what_is_written_is_text_and_never_markup():
    assert section("a < b", "<p>part</p>") == "<section>\n<h2>a &lt; b</h2>\n<p>part</p></section>\n"
    assert paragraph("<script>") == "<p>&lt;script&gt;</p>\n"
    assert paragraph("small print", "facts") == '<p class="facts">small print</p>\n'
    assert "<td>&amp;</td>" in table(("head",), [("&",)])


def test_columns_of_numbers_are_marked():
    text = table(("what", "bytes"), [("parameters", "12")], numbers=(1,))
    assert "<th class=number>bytes</th>" in text
    assert "<td>parameters</td><td class=number>12</td>" in text
