"""Mixtures of sources: shares, order, epochs, resumption, and what is refused."""

import math
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.contrib.texts import MixedWindows
from meshwright.contrib.texts import _mixture as mixture
from meshwright.errors import InputError
from meshwright.trainer.data import TokenWindows, data_identity, identity_difference, open_data

LENGTH = 8


def make(folder: Path, sizes: dict[str, int], weights: dict[str, object], more: str = "") -> Path:
    """Write a source of ascending tokens for each name, all different, and the mixture's file."""
    text, first = more, 0
    for name, size in sizes.items():
        np.arange(first, first + size, dtype="<u2").tofile(folder / f"{name}.bin")
        text += f'[[source]]\npath = "{name}.bin"\ndtype = "uint16"\nweight = {weights[name]}\n'
        first += size
    (folder / "mixture.toml").write_text(text)
    return folder / "mixture.toml"


def config_of(path: Path, *more: str):
    said = ["data.source=mixture", f"data.path={path}", "data.held_out_fraction=0.1"]
    batch = ["batch.sequences=16", f"batch.sequence_length={LENGTH}", "model.vocab_size=60000"]
    return load_config("bytes-nano", [*said, *batch, *more])


def opened(path: Path, *more: str) -> MixedWindows:
    data = open_data(config_of(path, *more))
    assert isinstance(data, MixedWindows)
    return data


SIZES, WEIGHTS = {"web": 3000, "code": 1000, "books": 200}, {"web": 5, "code": 2.5, "books": 2.5}


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_each_sequence_is_of_one_source_and_the_shares_are_the_weights(tmp_path: Path, order: str):
    data = opened(make(tmp_path, SIZES, WEIGHTS), f"data.order={order}")
    for split, held_out in (("train", False), ("held-out", True)):
        tokens = np.concatenate([data.batch(step, split)["tokens"] for step in range(400)])
        assert (np.diff(tokens, axis=1) == 1).all()
        number = np.searchsorted([3000, 4000, 4200], tokens, side="right")
        assert (number == number[:, :1]).all()
        shares = np.bincount(number[:, 0], minlength=3) / len(tokens)
        assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.02)
        within = (tokens - np.array([0, 3000, 4000])[number]) / np.array([3000, 1000, 200])[number]
        assert ((within >= 0.9) == held_out).all()


def test_the_shares_of_a_whole_cycle_are_exact():
    counts = mixture.cycle_counts("m", [1, 1, 1])
    assert sum(counts) == mixture.CYCLE
    assert max(counts) - min(counts) == 1
    sources, ranks = mixture._cycle(3, counts, 0, "train")
    assert np.bincount(sources).tolist() == list(counts)
    for number, count in enumerate(counts):
        assert ranks[sources == number].tolist() == list(range(count))


def test_every_source_gives_each_window_once_before_any_comes_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(mixture, "CYCLE", 64)  # so that the run crosses cycles
    mixture._cycle.cache_clear()
    data = opened(make(tmp_path, SIZES, WEIGHTS), "data.order=epochs")
    rows = np.concatenate([data.batch(step, "train")["tokens"] for step in range(200)])
    mixture._cycle.cache_clear()
    for (first, size), source in zip([(0, 3000), (3000, 1000), (4000, 200)], data.sources, strict=True):
        starts = rows[(rows[:, 0] >= first) & (rows[:, 0] < first + size), 0].tolist()
        count = source.num_windows("train")
        wanted = sorted(first + LENGTH * n for n in range(count))
        assert len(starts) > count
        assert sorted(starts[:count]) == wanted
        second = starts[count : 2 * count]
        assert len(set(second)) == len(second)


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_process_reads_its_rows_and_a_resumed_run_the_same_batches(tmp_path: Path, order: str):
    path = make(tmp_path, SIZES, WEIGHTS)
    whole = [opened(path, f"data.order={order}").batch(step, "train")["tokens"] for step in range(5000, 5004)]
    for number, batch in enumerate(whole):
        for rows in (slice(0, 4), np.array([1, 2, 15]), slice(8, 16)):
            again = opened(path, f"data.order={order}").batch(5000 + number, "train", rows)["tokens"]
            assert np.array_equal(again, batch[rows])


def test_the_order_does_not_depend_on_the_number_of_rows_in_a_batch(tmp_path: Path):
    path = make(tmp_path, SIZES, WEIGHTS)
    one, four = (opened(path, "data.order=epochs", f"batch.sequences={rows}") for rows in (4, 16))
    small = np.concatenate([one.batch(step, "train")["tokens"] for step in range(8)])
    assert np.array_equal(small, np.concatenate([four.batch(step, "train")["tokens"] for step in range(2)]))


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_a_mixture_of_one_is_that_source(tmp_path: Path, order: str):
    path = make(tmp_path, {"web": 3000}, {"web": 1})
    more = ["data.source=tokens", f"data.path={tmp_path / 'web.bin'}", "data.dtype=uint16"]
    alone = open_data(config_of(path, f"data.order={order}", *more))
    assert isinstance(alone, TokenWindows)
    mixed = opened(path, f"data.order={order}")
    for step in (0, 7, 9000):
        assert np.array_equal(mixed.batch(step, "train")["tokens"], alone.batch(step, "train")["tokens"])
    assert mixed.unigram_entropy_nats("train") == pytest.approx(alone.unigram_entropy_nats("train"))


def test_the_epochs_of_each_source_are_those_that_a_run_reads(tmp_path: Path):
    data = opened(make(tmp_path, SIZES, WEIGHTS), "data.order=epochs")
    said = data.epochs(300)
    rows = np.concatenate([data.batch(step, "train")["tokens"] for step in range(300)])
    read = np.bincount(np.searchsorted([3000, 4000, 4200], rows[:, 0], side="right"), minlength=3)
    assert [each.num_sequences for each in said] == read.tolist()
    assert [each.num_tokens for each in said] == [2700, 900, 180]
    assert [each.epochs for each in said] == pytest.approx([read[0] / 337, read[1] / 112, read[2] / 22])
    assert [each.share for each in said] == [0.5, 0.25, 0.25]


def test_the_entropy_is_that_of_the_mixed_tokens(tmp_path: Path):
    path = make(tmp_path, {"a": 100, "b": 100}, {"a": 3, "b": 1})
    np.zeros(100, "<u2").tofile(tmp_path / "a.bin")
    np.ones(100, "<u2").tofile(tmp_path / "b.bin")
    wanted = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert opened(path).unigram_entropy_nats("train") == pytest.approx(wanted)


def test_documents_are_kept_apart_in_every_source(tmp_path: Path):
    path = make(tmp_path, {"a": 200, "b": 200}, {"a": 1, "b": 1})
    np.resize(np.array([1, 2, 9], "<u2"), 200).tofile(tmp_path / "a.bin")
    batch = opened(path, "data.documents=packed", "data.end_of_document=9").batch(0, "train")
    ends = batch["tokens"][:, :-1] == 9
    assert np.array_equal(np.diff(batch["segments"], axis=1), ends)
    assert ends.any()


def test_a_changed_weight_is_another_mixture(tmp_path: Path):
    path = make(tmp_path, SIZES, WEIGHTS)
    known = data_identity(config_of(path))
    assert known is not None
    assert known["num_bytes"] == 2 * 4200 + path.stat().st_size
    path.write_text(path.read_text().replace("weight = 5", "weight = 6"))
    now = data_identity(config_of(path))
    assert now is not None
    assert "not the same" in identity_difference(known, now)


ONE = '[[source]]\npath = "a.bin"\ndtype = "uint16"\nweight = 1\n'


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("x =", "is not TOML", "correct the line"),
        ("", "is no mixture: it holds nothing beside its sources", "[[source]]"),
        (f"seed = 3\n{ONE}", "is no mixture: it holds seed beside its sources", "[[source]]"),
        ("source = [3]", "source 1 is no table", "[[source]]"),
        (ONE.replace("weight", "wieght"), "source 1: wieght is not a key of a source", "'weight'"),
        (ONE.replace("weight = 1", ""), "source 1: weight is missing", "weight = 0.3"),
        (ONE.replace("= 1", "= 0"), "source 1: weight = 0 is no number above 0", "leave the source out"),
        (ONE.replace("= 1", "= -0.5"), "source 1: weight = -0.5 is no number above 0", "leave"),
        (ONE.replace("= 1", "= inf"), "source 1: weight = inf is no number above 0", "leave"),
        (ONE.replace("= 1", "= 1e308"), "source 1: weight = 1e+308 is no number above 0", "leave"),
        (ONE.replace("= 1", "= " + "9" * 401), "is no number above 0 and up to 1e+18", "leave"),
        (ONE.replace("a.bin", "a\\u0000"), "is no path: embedded null", "name a file"),
        (ONE.replace("= 1", "= true"), "source 1: weight = True is no number", "leave"),
        (ONE.replace('path = "a.bin"', ""), "source 1: path is missing", "name a file"),
        (ONE.replace("uint16", "int8"), "source 1: dtype", "correct this source's table"),
        (ONE + 'format = "webdataset"', "source 1: format", "correct this source's table"),
        (ONE + ONE, "a.bin is named twice", "sum of the weights"),
        (
            ONE.replace("= 1", "= 1e9") + ONE.replace("a.bin", "b.bin"),
            "source 2 has weight 1 of 1e+09, less than one sequence of 65536",
            "raise its weight",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(tmp_path: Path, text: str, message: str, hint: str):
    for name in ("a", "b"):
        np.arange(100, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    (tmp_path / "mixture.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        opened(tmp_path / "mixture.toml")
    assert message in caught.value.message
    assert str(tmp_path / "mixture.toml") in caught.value.message or "named twice" in message
    assert hint in caught.value.hint


def test_a_missing_mixture_and_a_missing_source_are_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"cannot read the mixture .*No such file"):
        opened(tmp_path / "mixture.toml")
    path = make(tmp_path, SIZES, WEIGHTS)
    (tmp_path / "code.bin").unlink()
    with pytest.raises(InputError, match=r"no token file .*code\.bin"):
        opened(path)


def test_packed_documents_need_their_end_in_every_source(tmp_path: Path):
    path = make(tmp_path, SIZES, WEIGHTS)
    with pytest.raises(InputError, match=r"source 1: documents = 'packed' needs the id that ends a document"):
        opened(path, "data.documents=packed")


def test_sources_of_different_vocabularies_are_refused(tmp_path: Path):
    for name, tokenizer in (("a", "gpt2"), ("b", "mistral")):
        np.arange(100, dtype="<u2").tofile(tmp_path / f"{name}.ds")
        (tmp_path / f"{name}.ds.metadata").write_text(f"{tokenizer}|2\n100")
    text = "".join(ONE.replace("a.bin", f"{name}.ds") + 'format = "datatrove"\n' for name in "ab")
    (tmp_path / "mixture.toml").write_text(text)
    with pytest.raises(InputError, match=r"different vocab.*a\.ds is of gpt2, and .*b\.ds of mistral"):
        opened(tmp_path / "mixture.toml")


def test_a_token_outside_the_vocabulary_names_its_source(tmp_path: Path):
    path = make(tmp_path, SIZES, WEIGHTS)
    with pytest.raises(InputError, match=r"books\.bin holds token 4"):
        [opened(path, "model.vocab_size=4000").batch(step, "train") for step in range(20)]


def test_a_source_without_a_type_that_nothing_says_is_refused(tmp_path: Path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "mixture.toml").write_text(ONE.replace('dtype = "uint16"', ""))
    with pytest.raises(InputError, match=r"data\.dtype is missing, and no a\.bin\.json"):
        opened(tmp_path / "mixture.toml")
