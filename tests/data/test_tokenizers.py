import builtins
import hashlib
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import open_tokenizer
from meshwright.errors import InputError

WORDS = {"<end>": 0, "[CLS]": 1, "a": 2, "b": 3, "[UNK]": 4, "far": 9}


@pytest.fixture
def words(tmp_path: Path) -> str:
    """Words apart by blanks; set to put [CLS] in front, cut to three ids and pad to five."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    made.add_special_tokens(["<end>"])
    made.enable_truncation(3)
    made.enable_padding(length=5)
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_bytes_are_those_of_utf_8():
    tokenizer = open_tokenizer("bytes")
    assert [ids.tolist() for ids in tokenizer.encode(["é€", "", "a\n"])] == [
        [0xC3, 0xA9, 0xE2, 0x82, 0xAC],
        [],
        [97, 10],
    ]
    assert (tokenizer.num_ids, tokenizer.sha256, tokenizer.end_of_document("256")) == (256, None, 256)


def test_ids_become_text_again(words: str):
    ids = np.array([0x61, 0xC3, 0xA9, 256, 0xFF], np.int32)
    assert open_tokenizer("bytes").decode(ids) == "aé\N{REPLACEMENT CHARACTER}"
    assert open_tokenizer(words).decode(np.array([2, 9, 0, 7])) == "a far <end>"


def test_only_256_may_end_a_document_of_bytes():
    with pytest.raises(InputError, match="with bytes only 256 is free"):
        open_tokenizer("bytes").end_of_document("10")


def test_a_file_gives_the_ids_of_the_text_and_no_more(words: str):
    tokenizer = open_tokenizer(words)
    assert [ids.tolist() for ids in tokenizer.encode(["a b a far", "x", ""])] == [[2, 3, 2, 9], [4], []]
    assert tokenizer.num_ids == 10  # the largest id and one, though there are only six
    assert tokenizer.sha256 == hashlib.sha256(Path(words).read_bytes()).hexdigest()
    assert tokenizer.name == "tokenizer.json"


def test_a_document_ends_with_a_token_or_its_id(words: str):
    tokenizer = open_tokenizer(words)
    assert (tokenizer.end_of_document("<end>"), tokenizer.end_of_document("9")) == (0, 9)
    for asked in ("<emd>", "10"):
        with pytest.raises(InputError, match="has no such token and 10 ids") as caught:
            tokenizer.end_of_document(asked)
        assert "'<end>'" in caught.value.hint or "<end>" in caught.value.hint


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(InputError, match="is no tokenizer"):
        open_tokenizer(str(tmp_path / "t.json"))


def test_a_missing_file_is_named():
    with pytest.raises(InputError, match="no tokenizer 'gpt2'") as caught:
        open_tokenizer("gpt2")
    assert "local tokenizer.json" in caught.value.hint


def test_without_the_package_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = builtins.__import__

    def without(name: str, *rest, **named):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest, **named)

    (tmp_path / "t.json").write_text("{}")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="needs the package tokenizers, which is not installed") as caught:
        open_tokenizer(str(tmp_path / "t.json"))
    assert "pip install 'meshwright[tokenizers]'" in caught.value.hint
