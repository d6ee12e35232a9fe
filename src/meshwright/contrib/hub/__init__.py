"""Read models of Hugging Face's Hub as configurations: from a `config.json`, or published with Meshwright.

Each family of models is a table in families.toml, each published model one in published_models.toml.
Imports: `config`, `errors`, `files`, pydantic. No jax. Used by: `config`, by the entry point; the rooms of
PyTorch and of weights.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: the tables of all families are read when they are imported
    from ._families import FAMILIES as FAMILIES
    from ._families import Family as Family
    from ._families import weight_parameters as weight_parameters
    from ._huggingface_config import LONGEST_SEQUENCE as LONGEST_SEQUENCE
    from ._huggingface_config import check_heads as check_heads
    from ._huggingface_config import family_of as family_of
    from ._huggingface_config import huggingface_of_model as huggingface_of_model
    from ._huggingface_config import is_misspelling as is_misspelling
    from ._huggingface_config import reads_text_alone as reads_text_alone
    from ._huggingface_config import refusal_of as refusal_of
    from ._huggingface_config import run_of_huggingface as run_of_huggingface
    from ._huggingface_config import text_part as text_part
    from ._layer_lists import numbers_of_parts as numbers_of_parts
    from ._named_models import cached_config as cached_config
    from ._named_models import huggingface_model as huggingface_model
    from ._named_models import is_refused as is_refused
    from ._named_models import run_of_file as run_of_file
    from ._named_models import run_of_published as run_of_published
    from ._named_models import text_reading as text_reading
    from ._published import published_about as published_about
    from ._published import published_config as published_config
    from ._published import published_id as published_id
    from ._published import published_ids as published_ids
    from ._rotary_keys import listed_keys as listed_keys

__getattr__, __dir__ = names_on_first_use(__name__)
