import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.config import RunConfig, load_config, overridden, preset_names
from meshwright.errors import InputError

PRESETS = (
    "bytes-10m bytes-moe bytes-nano cruncher gpt2-1.5b gpt2-124m gpt3-175b lenet lenet-fashion line linear"
)
PRESETS += " llama-1b llama2-7b llama3-405b llama3-70b llama3-8b mixtral-8x7b resnet18-fashion"


def test_the_presets_are_those_the_readme_promises():
    assert preset_names() == PRESETS.split()


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_loads_under_its_own_name(preset: str):
    assert load_config(preset).name == preset


def test_overrides_are_toml_values_and_bare_words():
    overrides = [
        "model.num_layers=12",
        "model.unroll = true",
        "precision=bf16",
        "layout=data=2,fsdp=4",
        'remat="full"',
        "optimizer.clip_norm=none",
        "seed=1",
        "seed=1_000",
    ]
    config = load_config("bytes-nano", overrides)
    assert (config.model.num_layers, config.model.unroll) == (12, True)  # pyright: ignore
    assert (config.precision, config.layout, config.remat) == ("bf16", "data=2,fsdp=4", "full")
    assert config.optimizer.clip_norm is None
    assert config.seed == 1000


def test_another_kind_of_a_section_drops_the_keys_that_only_the_old_kind_had():
    config = load_config("bytes-10m", ["optimizer.kind=sgd", "schedule.kind=constant"])
    assert config.optimizer.model_dump() == {
        "kind": "sgd",
        "learning_rate": 1e-3,
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
        "weight_decay_on": "matrices",
        "clip_norm": 1.0,
    }
    assert config.schedule.kind == "constant"
    assert overridden(load_config("bytes-10m"), ["optimizer.kind=sgd", "schedule.kind=constant"]) == config


def test_a_file_may_start_from_a_preset(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "llama3-8b"\n[model]\nnum_layers = 4\n')
    config = load_config(str(path), ["model.vocab_size=1024"])
    assert config.name == "mine"
    assert (config.model.num_layers, config.model.vocab_size) == (4, 1024)  # pyright: ignore
    assert config.optimizer == load_config("llama3-8b").optimizer


def test_a_file_may_stand_alone(tmp_path: Path):
    path = tmp_path / "row.toml"
    path.write_text(
        'steps = 1\n[model]\nkind = "linear"\ninput_dim = 4\n[data]\nsource = "synthetic"\n'
        '[optimizer]\nkind = "sgd"\nlearning_rate = 1\n[schedule]\nkind = "constant"\n'
        "[batch]\nsequences = 2\n"
    )
    assert load_config(str(path)).model.num_parameters == 4


def test_a_data_path_is_relative_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "mine.toml"
    path.write_text(
        'preset = "bytes-nano"\n[data]\nsource = "tokens"\npath = "../tokens.bin"\ndtype = "uint16"\n'
    )
    assert load_config(str(path)).data.path == str(tmp_path.parent / "tokens.bin")  # pyright: ignore
    monkeypatch.chdir(tmp_path)
    config = load_config(str(path), ["data.path=here.bin"])
    assert config.data.path == str(tmp_path / "here.bin")  # pyright: ignore


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ('preset = "lama3-8b"', "no preset is named 'lama3-8b'", "did you mean 'llama3-8b'?"),
        ("steps = ", "is not TOML: ", "fix the line"),
        ("\udcff", "is not TOML: ", "fix the line"),
        (
            'preset = "bytes-nano"\nname = "x"',
            "a file cannot set name",
            "a run is named after its file: mine",
        ),
        (
            'presset = "bytes-nano"',
            "presset is not a section or a key of a run",
            "presset: did you mean 'preset'?",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, content: str, message: str, hint: str):
    path = tmp_path / "mine.toml"
    path.write_bytes(content.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(InputError) as caught:
        load_config(str(path))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_the_folder_of_a_run_and_its_config_json_are_that_run(tmp_path: Path):
    config = load_config("bytes-nano", ["model.num_layers=3"])
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(config.model_dump_json())
    assert load_config(str(run)) == load_config(str(run / "config.json")) == config
    assert load_config(str(run), ["optimizer.kind=sgd"]).optimizer.kind == "sgd"


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (None, "cannot read .*config.json: No such file", "a run's folder, which holds config.json"),
        ("{", "is not JSON", "config.json of a run"),
        ("[" * 100_000, "is not JSON", "config.json of a run"),
        ("[]", "is not the configuration of a run", "`meshwright init`"),
        (
            '{"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "vocab_size": 8, "x": true}',
            "is not the configuration of a run",
            "with model.embed_dim = 4096, model.vocab_size = 8",
        ),
        ('{"name": "x", "model": 3}', "model = 3: expected a section", "section of keys"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, content: str | None, message: str, hint: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_config(str(tmp_path))
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("step.ipynb", "jupyter nbconvert --to script"),
        ("job.sbatch", "meshwright gate"),
        ("weights.safetensors", "a folder with a config.json"),
    ],
)
def test_a_file_of_another_kind_says_what_to_do_with_it(tmp_path: Path, name: str, hint: str):
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=f"{name} is no configuration") as caught:
        load_config(str(tmp_path / name))
    assert hint in caught.value.hint
    assert "known:" not in caught.value.hint


def test_an_unknown_preset_or_file_names_the_nearest(tmp_path: Path):
    with pytest.raises(InputError, match=r"no preset is named 'llama3-9b'\n.*did you mean 'llama3-8b'"):
        load_config("llama3-9b")
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(InputError, match=r"no file .*mein.toml\n.*did you mean 'mine.toml'"):
        load_config(str(tmp_path / "mein.toml"))
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(
        InputError, match=r"cannot read .*folder.toml: Is a directory\n.*a readable TOML file"
    ):
        load_config(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        (
            "model.num_layers",
            "'model.num_layers' is not section.key=value",
            "write it as in model.num_layers=12",
        ),
        ("model..x=3", "is not section.key=value", "as in"),
        ("model.num_layers.x=3", "model.num_layers.x is nested too deeply", "write model.num_layers=3"),
    ],
)
def test_an_override_that_is_none_is_refused(override: str, message: str, hint: str):
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", [override])
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_an_override_cannot_smuggle_in_a_second_key():
    with pytest.raises(InputError, match="expected one of fp32, bf16"):
        load_config("bytes-nano", ["precision='bf16'\nseed=3"])


def test_reading_a_config_imports_no_jax_and_no_numpy():
    code = "import sys; from meshwright.config import load_config; load_config('llama3-8b'); "
    code += "sys.exit(any(name in sys.modules for name in ('jax', 'numpy', 'optax')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates().map(str)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner))
paths = st.sampled_from(
    list(RunConfig.model_fields)
    + [
        f"{section}.{key}"
        for section in ("model", "data", "optimizer", "schedule", "batch", "evaluation")
        for key in (
            "kind",
            "source",
            "path",
            "num_heads",
            "head_dim",
            "rope_theta",
            "clip_norm",
            "sequences",
            "x",
        )
    ]
)


@settings(max_examples=200)
@given(st.lists(st.tuples(paths, values.map(str) | values.map(json.dumps)), min_size=1, max_size=3))
def test_whatever_is_overridden_the_answer_is_a_config_or_words(overrides: list[tuple[str, str]]):
    try:
        load_config("bytes-nano", [f"{path}={value}" for path, value in overrides])
    except InputError as error:
        refused = str(error)
    else:
        return
    assert "hint: " in refused
    assert "Input should" not in refused  # pydantic's own words: a kind of error that we have not worded


@pytest.mark.parametrize("name", ["9" * 100_000, "9x" * 40_000, "1." * 4000, "llama/" * 2000])
def test_a_name_that_the_system_does_not_take_is_refused_in_words(name):
    with pytest.raises(InputError, match=r"no preset"):
        load_config(name)
