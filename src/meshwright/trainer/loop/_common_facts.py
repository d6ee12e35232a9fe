"""State what all processes of a run must have in common: settings, files and software.

`launch.agreed` compares these facts. Counted: the config, the call's arguments, flags of XLA, settings of jax
that change a program, the content of the data, the tokenizer and the weights to begin with, versions, and
Meshwright's own sources. Not counted: what a process may have of its own, such as its devices, the place of
its copy of the data, and where files are dumped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.compiler import STEP_ROOMS, digest_of_sources, installed_versions, user_flags
from meshwright.config import InstructionData, RunConfig
from meshwright.trainer.checkpoint import Found
from meshwright.trainer.data import data_identity, files_identity
from meshwright.trainer.launch import Facts

from ._programs import Programs
from ._run_folder import flat

JAX_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion", "jax_debug_nans",
)  # fmt: skip
ROOMS = (*STEP_ROOMS, "images", "texts", "trained")
SOURCES = ("compiler", "config", "sharding.py", "trainer", *(f"contrib/{name}" for name in ROOMS))
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DIGITS = 16  # of a hash in a message


def facts_of_run(config: RunConfig, call: Mapping[str, Any], begin_from: Path | None) -> Facts:
    """Return what the processes of a run must have in common before it begins.

    Args:
        call: the other arguments of the call, by name.
        begin_from: the folder of the weights to begin with.

    Raises:
        InputError: a file of the data cannot be read.
    """
    import jax

    versions = installed_versions()
    python = ".".join(versions["python"].split(".")[:2])
    files = _files(config, begin_from)
    settings = {name: value for name, value in call.items() if value is not None}
    settings |= flat(config.model_dump(mode="json"))
    settings |= {f"XLA_FLAGS --{name}": value for name, value in user_flags().items()}
    settings |= {name: str(getattr(jax.config, name)) for name in JAX_SETTINGS}
    return {
        "settings": {name: value for name, value in settings.items() if name not in files},
        "files": {f"the content of {name}": words for name, words in files.items()},
        "software": {
            **{f"the version of {name}": version for name, version in {**versions, "python": python}.items()},
            "the digest of Meshwright's sources": digest_of_sources(SOURCES)[:DIGITS],
        },
    }


def facts_of_programs(programs: Programs, layout: str, resumed: Found | None, *, is_same: bool) -> Facts:
    """Return what the processes of a run must have in common before the first step.

    Args:
        resumed: the checkpoint from which the run continues.
        is_same: whether the processes trace the same program: one that times kernels writes them to a file.
    """
    begins = {} if resumed is None else {"the checkpoint to resume from": resumed.step}
    traced = {"the digest of the traced step": programs.traced[:DIGITS]} if is_same else {}
    return {"settings": {"layout": layout, **begins}, "software": traced}


def _files(config: RunConfig, begin_from: Path | None) -> dict[str, str]:
    """Describe the content of the files that a run reads, by the setting that names them."""
    identities = {}
    if (data := data_identity(config)) is not None:
        own = next((name for name in ("path", "folder") if hasattr(config.data, name)), "source")
        identities[f"data.{own}"] = data
    if isinstance(config.data, InstructionData) and Path(config.data.tokenizer).is_dir():
        folder = Path(config.data.tokenizer)
        paths = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
        identities["data.tokenizer"] = files_identity(str(folder), paths)
    if begin_from is not None and begin_from.is_dir():
        paths = sorted([*begin_from.glob("*.safetensors"), *begin_from.glob("*.json")])
        identities["begin_from"] = files_identity(str(begin_from), paths)
    return {
        name: f"{identity['num_bytes']:,} bytes with SHA-256 {identity['sha256'][:DIGITS]}"
        for name, identity in identities.items()
    }
