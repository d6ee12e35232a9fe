"""What the core does without the room that reads texts, as where an older package is installed."""

import pytest

from meshwright import registry
from meshwright.config import load_config
from meshwright.errors import InputError
from meshwright.trainer.data import open_data


def test_without_the_room_texts_are_refused_in_words_and_bytes_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.trainer.data._text_room.registered_names", lambda group: [])
    assert "texts" in registry.registered_names("meshwright.data")
    (tmp_path / "a.txt").write_text("words " * 1000)
    texts = load_config("bytes-nano", ("data.source=text", f"data.path={tmp_path / 'a.txt'}"))
    with pytest.raises(InputError, match="nothing installed reads texts") as refused:
        open_data(texts)
    assert "install Meshwright again" in refused.value.hint
    assert open_data(load_config("bytes-nano")).batch(0, "train")["tokens"].any()
