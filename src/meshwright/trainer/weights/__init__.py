"""Convert parameters between our arrays and the files of Hugging Face models.

Imports: `config`, `errors`, numpy. No jax. Used by: `training` and `checkpoint`.
"""

from ._weight_files import WeightFiles as WeightFiles
from ._weight_files import write_file as write_file
from ._weight_files import write_files as write_files
from ._weight_names import Weight as Weight
from ._weight_names import from_huggingface as from_huggingface
from ._weight_names import joined_weight as joined_weight
from ._weight_names import part_of as part_of
from ._weight_names import places_of as places_of
from ._weight_names import to_huggingface as to_huggingface
from ._weight_names import weights_of as weights_of
