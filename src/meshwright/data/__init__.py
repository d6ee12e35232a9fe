"""What a run reads: batches of the whole fleet as numpy arrays, a pure function of seed and step.
Imports: `config`, `errors`, numpy. No jax. Imported by: `training`, `api`.
"""

from ._images import LabelledImages as LabelledImages
from ._open import Dataset as Dataset
from ._open import open_data as open_data
from ._rows import LineRows as LineRows
from ._rows import RegressionRows as RegressionRows
from ._tokens import RandomTokens as RandomTokens
from ._tokens import TokenWindows as TokenWindows
