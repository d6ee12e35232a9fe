"""Count what an eager training step of a PyTorch module costs, on one device or on a mesh, from fake tensors.

Imports: `compiler` (to find a function by name), `ledger` (its records), `hlo` (mesh axes), `hardware`,
`config`, `children`, `records`, `formats`, `units`, `errors`; torch, and the modules that need it, only
inside functions.
Used by: `results`, `report`, `api`, `cli`, and users as `mw.account_torch` and `mw.weigh`.
"""

from ._account import Account as Account
from ._account import FlopCount as FlopCount
from ._account import MemoryCount as MemoryCount
from ._account import ModuleCount as ModuleCount
from ._account import Table as Table
from ._account import account_function as account_function
from ._account import account_torch as account_torch
from ._account import flop_table as flop_table
from ._account import is_torch_module as is_torch_module
from ._account import memory_table as memory_table
from ._account import module_table as module_table
from ._account import require_torch as require_torch
from ._account import unknown_table as unknown_table
from ._apart import account_named as account_named
from ._records import MeshAccount as MeshAccount
from ._records import RankCount as RankCount
from ._records import RankMessage as RankMessage
