"""What a run reads: batches of the whole fleet, or some of their rows, as numpy arrays, a pure function of
seed and step.
`tokenize` makes the token files. Imports: `config`, `errors`, numpy, pydantic. No jax. Imported by:
`training`, `api`, `cli`.
"""

from ._facts import InputFacts as InputFacts
from ._facts import TokenFileFacts as TokenFileFacts
from ._facts import read_facts as read_facts
from ._files import data_identity as data_identity
from ._files import identity_difference as identity_difference
from ._idx import write_images as write_images
from ._images import ImageFiles as ImageFiles
from ._images import LabelledImages as LabelledImages
from ._open import Dataset as Dataset
from ._open import open_data as open_data
from ._rows import LineRows as LineRows
from ._rows import RegressionRows as RegressionRows
from ._sample_images import write_sample_images as write_sample_images
from ._split import ALL as ALL
from ._split import Rows as Rows
from ._split import Split as Split
from ._tokenize import tokenize as tokenize
from ._tokenizers import Tokenizer as Tokenizer
from ._tokenizers import open_tokenizer as open_tokenizer
from ._tokens import RandomTokens as RandomTokens
from ._tokens import TokenWindows as TokenWindows
