from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load_config, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_printed_in_full_is_a_file_that_gives_the_same_run(meshwright, tmp_path: Path, name: str):
    path = tmp_path / f"{name}.toml"
    path.write_text(meshwright("presets", name).output)
    assert load_config(str(path)) == load_config(name)


def test_a_preset_is_printed_with_the_meaning_of_its_keys_and_its_sources(meshwright):
    text = meshwright("presets", "llama3-8b").output
    assert "embed_dim = 4096              # Width of the residual stream [numbers per token]" in text
    assert "# llama3-8b: Llama 3 8B, Grattafiori et al. 2024" in text


@pytest.mark.parametrize("arguments", [[], ["mine.toml"], ["mine.toml", "--from", "llama-1b"]])
def test_init_writes_a_file_that_is_the_preset_with_the_meaning_of_every_key(
    meshwright, tmp_path: Path, monkeypatch, arguments: list[str]
):
    monkeypatch.chdir(tmp_path)
    done = meshwright("init", *arguments)
    path, preset = (arguments or ["run.toml"])[0], arguments[2] if arguments[2:] else "bytes-nano"
    assert (done.status, done.talk) == (0, "")
    assert f"meshwright weigh {path} --on 8xH100" in done.output
    assert load_config(path) == load_config(preset).model_copy(update={"name": Path(path).stem})
    assert "# Blocks of attention and MLP [layers]" in Path(path).read_text()


@pytest.mark.parametrize(
    ("arguments", "talk"),
    [
        (["there.toml"], "error: there.toml is there already\nhint: name another file, or delete that one\n"),
        (["mine"], "error: mine does not end in .toml\nhint: name it mine.toml\n"),
        (["no/mine.toml"], "error: cannot write no/mine.toml: No such file or directory\n"),
        (["mine.toml", "--from", "bytes-nan"], "hint: did you mean 'bytes-nano'?\n"),
    ],
)
def test_init_overwrites_nothing_and_says_what_is_wrong(
    meshwright, tmp_path: Path, monkeypatch, arguments: list[str], talk: str
):
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("mine")
    done = meshwright("init", *arguments)
    assert done.status == 2
    assert talk in done.talk
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("there.toml", "mine")]


def test_init_in_json_names_the_file(meshwright, tmp_path: Path):
    answer = meshwright("init", str(tmp_path / "x.toml"), "--json").json
    assert answer == {"schema": 1, "file": str(tmp_path / "x.toml"), "preset": "bytes-nano"}


def test_the_table_has_every_preset_with_its_size(meshwright):
    lines = {line.split()[0]: line.split() for line in meshwright("presets").output.splitlines() if line}
    assert set(preset_names()) <= set(lines)
    assert lines["llama3-8b"] == [
        "llama3-8b", "transformer", "8.03B", "32", "8,192", "4.19M", "bf16", lines["llama3-8b"][-1],
    ]  # fmt: skip
    assert lines["linear"][2] == "16"


def test_json_has_exact_numbers(meshwright):
    answer = meshwright("presets", "--json").json
    assert answer["schema"] == 1
    found = {each["name"]: each for each in answer["presets"]}
    assert found["cruncher"]["num_parameters"] == 2 * 64**2 + 64
    assert found["linear"]["num_layers"] is None
    assert found["llama3-405b"]["tokens_per_step"] == 2048 * 8192


def test_one_preset_as_json_is_its_run_config(meshwright):
    answer = meshwright("presets", "bytes-nano", "--json").json
    assert answer["model"]["embed_dim"] == 64


def test_an_unknown_preset_names_the_nearest(meshwright):
    done = meshwright("presets", "llama3-9b")
    assert done.status == 2
    assert "did you mean 'llama3-8b'?" in done.talk
