"""Make docs/reference/configuration.md of the texts below the configuration's keys.

A test compares the page with them; UPDATE_GOLDEN=1 writes it again.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

from meshwright.config import RunConfig, variants
from meshwright.contrib.config_words import names_elsewhere
from meshwright.contrib.key_docs import KeyDoc, key_docs, texts_of

WIDTH = 114  # columns
GROUPS = ("hidden matrices", "tables and heads", "norms and biases")
INTRO = """\
# Configuration

A run is a TOML file that states what differs from the defaults. It may start from a preset, and `--set`
changes single keys on the command line:

```toml
# file: wider.toml
preset = "bytes-nano"
[model]
embed_dim = 128
```

```sh
meshwright weigh wider.toml --on 8xCPU --set batch.sequences=16
```

`meshwright init` writes a file with every key and its meaning, and `meshwright presets NAME` prints a preset
that way. The word `"none"` stands for "not set". Weighing needs the sections `model`, `data`, `optimizer` and
`batch` alone; `train` needs `steps` as well, in the file or as `--steps`.

Whole numbers are at most 2,147,483,647.

This page is made from the text below each key in `src/meshwright/config`.
"""


def reference_page() -> str:
    """Return docs/reference/configuration.md: every key in tables, and the names that other programs use."""
    docs = key_docs()
    top = _table([doc for doc in docs if not doc.section])
    parts = [INTRO.strip(), "## Keys of the run", "They stand above the first section of a file.", top]
    for section in dict.fromkeys(doc.section for doc in docs if doc.section):
        parts += [f"## `[{section}]`", _fill(texts_of(RunConfig)[section])]
        if section == "optimizer":
            parts.append(_moments_table())
        for kind, record in variants(section)[1].items():
            if kind:
                parts += [
                    f"### `{section}.{variants(section)[0]} = {json.dumps(kind)}`",
                    _fill(record.__doc__ or ""),
                ]
            parts.append(_table([doc for doc in docs if (doc.section, doc.kind) == (section, kind)]))
    rows = [
        f"| `{key}` | {', '.join(f'`{n}`' for n in names)} |" for key, names in names_elsewhere()[0].items()
    ]
    parts += [
        "## Names elsewhere",
        _fill(
            "A key that no section has is refused. Where Hugging Face transformers, Megatron-LM, nanoGPT, "
            "torchtitan, PyTorch or common use have such a name, the message says which key is meant. A name "
            "may mean something slightly different there."
        ),
        "\n".join(["| key | names elsewhere |", "|---|---|", *rows]),
    ]
    return "\n\n".join(parts) + "\n"


def _moments_table() -> str:
    """Return the table of what each optimizer keeps, by default and with every setting that adds a moment."""
    rows = ["| `kind` | moments for each parameter | their names in the ledger |", "|---|---|---|"]
    records: dict[str, Any] = variants("optimizer")[1]
    for kind, record in records.items():
        given: dict[str, Any] = {"kind": kind, "learning_rate": 1.0}
        adding = {"momentum": 0.9, "centered": True}
        most = record(**given, **{key: value for key, value in adding.items() if key in record.model_fields})
        fewest, highest = _kept_words(record(**given)), _kept_words(most)
        counts = fewest if fewest == highest else f"{fewest}; at most {highest}"
        names = ", ".join(f"`{moment.name}`" for moment in most.moments())
        rows.append(f"| `{kind}` | {counts} | {names} |")
    return "\n".join(rows)


def _kept_words(optimizer: Any) -> str:
    """Return the numbers that an optimizer keeps for each parameter, in words."""
    if (alike := optimizer.kept_alike) is not None:
        return str(alike)
    kept = optimizer.numbers_kept()
    words = [f"{count} for {name}" for name, count in zip(GROUPS, kept.values(), strict=True) if count]
    sides = any(moment.each == "sides" for moment in optimizer.moments())
    return ", ".join([*words, *(["rows and columns of matrices"] if sides else [])])


def _fill(text: str) -> str:
    """Return the paragraphs of a description or docstring in lines of the page's width."""
    paragraphs = (re.sub(r"\s+", " ", each).strip() for each in text.split("\n\n"))
    return "\n\n".join(textwrap.fill(each, width=WIDTH, break_long_words=False) for each in paragraphs)


def _table(docs: list[KeyDoc]) -> str:
    rows = ["| key | values | default | unit | meaning and effect |", "|---|---|---|---|---|"]
    for doc in docs:
        default = doc.default or "must be given"
        if doc.default and "`" not in default:
            default = f"`{default}`"
        meaning = f"{doc.summary}. {doc.more}".strip()
        if doc.effect:
            meaning += f" *Effect:* {doc.effect}"
        cells = (f"`{doc.key}`", doc.values, default, doc.unit if doc.unit != "none" else "", meaning)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)
