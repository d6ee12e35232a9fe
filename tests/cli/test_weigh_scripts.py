"""`meshwright weigh --on FLEET -- python train.py`: what is printed where, and what is refused."""

from pathlib import Path

import pytest

PLAIN = str(Path(__file__).parents[1] / "scripts" / "plain.py")


def test_a_script_is_weighed_on_one_screen_and_its_reads_are_told_on_stderr(meshwright):
    done = meshwright("weigh", "--on", "8xCPU", "--", "python", PLAIN, "3")
    assert done.status == 0
    words = " ".join(done.output.split())  # where a line is broken depends on the folder of the clone
    assert "plain.py 3:update on 8xCPU, layout data=2,model=4" in words
    assert "plain.py:55: if value < 1e-4:" in done.talk
    assert "also jitted: evaluate at" in done.talk


def test_all_calls_are_printed_as_a_list_of_weighings(meshwright):
    done = meshwright(
        "weigh", "--on", "8xCPU", "--all", "--json", "--tokens-per-step", "256", "--", "python", PLAIN, "3"
    )
    names = [each["config"].rpartition(":")[2] for each in done.json["weighings"]]
    assert names == ["update", "evaluate"]
    assert {each["tokens_per_step"] for each in done.json["weighings"]} == {256}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layout", "data=8", "--", "python", PLAIN), "a script takes no layout"),
        (("--set", "a=1", "--", "python", PLAIN), "a script takes no overrides (--set)"),
        (("--all", "linear"), "a configuration takes no --all"),
        (("linear", "digits"), "'linear digits' runs no Python script"),
        (("--tokens", "1B", "--", "python", PLAIN), "the number of tokens in its step is not known"),
        (("--tokens-per-step", "3", "linear"), "a configuration takes no tokens_per_step"),
    ],
)
def test_what_has_no_meaning_for_a_script_is_refused(arguments, words, meshwright):
    done = meshwright("weigh", "--on", "8xCPU", *arguments)
    assert done.status == 2
    assert words in done.talk
