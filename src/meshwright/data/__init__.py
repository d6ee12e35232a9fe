"""Generate or read the batches of a run, and write token files and image files.

A batch is a dict of numpy arrays: the whole fleet's batch, or some of its rows. For given data it is a pure
function of seed, step and split.
Imports: `config`, `children`, `errors`, numpy, pydantic; `tokenizers` only for a tokenizer.json. No jax.
Imported by: `training`, `cli`.
"""

from ._images import ImageFiles as ImageFiles
from ._images import LabelledImages as LabelledImages
from ._images import write_images as write_images
from ._images import write_sample_images as write_sample_images
from ._open import Dataset as Dataset
from ._open import open_data as open_data
from ._order import ALL as ALL
from ._order import LineRows as LineRows
from ._order import RegressionRows as RegressionRows
from ._order import Rows as Rows
from ._order import Split as Split
from ._texts import Tokenizer as Tokenizer
from ._texts import open_tokenizer as open_tokenizer
from ._token_files import InputFacts as InputFacts
from ._token_files import TokenFileFacts as TokenFileFacts
from ._token_files import data_identity as data_identity
from ._token_files import identity_difference as identity_difference
from ._token_files import read_facts as read_facts
from ._tokenize import tokenize as tokenize
from ._tokens import RandomTokens as RandomTokens
from ._tokens import TokenWindows as TokenWindows
