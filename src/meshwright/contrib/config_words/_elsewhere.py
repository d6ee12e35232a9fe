"""Find the key or the value that another program's name stands for (names_elsewhere.toml).

Used by: `_refusals`, `_option_hints`.
"""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path

from meshwright.config import POLICIES, RunConfig, variants

_HERE = Path(__file__).parent


@functools.cache
def names_elsewhere() -> tuple[dict[str, list[str]], dict[str, dict[str, str]]]:
    """Return other programs' names for each key, and their names for its values."""
    tables = tomllib.loads((_HERE / "names_elsewhere.toml").read_text("utf-8"))
    tables["values"]["remat"] |= {name: policy.elsewhere for name, policy in POLICIES.items()}
    keys = {key: names.split() for key, names in tables["keys"].items()}
    values = {
        key: {name: value for value, names in of_key.items() for name in names.split()}
        for key, of_key in tables["values"].items()
    }
    optimizers = variants("optimizer")[1].items()
    values["optimizer.kind"] = {
        name: kind for kind, record in optimizers for name in str(getattr(record, "elsewhere", "")).split()
    }
    return keys, values


def keys_meant(name: str) -> list[str]:
    """Return the dotted keys that another program calls `name`, in the order of the table."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.strip("-")).lower().replace("-", "_")
    return [key for key, names in names_elsewhere()[0].items() if plain in names]


def keys_named(name: str) -> list[str]:
    """Return the dotted keys that a `name` means, another program's or the last part of a key of ours."""
    return keys_meant(name) or paths_ending_in(name.replace("-", "_"))


def value_meant(key: str, value: str) -> str | None:
    """Return the value of `key` that another program writes as `value`, or None."""
    plain = value.lower().replace("_", "-").removeprefix("torch.").removeprefix("jnp.")
    return names_elsewhere()[1].get(key, {}).get(plain)


def paths_ending_in(key: str) -> list[str]:
    """Return the paths of `key` in a run and in all kinds of its sections."""
    records = {name: variants(name)[1] for name in RunConfig.model_fields if name != "name"}
    plain = [key] if key in records and not records[key] else []
    owners = (name for name, kinds in records.items() if any(key in r.model_fields for r in kinds.values()))
    return [*plain, *(f"{owner}.{key}" for owner in owners)]
