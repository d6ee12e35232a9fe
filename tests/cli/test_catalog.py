from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import load_config, preset_names
from meshwright.hardware import CATALOG


def test_the_table_has_every_chip_on_a_line_of_its_own(meshwright):
    done = meshwright("fleets")
    lines = {line.split()[0]: line for line in done.output.splitlines() if line.strip()}
    assert set(CATALOG) <= set(lines)
    assert lines["H100"].split() == [
        "H100", "79.1", "GiB", "3.35", "TB/s", "989", "1,979", "450", "GB/s", "50.0", "GB/s",
        "compiler", "high",
    ]  # fmt: skip
    assert "16x4xA100-80GB" in done.output


@pytest.mark.parametrize(
    ("chip", "by"),
    [
        ("H100", "compiler"),
        ("v5e", "compiler"),
        ("CPU", "compiler"),
        ("RTX-4090", "compiler"),
        ("L4", "compiler"),
        ("T4", "compiler"),
        ("B100", "simulate"),
        ("MI300X", "simulate"),
        ("V100", "simulate"),
    ],
)
def test_a_chip_says_what_it_can_be_weighed_by(meshwright, chip: str, by: str):
    assert meshwright("fleets", chip, "--json").json["weigh_by"] == by


def test_one_chip_shows_its_figures_sources_and_doubts(meshwright):
    text = meshwright("fleets", "a100").output
    for word in ("A100-80GB", "NVIDIA A100", "312 TFLOP/s", "79.1 GiB", "chips per host", "https://"):
        assert word in text
    assert "sources disagree, or it varies" in meshwright("fleets", "v4").output


def test_a_chip_of_slices_says_how_several_are_written(meshwright):
    assert "4xv5e-256  " in meshwright("fleets").output
    text = " ".join(meshwright("fleets", "v5e").output.split())
    assert "16x16; several of one shape: 4xv5e-256" in text
    assert "DCN, 3.12 GB/s" in text
    assert "several" not in meshwright("fleets", "v3").output


def test_a_target_of_published_figures_is_marked_and_shown_with_its_figures_and_sources(meshwright):
    lines = {
        line.split()[0]: line.split() for line in meshwright("fleets").output.splitlines() if line.split()
    }
    assert [lines[name][-2] for name in ("A100-80GB", "RTX-4090", "V100-16GB")] == [
        "compiler", "compiler*", "simulate",
    ]  # fmt: skip
    text = " ".join(meshwright("fleets", "RTX-4090").output.split())
    figures = ("compute capability 8.9", "clock 2.52 GHz", "L2 cache 72.0 MiB", "shared memory each 100 KiB")
    for words in (*figures, "made of published figures", "CUDA C++ programming guide"):
        assert words in text


def test_a_chip_that_nothing_compiles_for_says_why(meshwright):
    assert "compute capability 7.0" in meshwright("fleets", "V100").output
    assert "ROCm" in meshwright("fleets", "MI300X", "--json").json["why_simulated"]
    assert meshwright("fleets", "H100", "--json").json["why_simulated"] == ""


@pytest.mark.parametrize("name", sorted(CATALOG))
def test_every_chip_can_be_shown(meshwright, name: str):
    assert meshwright("fleets", name).output.startswith(f"{name}: ")


def test_json_has_every_chip_with_sources(meshwright):
    answer = meshwright("fleets", "--json").json
    assert [chip["name"] for chip in answer["chips"]] == list(CATALOG)
    assert all(chip["sources"] for chip in answer["chips"] if chip["name"] != "CPU")


def test_an_unknown_chip_names_the_nearest(meshwright):
    done = meshwright("fleets", "H10")
    assert (done.status, done.talk) == (2, "error: unknown chip 'H10'\nhint: did you mean 'H100'?\n")


def test_formats_agree_with_numpy(meshwright):
    numpy = pytest.importorskip("numpy")
    found = {each["name"]: each for each in meshwright("formats", "--json").json["formats"]}
    for name, dtype in (("fp64", numpy.float64), ("fp32", numpy.float32), ("fp16", numpy.float16)):
        info = numpy.finfo(dtype)
        assert found[name]["max"] == float(info.max)
        assert found[name]["smallest_normal"] == float(info.smallest_normal)
        assert found[name]["smallest_subnormal"] == float(info.smallest_subnormal)
        assert found[name]["epsilon"] == float(info.eps)
        assert found[name]["1e-8_becomes"] == float(dtype(1e-8))


def test_the_table_shows_what_becomes_of_a_small_gradient(meshwright):
    last = {line.split()[0]: line.split()[-1] for line in meshwright("formats").output.splitlines() if line}
    assert (last["fp32"], last["bf16"], last["fp16"], last["fp8-e4m3"]) == ("1e-08", "1e-08", "0", "0")


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
        (["there.toml"], "error: there.toml exists already\nhint: name another file, or delete that one\n"),
        (["mine"], "error: mine does not end in .toml\nhint: name it mine.toml\n"),
        (["."], "error: . does not end in .toml\nhint: name it run.toml\n"),
        (["/"], "error: / does not end in .toml\nhint: name it /run.toml\n"),
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


def test_the_presets_in_json_have_exact_numbers(meshwright):
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


def test_a_file_of_ones_own_is_shown_too(meshwright, tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('preset = "linear"\nsteps = 7\n')
    done = meshwright("presets", str(file))
    assert done.status == 0, done.talk
    assert done.output.startswith(f"# {file}\n")
    assert "steps = 7" in done.output
