"""A refused configuration says what is wrong, with its path and what is expected, all of it at once."""

import pytest

from meshwright.config import load_config
from meshwright.errors import InputError


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("model.num_layerz=3", "model.num_layerz is not a key of model (transformer)", "'num_layers'"),
        ("batch.sequence=3", "batch.sequence is not a key of batch", "'sequences'"),
        ("modle.num_layers=3", "modle is not a section or a key of a run", "'model'"),
        ("sede=3", "sede is not a section or a key of a run", "'seed'"),
        ("batch.sequences='12'", 'batch.sequences = "12": expected a whole number', "= 12 without quotes"),
        ("steps=1.5", "steps = 1.5: expected a whole number", "a whole number"),
        ("seed=true", "seed = true: expected a whole number", "a whole number"),
        ("seed=-1", "seed = -1: expected at least 0", "at least 0"),
        ("seed=4294967296", "seed = 4294967296: expected less than 4294967296", "less than"),
        ("batch=3", "batch = 3: expected a section of keys", "a section of keys"),
        ("model=3", "model = 3: expected a section of keys", "a section of keys"),
        ("layout=3", "layout = 3: expected text", "text"),
        ("model.bias=1", "model.bias = 1: expected true or false", "true or false"),
        ("model.position=lerned", 'model.position = "lerned": expected one of rotary, learned', "'learned'"),
        ("model.norm_epsilon=x", 'model.norm_epsilon = "x": expected a number', "a number"),
        ("model.norm_epsilon=inf", "model.norm_epsilon = Infinity: expected a finite number", "finite"),
        ("model.norm_epsilon=nan", "model.norm_epsilon = NaN: expected", "set it to"),
        ("model.norm_epsilon=0.0", "model.norm_epsilon = 0.0: expected more than 0", "more than 0"),
        ("model.dropout=1.0", "model.dropout = 1.0: expected less than 1", "less than 1"),
        ("data.held_out_fraction=0.6", "data.held_out_fraction = 0.6: expected at most 0.5", "at most 0.5"),
        ("data.source=tokens", "data.path is missing", "set data.path"),
        (
            "optimizer.kind=adamx",
            'optimizer.kind = "adamx": expected one of adafactor, adagrad, adam,',
            "'adam'",
        ),
        (
            "optimizer.kind={}",
            "optimizer.kind = {}: expected one of adafactor, adagrad, adam, adamw, lion, muon, rmsprop, sgd",
            "known: adafactor, adagrad, adam, adamw, lion, muon, rmsprop, sgd",
        ),
        (
            "precision=2026-11-21",
            'precision = "2026-11-21": expected one of fp32, bf16, fp16, fp8',
            "known: bf16, fp16, fp32, fp8",
        ),
        ("seed=[" + "1," * 99 + "]", "1, 1,...: expected a whole number", "a whole number"),
    ],
)
def test_a_wrong_value_is_named_with_its_path_and_what_is_expected(override: str, message: str, hint: str):
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", [override])
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_section_without_its_kind_says_which_there_are(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('preset = "bytes-nano"\nschedule = 3\n')
    with pytest.raises(InputError) as caught:
        load_config(str(path), ["schedule.warmup_steps=3"])
    assert "schedule.kind is missing" in caught.value.message
    assert "constant, cosine" in caught.value.hint


def test_everything_wrong_is_said_at_once():
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", ["model.num_layerz=3", "batch.sequences=0", "optimizer.kind=adamax"])
    assert caught.value.message.splitlines() == [
        "bytes-nano: 3 things are wrong",
        "  model.num_layerz is not a key of model (transformer)",
        '  optimizer.kind = "adamax": expected one of adafactor, adagrad, adam, adamw, lion, muon, rmsprop, '
        "sgd",
        "  batch.sequences = 0: expected at least 1",
    ]
    assert caught.value.hint == (
        "model.num_layerz: did you mean 'num_layers'?; optimizer.kind: did you mean 'adam'?; "
        "batch.sequences: set it to at least 1"
    )
