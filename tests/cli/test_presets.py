from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load_config, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_printed_in_full_is_a_file_that_gives_the_same_run(meshwright, tmp_path: Path, name: str):
    path = tmp_path / f"{name}.toml"
    path.write_text(meshwright("presets", name).output)
    assert load_config(str(path)) == load_config(name)


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
