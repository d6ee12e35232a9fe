"""Unknown options and commands answer as unknown keys do; help is in words and in groups."""

import pytest

HELP = {
    "--gpus 8": "--on means that here: --on 8xH100",
    "--gpus=16": "--on means that here: --on 16xH100",
    "--num-gpus H200": "--on means that here: --on 8xH200",
    "--devices 64xH100": "--on means that here: --on 64xH100",
    "--seq-len 4096": "--set batch.sequence_length=4096",
    "--sequence_length 4096": "--set batch.sequence_length=4096",
    "--batch-size 64": "--set batch.sequences=64",
    "--micro-batch-size 2": "--set batch.microbatch_sequences=2",
    "--precision bfloat16": "--set precision=bf16",
    "--dtype torch.bfloat16": "--set precision=bf16",
    "--bf16": "--set precision=bf16",
    "--lr 3e-4": "--set optimizer.learning_rate=3e-4",
    "--learning-rate 3e-4": "--set optimizer.learning_rate=3e-4",
    "--num-layers 12": "--set model.num_layers=12",
    "--seed 3": "--set seed=3",
    "--tp 8": "--layout tensor=8",
    "--tensor 8": "--layout tensor=8",
    "--tensor-model-parallel-size 8": "--layout tensor=8",
    "--pipeline-parallel-size 4": "--layout stage=4",
    "--data-parallel": "--layout data=N",
    "--fsdp 8": "--layout fsdp=8",
    "--verbos": "did you mean --verbose?",
    "--tokns 3B": "did you mean --tokens?",
    "--cost 2": "--price means that here: --price 2",
    "--frobnicate": "known: --all, ",
}


@pytest.mark.parametrize(("words", "hint"), HELP.items())
def test_an_unknown_option_is_answered_with_what_it_means_here(meshwright, words, hint):
    done = meshwright("weigh", "bytes-nano", "--on", "8xH100", *words.split())
    first, second = done.talk.splitlines()
    assert done.status == 2
    assert first == f"error: `meshwright weigh` has no option {words.partition(' ')[0].partition('=')[0]}"
    assert second.startswith("hint: ")
    assert hint in second


def test_an_option_means_what_the_command_has(meshwright):
    assert "--steps means that here: --steps 10" in meshwright("train", "linear", "--max-steps", "10").talk
    assert "--fix tensor=4" in meshwright("plan", "linear", "--on", "8xCPU", "--tp", "4").talk
    assert "hint: known: --json" in meshwright("probe", "--seq-len", "3").talk
    script = meshwright("weigh", "--on", "8xCPU", "python", "train.py", "--lr", "3")
    assert "write -- before the command of your script: -- python train.py --lr" in script.talk


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
