"""Unknown commands answer as unknown keys do; help is in words and in groups."""

import pytest


def test_an_unknown_command_is_answered_with_the_nearest(meshwright):
    assert meshwright("wiegh").talk.splitlines() == [
        "error: `meshwright` has no command 'wiegh'",
        "hint: did you mean 'weigh'?",
    ]
    assert "meshwright weigh llama3-8b --on 8xH100" in meshwright("llama3-8b").talk
    assert "did you mean 'tokenize'?" in meshwright("data", "tokenise").talk
    assert "options follow the command" in meshwright("--on", "8xH100", "weigh", "linear").talk


def test_the_help_is_grouped_with_the_three_verbs_of_the_work_first(meshwright):
    page = meshwright("--help").output
    places = [
        page.index(words) for words in ("Begin with these", " weigh ", " plan ", " train ", "Know more")
    ]
    assert places == sorted(places)
    later = [page.index(words) for words in ("Know more", " probe ", " sweep ", "Look up", " presets ")]
    assert later == sorted(later)
    assert meshwright("-h").output == page


@pytest.mark.parametrize("verb", ["weigh", "plan", "train", "sample", "data tokenize", "probe"])
def test_types_read_as_words(meshwright, verb):
    page = meshwright(*verb.split(), "-h").output
    assert page == meshwright(*verb.split(), "--help").output
    for type_name in ("<bool>", "<str>", "<int>", "<float>", "<list", "<path>", "<file>"):
        assert type_name not in page
