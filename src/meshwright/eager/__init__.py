"""PyTorch modules accounted on one device, run eagerly: FLOPs and memory of one training step, from fake tensors.
Imports: `tables`, `units`, `formats`, `errors`; torch only when something is accounted.
Used by: `report`, `cli`, and users as `mw.account_torch`.
"""

from ._account import account_torch as account_torch
from ._records import Account as Account
from ._records import FlopCount as FlopCount
from ._records import MemoryCount as MemoryCount
from ._records import ModuleCount as ModuleCount
