"""Find the model that a text names: in a folder, in the local cache of Hugging Face, or among the published.

Used by: `config`, by the entry point; `contrib.torch`, which weighs what our configuration has no words for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.config import RUN_FILE, is_huggingface, is_own_configuration, is_table
from meshwright.files import read_json

from ._families import FURTHER, QUANTISED
from ._huggingface_config import family_of, reads_text_alone, refusal_of, run_of_huggingface, text_part
from ._published import published_config, published_id
from ._rotary_keys import DYNAMIC, has_alpha, stretching_of


def huggingface_model(text: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the file, or the id, and the keys of the Hugging Face model that a text names.

    None if it names something else, or what cannot be read.

    >>> where, tree = huggingface_model("qwen2.5-7b")
    >>> where, tree["model_type"]
    ('Qwen/Qwen2.5-7B', 'qwen2')
    """
    if is_own_configuration(text):
        return None
    path = Path(text)
    try:
        if not path.exists() and "/" in text:
            path = cached_config(text) or path
        if path.exists():
            file = path / RUN_FILE if path.is_dir() else path
            tree = read_json(file) if file.suffix == ".json" else None
            return (str(file), tree) if is_table(tree) and is_huggingface(tree) else None
    except (OSError, ValueError):
        return None
    published = published_id(text)
    return None if published is None else (published, published_config(published))


def cached_config(name: str) -> Path | None:
    """Return the `config.json` of "organisation/model" in the local Hugging Face cache, or None.

    The cache is at `HF_HUB_CACHE`, or below `HF_HOME`, or in the user's cache folder, as `huggingface_hub`
    has it. Nothing is downloaded.
    """
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    root = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    folder = root / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs/main").read_text().strip()
    except (OSError, ValueError):
        return None
    path = folder / "snapshots" / revision / "config.json"
    return path if path.is_file() else None


def run_of_published(text: str) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the tree of the run of a published model; None if the text names none."""
    if (published := published_id(text)) is None:
        return None
    return published.rpartition("/")[2], run_of_huggingface(published_config(published), published)


def run_of_file(tree: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the tree of the run that a model's `config.json` describes.

    Raises:
        InputError: as for `run_of_huggingface`.
    """
    text = "-text" if reads_text_alone(tree) else ""
    return f"{path.resolve().parent.name}{text}", run_of_huggingface(tree, str(path))


def is_refused(text: str) -> bool:
    """Return whether a text names a Hugging Face model that our configuration has no words for."""
    found = huggingface_model(text)
    return found is not None and refusal_of(found[1], found[0]) is not None


def text_reading(text: str) -> str:
    """Return what of a model's file is read as another's, or left out; "" if it is read as it stands.

    That is the text part of a model that reads more, the family of the class that a file names, and modules
    that predict further tokens.

    Args:
        text: as for `load_config`. What cannot be read is an error there.
    """
    found = huggingface_model(text)
    if found is None:
        return ""
    (_, tree), notes = found, list[str]()
    own, whole = tree["model_type"], tree
    if reads_text_alone(tree):
        tree = text_part(tree)
        kind = tree.get("model_type") or family_of(tree)
        notes.append(f"a {own} reads more than text; its text part, a {kind}, is taken")
    elif (family := family_of(tree)) not in (own, None):
        notes.append(f"model_type {own[:100]!r} is read as {family}, whose class its architectures name")
    for key in (key for key in FURTHER if tree.get(key) and family_of(tree) is not None):
        what = f"modules that predict further tokens ({key} = {tree[key]}) are left out, as in transformers"
        notes.append(f"{what}, but for those that you train: --set model.mtp_layers={tree[key]}")
    if stretching_of(tree) == DYNAMIC and not has_alpha(tree) and family_of(tree) is not None:
        notes.append("dynamic stretching of positions begins beyond max_position_embeddings, and is left out")
    for key in (key for key in QUANTISED if whole.get(key) or tree.get(key)):
        notes.append(f"{key} is of the weights in the file: a step holds them in the formats of its own keys")
    return f"{text}: {'; '.join(notes)}" if notes else ""
