"""A program compiled for a fleet that may not exist: the record, its folder, the cache, the worker.
Imports: `config`, `hardware`. jax only inside the worker process. Imported by: `ledger`, `sharding`, `api`.
"""

from ._cache import cache_root as cache_root
from ._cache import writing_cache as writing_cache
from ._executables import keep_executables as keep_executables
from ._functions import USERS_FAILURES as USERS_FAILURES
from ._functions import find_function as find_function
from ._functions import needs as needs
from ._modules import module_of as module_of
from ._modules import shares_of as shares_of
from ._options import accepted_options as accepted_options
from ._options import requested_options as requested_options
from ._record import Argument as Argument
from ._record import Compiled as Compiled
from ._record import CorruptFolder as CorruptFolder
from ._record import TracedFlops as TracedFlops
from ._record import read_text as read_text
from ._request import Request as Request
from ._request import fingerprint_of as fingerprint_of
from ._request import installed_versions as installed_versions
from ._run import compile_program as compile_program
from ._sharding_errors import Surroundings as Surroundings
from ._sharding_errors import sharding_error as sharding_error
