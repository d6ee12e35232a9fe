"""Compile a program for a fleet that may not exist: the request, the worker, the record and the cache.

Imports: `sandbox`, `subprocesses`, `errors`. jax is imported only in the worker process. Used by: `ledger`,
`predict`, `measure`, `worker`, `trainer.loop`, `results`, `kept_records`, `programs`, `report`, `api`, `cli`.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import names_on_first_use

if TYPE_CHECKING:  # imported on first use: most of a command's names need few of these modules
    from ._cache import JAX_CACHE_FOLDER as JAX_CACHE_FOLDER
    from ._cache import cache_lock as cache_lock
    from ._cache import cache_root as cache_root
    from ._cache import cached_program as cached_program
    from ._cache import is_compiled as is_compiled
    from ._cache import keep_beside as keep_beside
    from ._cache import keep_executables as keep_executables
    from ._cache import keep_program as keep_program
    from ._cache import kept_beside as kept_beside
    from ._cache import limit_bytes as limit_bytes
    from ._cache import make_folder as make_folder
    from ._cache import making_program as making_program
    from ._cache import others_who_write as others_who_write
    from ._cache import processor_digest as processor_digest
    from ._cache import program_folder as program_folder
    from ._cache import write_cached as write_cached
    from ._cache import writing_cache as writing_cache
    from ._compile_process import compile_program as compile_program
    from ._compile_process import compiling_until as compiling_until
    from ._compile_process import declared_by as declared_by
    from ._compile_process import warm_workers as warm_workers
    from ._fingerprint import fingerprint_of as fingerprint_of
    from ._kernel_calls import FOREIGN as FOREIGN
    from ._kernel_calls import MAPPED as MAPPED
    from ._kernel_calls import PALLAS as PALLAS
    from ._kernel_calls import KernelCall as KernelCall
    from ._kernel_calls import KernelFlops as KernelFlops
    from ._kernel_calls import register_kernel as register_kernel
    from ._kernel_calls import registered_rule as registered_rule
    from ._options import OPTIONS as OPTIONS
    from ._options import AcceptedOptions as AcceptedOptions
    from ._options import Autotuning as Autotuning
    from ._options import CompilerOption as CompilerOption
    from ._options import OptionValue as OptionValue
    from ._options import accepted_options as accepted_options
    from ._options import check_refused_results as check_refused_results
    from ._options import loading_results as loading_results
    from ._options import read_autotune_results as read_autotune_results
    from ._options import requested_options as requested_options
    from ._options import user_flags as user_flags
    from ._options import writing_results as writing_results
    from ._record import ANSWER as ANSWER
    from ._record import PID_FILE as PID_FILE
    from ._record import QUESTION as QUESTION
    from ._record import SCHEMA as SCHEMA
    from ._record import SIMULATED as SIMULATED
    from ._record import STATUS_FILE as STATUS_FILE
    from ._record import STDERR_FILE as STDERR_FILE
    from ._record import STEP_ROOMS as STEP_ROOMS
    from ._record import TARGET_COMPILER as TARGET_COMPILER
    from ._record import TEXTS as TEXTS
    from ._record import Argument as Argument
    from ._record import Compiled as Compiled
    from ._record import CorruptFolder as CorruptFolder
    from ._record import NamedKernel as NamedKernel
    from ._record import Refusal as Refusal
    from ._record import Request as Request
    from ._record import Routing as Routing
    from ._record import RulesFile as RulesFile
    from ._record import TakesNoMesh as TakesNoMesh
    from ._record import TracedFlops as TracedFlops
    from ._record import digest_of_sources as digest_of_sources
    from ._record import installed_versions as installed_versions
    from ._record import read_text as read_text
    from ._refusal import RefusedForMemory as RefusedForMemory
    from ._refusal import figures_of as figures_of

__getattr__, __dir__ = names_on_first_use(__name__)
