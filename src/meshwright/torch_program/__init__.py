"""A PyTorch module's training loss and step as a JAX program.

Imports: `torch_account` (fake tensors), `models` (cuDNN's attention), `sharding`. Imported by: `api` and
`tools`, when such a program is asked for: `_export` imports torch.
"""

from ._module import JaxModule as JaxModule
from ._program import GraphRunner as GraphRunner
from ._program import ModuleProgram as ModuleProgram
from ._step import ModuleStep as ModuleStep
from ._step import attention_on as attention_on
from ._step import optimizer_named as optimizer_named
