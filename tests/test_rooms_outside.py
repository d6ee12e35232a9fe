"""What the core does without the rooms that read texts and models, as where an older package is installed."""

import importlib.metadata
import json

import pytest

from meshwright.config import load_config
from meshwright.contrib.causes import History
from meshwright.errors import InputError
from meshwright.registry import room
from meshwright.trainer.data import open_data
from meshwright.trainer.launch import Place, join
from meshwright.trainer.models import model_of


@pytest.fixture(autouse=True)
def _without_rooms(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: importlib.metadata.EntryPoints())
    room.cache_clear()
    yield
    room.cache_clear()


def test_without_the_room_texts_are_refused_in_words_and_bytes_are_read(tmp_path):
    (tmp_path / "a.txt").write_text("words " * 1000)
    texts = load_config("bytes-nano", ("data.source=text", f"data.path={tmp_path / 'a.txt'}"))
    with pytest.raises(InputError, match=r"no entry point 'texts' of 'meshwright\.rooms'") as refused:
        open_data(texts)
    assert "install Meshwright again" in refused.value.hint
    assert open_data(load_config("bytes-nano")).batch(0, "train")["tokens"].any()


def test_without_the_room_models_of_others_are_refused_in_words_and_presets_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for text in ("Qwen/Qwen2.5-7B", str(tmp_path)):
        with pytest.raises(InputError, match=r"no entry point 'hub' of 'meshwright\.rooms'") as refused:
            load_config(text)
        assert "install Meshwright again" in refused.value.hint
    assert load_config("llama3-8b").model.num_layers == 32


@pytest.mark.parametrize(
    ("use", "point"),
    [
        (lambda: model_of(load_config("linear").model), r"'linear' of 'meshwright\.toy_models'"),
        (lambda: open_data(load_config("resnet18-fashion")), r"'images' of 'meshwright\.rooms'"),
        (lambda: model_of(load_config("bytes-moe").model).parameters(), r"'experts' of 'meshwright\.rooms'"),
        (lambda: History(file="", rows=()).to_html(), r"'pages' of 'meshwright\.rooms'"),
        (lambda: join(Place(launcher="Slurm")), r"'clusters' of 'meshwright\.rooms'"),
    ],
)
def test_without_a_room_what_it_does_is_refused_in_words(use, point):
    with pytest.raises(InputError, match=f"no entry point {point}") as refused:
        use()
    assert "install Meshwright again" in refused.value.hint
