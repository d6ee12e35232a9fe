"""An unknown option is answered with the option or the key that it means here."""

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
