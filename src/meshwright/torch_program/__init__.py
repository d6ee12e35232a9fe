"""A PyTorch module's training loss and step as a JAX program.

Imports: `torch_account` (fake tensors), `models` (cuDNN's attention), `sharding`. Imported by: `api` and
`tools`, when such a program is asked for: `_export` imports torch.
"""

from ._module import JaxModule as JaxModule
from ._program import Program as Program
from ._program import Runner as Runner
from ._step import Step as Step
from ._step import attention_on as attention_on
from ._step import optimizer_named as optimizer_named
