"""Convert parameters between our arrays and the files of Hugging Face models.

Imports: `config`, `errors`, numpy. No jax. Used by: `training` and `checkpoint`.
"""

from ._files import WeightFiles as WeightFiles
from ._files import write_file as write_file
from ._files import write_files as write_files
from ._huggingface import Weight as Weight
from ._huggingface import from_huggingface as from_huggingface
from ._huggingface import joined_weight as joined_weight
from ._huggingface import part_of as part_of
from ._huggingface import places_of as places_of
from ._huggingface import to_huggingface as to_huggingface
from ._huggingface import weights_of as weights_of
