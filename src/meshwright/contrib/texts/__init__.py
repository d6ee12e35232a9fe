"""Make token ids of texts and conversations, read files of tokens, and find out what somebody's own data are.

Texts become token files (`tokenize`, `meshwright data tokenize`), those of a run once and in the cache.
Imports: `trainer.data`, `config`, `compiler` (its cache), `errors`, numpy; `tokenizers`, `jinja2` and
`pyarrow` only for a model's tokenizer, its chat template and Parquet. No jax. Used by: `trainer.data`, by the
entry point; users, through `meshwright data`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: the command's help needs none of them
    from ._metadata import TokenFileMetadata as TokenFileMetadata
    from ._metadata import metadata_path as metadata_path
    from ._metadata import read_metadata as read_metadata
    from ._mixture import MixedWindows as MixedWindows
    from ._own import own_data as own_data
    from ._texts import Tokenizer as Tokenizer
    from ._texts import fragments_in as fragments_in
    from ._texts import open_tokenizer as open_tokenizer
    from ._texts import pieces_of as pieces_of
    from ._texts import tokenizer_path as tokenizer_path
    from ._token_data import files_of as files_of
    from ._token_data import open_tokens as open_tokens
    from ._tokenize import tokenize as tokenize

__getattr__, __dir__ = names_on_first_use(__name__)
