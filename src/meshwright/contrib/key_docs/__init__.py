"""Document the keys of the configuration, by the text below each, and comment a run's file with that.

Imports: `config`, pydantic. Used by: `planned`, by the entry point; `contrib.catalog`; the program that makes
the page of keys.
"""

from ._key_texts import texts_of as texts_of
from ._reference import KeyDoc as KeyDoc
from ._reference import commented_toml as commented_toml
from ._reference import key_docs as key_docs
