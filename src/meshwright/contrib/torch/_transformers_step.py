"""Weigh a Hugging Face model as the PyTorch module that `transformers` makes of its `config.json`.

This is the way of a family that has no table in `config`, and of any other with `as_="torch"`. No code of the
model's repository is run. No torch: `_transformers_module` makes the module, in a process of its own.
Used by: `_kind`, `_torch_step`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.config import Overrides
from meshwright.contrib.hub import LONGEST_SEQUENCE, check_heads, huggingface_model, refusal_of, text_part
from meshwright.errors import InputError, nearest_name
from meshwright.extras import check_installed
from meshwright.hardware import Fleet
from meshwright.programs import RunFacts, Settings, knobs_of
from meshwright.results import Weighing

from ._torch_step import TorchStep

MAKER = "meshwright.contrib.torch._transformers_module:causal_model"
LENGTH, SEQUENCES, CHECKPOINTS = "batch.sequence_length", "batch.microbatch_sequences", "remat"
OWN_KEYS = {LENGTH: "sequence_length", SEQUENCES: "microbatch_sequences", CHECKPOINTS: "remat"}
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
MOST_CHARACTERS = 2**20  # of a config.json; those of published models have up to 60,000
MOST_TOKENS = 2**24  # of one device
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersStep(TorchStep):
    """The training step of the module that `transformers` makes of a `config.json`.

    Args:
        model: the folder, file or id that names it.
        where: its file, for errors.
        keys: its `config.json`, or the text part of it.
        reason: why it is not a configuration of ours; "" if that was not asked.
        unread: the keys that our reader did not understand.
        is_text_part: whether the file has other parts too, which are left out.
    """

    function: str = MAKER
    model: str
    where: str
    keys: Mapping[str, Any] = field(repr=False)
    reason: str
    unread: tuple[str, ...] = ()
    is_text_part: bool = False

    @property
    def name(self) -> str:
        """The folder, file or id that names the model."""
        return self.model

    def knobs(self, overrides: Overrides) -> dict[str, str]:
        """Return the arguments of the function that makes the module, from keys of a run.

        Raises:
            InputError: a key is given that this kind of program does not have.
        """
        given = knobs_of(overrides)
        for key in given:
            if key not in OWN_KEYS:
                raise InputError(
                    f"{self.model} is weighed as a PyTorch module, and takes no {key}",
                    hint=f"{nearest_name(key, OWN_KEYS)}; sizes of the model are those of its config.json",
                )
        knobs = {OWN_KEYS[key]: value for key, value in given.items()}
        knobs.setdefault("sequence_length", str(self._usual_length()))
        knobs |= {"config": json.dumps(self.keys), "where": self.where}
        return knobs | {"unread": ",".join(self.unread)}

    def _usual_length(self) -> int:
        limits = [self.keys.get(key) for key in LIMITS]
        return min([LONGEST_SEQUENCE, *(each for each in limits if isinstance(each, int) and each > 0)])

    def facts(self, settings: Settings, num_ranks: int) -> RunFacts:
        """Return the tokens of a step, which are known unless they are given, and the steps of the run."""
        length, sequences = self._batch(settings.overrides)
        run = settings.run
        if run.tokens_per_step is None:
            run = dataclasses.replace(run, tokens_per_step=length * sequences * num_ranks)
        return run.facts(self.model)

    def _batch(self, overrides: Overrides) -> tuple[int, int]:
        """Return the length of a sequence, and how many of them one device has."""
        knobs = self.knobs(overrides)
        sizes = {key: knobs.get(OWN_KEYS[key], "1") for key in (LENGTH, SEQUENCES)}
        for key, text in sizes.items():
            if not text.isdecimal() or not 0 < int(text) <= MOST_TOKENS:
                raise InputError(f"{key} = {text[:40]!r}", hint=f"write a number from 1 to {MOST_TOKENS}")
        length, sequences = int(sizes[LENGTH]), int(sizes[SEQUENCES])
        if length * sequences > MOST_TOKENS:
            what = f"{sequences} sequences of {length:,} tokens on one device"
            raise InputError(what, hint=f"at most {MOST_TOKENS:,} tokens are weighed")
        return length, sequences

    def weigh(self, fleet: Fleet, settings: Settings) -> Weighing:
        """Run the step of a rank on fake tensors, and say that this is how the model was weighed, and why."""
        length, sequences = self._batch(settings.overrides)
        made = TorchStep.weigh(self, fleet, settings)
        kind = next(each.kind for each in made.account.modules if not each.scope)
        words = f"Weighed as {kind} of transformers, a PyTorch module: {self.reason}"
        each = "one sequence" if sequences == 1 else f"{sequences} sequences"
        says = [f"Each device has {each} of {length:,} tokens: --set {LENGTH}=..., --set {SEQUENCES}=..."]
        says += [f"Blocks keep what autograd saves, unless --set {CHECKPOINTS}=full"]
        stored = self.keys.get("dtype") or self.keys.get("torch_dtype") or "bfloat16"
        says += [f"AdamW, and parameters in the format of the file, or else in bfloat16: {stored}"]
        says += ["The text part of the model alone"] * self.is_text_part
        ledger = dataclasses.replace(made.ledger, assumptions=(*says, *made.ledger.assumptions))
        return dataclasses.replace(
            made, figures=ledger, warnings=(*made.warnings, words) if self.reason else made.warnings
        )


def transformers_step(text: str, *, is_asked_for: bool = True) -> TransformersStep:
    """Return the step of the module that `transformers` makes of a Hugging Face model.

    Args:
        text: the folder of a model, its `config.json`, or an id, as for `load_config`.
        is_asked_for: whether the user chose this way; if not, the result says why it was taken, and keys that
            neither our reader nor `transformers` understands are refused.

    Raises:
        InputError: it names no such model, or one that does not predict the next token; the file is too
            large; or a package is not installed.
    """
    found = huggingface_model(text)
    if found is None:
        raise InputError(
            f"{text[:100]!r} names no Hugging Face model",
            hint="name a folder with a config.json, or write package.module:function",
        )
    where, tree = found
    if len(json.dumps(tree)) > MOST_CHARACTERS:
        what = f"{where} has more than {MOST_CHARACTERS:,} characters"
        raise InputError(what, hint="keep the keys that say what the model is")
    keys = text_part(tree)
    if keys is tree:
        check_heads(tree, where)
    if not isinstance(keys.get("model_type"), str):
        raise InputError(f"{where}: its text_config has no model_type", hint="add it to the file")
    refused = None if is_asked_for else refusal_of(tree, where)
    reason = "" if refused is None else refused.message.removeprefix(f"{where}: ")
    module = "the module that transformers makes of the file"
    check_installed(
        "huggingface", PACKAGES, f"{where}: {reason}; {module}" if reason else f"{where}: {module}"
    )
    return TransformersStep(
        model=text,
        where=where,
        keys=keys,
        reason=reason,
        unread=() if refused is None else refused.keys,
        is_text_part=keys is not tree,
    )
