"""Weigh a job before its launch: `meshwright gate`.

It reads what people launch with (sbatch, Kubernetes, SkyPilot) and what they train with (torchtitan, axolotl,
LLaMA-Factory, TrainingArguments, Megatron-LM), each by one reader with one table of keys in `tables/`. Files
are data: nothing of them is executed. Imports: all of the core. Used by: users, a SkyPilot admin policy
(`skypilot.py`), and a cli_filter of Slurm (`cli_filter.lua`).
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:
    from ._gate import Gate as Gate
    from ._gate import Limits as Limits
    from ._gate import gate as gate
    from ._trainers import Reading as Reading

__getattr__, __dir__ = names_on_first_use(__name__)
