"""Read and write the weights of Hugging Face models, and adapters as PEFT holds them.

Imports: `config`, `trainer` (models, checkpoints), numpy. Registers the format of weights to begin with, and
two formats of `export`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use, by `__getattr__`: these import jax or numpy
    from ._export_model import export_huggingface as export_huggingface
    from ._exports import adapter_folder as adapter_folder
    from ._exports import model_folder as model_folder
    from ._first_weights import FirstWeights as FirstWeights
    from ._first_weights import base_of as base_of
    from ._peft import export_peft as export_peft
    from ._weight_files import WeightFiles as WeightFiles
    from ._weight_files import write_files as write_files
    from ._weight_names import Weight as Weight
    from ._weight_names import from_huggingface as from_huggingface
    from ._weight_names import to_huggingface as to_huggingface
    from ._weight_names import weights_of as weights_of

__getattr__, __dir__ = names_on_first_use(__name__)
