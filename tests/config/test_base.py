import pytest
from pydantic import ValidationError

from meshwright.config import AdamWOptimizer, BatchConfig
from meshwright.config._base import is_table, raise_problems


def test_the_word_none_stands_for_toml_s_missing_null():
    assert AdamWOptimizer(kind="adamw", learning_rate=1.0, clip_norm="none").clip_norm is None  # pyright: ignore


def test_records_are_frozen():
    batch = BatchConfig(sequences=8)
    with pytest.raises(ValidationError, match="frozen"):
        batch.sequences = 9  # pyright: ignore


def test_a_number_in_quotes_is_no_number():
    with pytest.raises(ValidationError, match="valid integer"):
        BatchConfig.model_validate_json('{"sequences": "8"}')


def test_no_problem_raises_nothing():
    raise_problems([])


def test_only_a_dict_is_a_table():
    assert is_table({})
    assert not is_table([])
