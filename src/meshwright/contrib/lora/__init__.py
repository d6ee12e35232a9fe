"""Train low-rank adapters beside frozen products (LoRA), which may be held in four bits (QLoRA).

Imports: `config`, `trainer.models`, `trainer.step`, jax. Used by: `config` and `trainer`, by the
entry point, for a run with adapters; `contrib.huggingface`, `contrib.gate`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: a configuration's checks need no jax
    from ._adapted_products import TARGETS as TARGETS
    from ._adapted_products import adapted_products as adapted_products
    from ._adapted_products import block_problems as block_problems
    from ._adapted_products import lora_problems as lora_problems
    from ._adapted_products import num_adapter_parameters as num_adapter_parameters
    from ._adapted_products import target_problems as target_problems
    from .adapters import adapter_declarations as adapter_declarations
    from .adapters import apply_adapter as apply_adapter
    from .adapters import with_adapters as with_adapters
    from .quantised import CODES as CODES
    from .quantised import NF4 as NF4
    from .quantised import SCALES as SCALES
    from .quantised import dequantised as dequantised
    from .quantised import dequantised_array as dequantised_array
    from .quantised import frozen_declarations as frozen_declarations
    from .quantised import frozen_parameters as frozen_parameters
    from .quantised import matrix_of as matrix_of
    from .quantised import projected_by_codes as projected_by_codes
    from .quantised import quantised_part as quantised_part
    from .quantised import to_codes as to_codes

__getattr__, __dir__ = names_on_first_use(__name__)
