"""Read conversations, turn them into tokens with a mask of answers, and pack them into windows.

A file holds one JSON object per line, in one of three forms: `messages`, a list of objects with `role` and
`content`; `instruction` and `output`, perhaps with `input`, which are read as two messages; or `prompt` and
`completion`, two texts that follow each other as they are. Messages pass through the tokenizer's own chat
template (`_templates`).

What is an answer: the messages of the role `assistant`, with whatever the template ends them by; a completion
and the token that ends it. The template is asked twice for each answer, up to its beginning and up to its
end; a template whose text does not grow so is refused.

Packing: conversations in an order that depends on the seed, as many in a window as have room, none divided.
What is left of a window holds padding, a document of its own. Everything is held in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.config import InstructionData
from meshwright.errors import InputError
from meshwright.files import open_file, parsed_json, read_json, reason
from meshwright.trainer.data import ALL, BYTES, NUM_BYTES, Rows, Split, windows_at

from ._templates import ChatTemplate, template_text
from ._texts import MOST_LINE_BYTES, FileTokenizer, Tokenizer, open_tokenizer

Span = tuple[int, int]  # of the characters of an answer
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The tokens of one line, and which of them are to be predicted."""

    tokens: np.ndarray
    answers: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A tokenizer with the chat template and special tokens of its model's folder.

    `template`: renders messages; None if there is none.
    `end`: the id that ends a completion.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    end: int

    def conversation(self, record: Mapping[str, Any], where: str) -> Conversation:
        """Return the tokens of one line.

        Raises:
            InputError: the line has none of the three forms, no answer, or messages without a template.
        """
        if "prompt" in record and "completion" in record:
            prompt, completion = (_text(record, key, where) for key in ("prompt", "completion"))
            plain = self._encoded(prompt + completion, [(len(prompt), len(prompt + completion))])
            ended = np.append(plain.tokens, np.int32(self.end)), np.append(plain.answers, np.int32(1))
            return Conversation(tokens=ended[0], answers=ended[1])
        return self._encoded(*self._rendered(_messages(record, where), where))

    def _rendered(self, messages: list[Mapping[str, Any]], where: str) -> tuple[str, list[Span]]:
        """Return the text of messages, and the places of its answers."""
        if self.template is None:
            raise InputError(
                f"{where}: messages need a chat template, and {self.name} has none",
                hint="name the folder of a model that was made for conversations with data.tokenizer, or use "
                "lines of prompt and completion",
            )
        answers = [place for place, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not answers:
            raise InputError(
                f"{where}: no message is of the role {ASSISTANT!r}, so there is no answer to learn",
                hint="leave the line out",
            )
        parts = [each for place in answers for each in ((place, True), (place + 1, False))]
        whole, *texts = self.template.texts(messages, [(len(messages), False), *parts])
        spans: list[Span] = []
        for place, before, until in zip(answers, texts[::2], texts[1::2], strict=True):
            if not (until.startswith(before) and whole.startswith(until)):
                raise InputError(
                    f"{where}: the chat template of {self.name} writes message {place + 1} differently "
                    "when others follow it, so that its answer cannot be found in the text",
                    hint="leave the line out, or divide it so that its last message alone is an answer",
                )
            spans.append((len(before), len(until)))
        if all(first == last for first, last in spans):
            raise InputError(
                f"{where}: the chat template of {self.name} writes nothing for its answers",
                hint="leave the line out if they are empty; else name the folder of another model",
            )
        return whole, spans

    def _encoded(self, text: str, spans: list[Span]) -> Conversation:
        """Return the tokens of a text, and marks at those that begin within a span."""
        if isinstance(self.tokenizer, FileTokenizer):
            tokens, starts = self.tokenizer.placed(text)
        else:
            tokens = self.tokenizer.encode([text])[0].astype(np.int32)
            each = [len(character.encode()) for character in text]
            starts = np.repeat(np.arange(len(text)), each)
        answers = np.zeros(len(tokens), np.int32)
        for first, last in spans:
            answers[(starts >= first) & (starts < last)] = 1
        return Conversation(tokens=tokens, answers=answers)


def _messages(record: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not all(
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and isinstance(each.get("content"), str)
            for each in messages
        ):
            raise InputError(
                f"{where}: 'messages' is no list of objects with a role and a content, both text",
                hint='write {"messages": [{"role": "user", "content": "..."}, ...]}',
            )
        return messages
    if "instruction" in record and "output" in record:
        asked = _text(record, "instruction", where)
        if record.get("input"):
            asked += "\n\n" + _text(record, "input", where)
        answer = _text(record, "output", where)
        return [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": answer}]
    keys = ", ".join(list(record)[:6]) or "none"
    raise InputError(
        f"{where}: neither messages, nor prompt and completion, nor instruction and output; its keys: {keys}",
        hint="write each line in one of these forms",
    )


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(record[key], str):
        raise InputError(
            f"{where}: {key!r} is {json.dumps(record[key])[:40]}, not text", hint="correct the line"
        )
    return record[key]


def open_codec(name: str) -> Codec:
    """Open "bytes", or the tokenizer of a model's folder, which holds `tokenizer.json`.

    The template is in `chat_template.jinja`, or under `chat_template` in `tokenizer_config.json`; the token
    that ends a text is `eos_token` there. With bytes, id 256 ends a completion, and there is no template.

    Raises:
        InputError: a file is missing or cannot be read, or names no token that ends a text.
    """
    if name == BYTES:
        return Codec(name=name, tokenizer=open_tokenizer(BYTES), template=None, end=NUM_BYTES)
    folder = Path(name)
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    settings, special = _settings_of(path)
    if "eos_token" not in special:
        raise InputError(
            f"{path} names no eos_token, which ends an answer", hint="set it there, as the model was trained"
        )
    text = template_text(folder, settings)
    template = None if text is None else ChatTemplate(text, special, folder)
    return Codec(
        name=name, tokenizer=tokenizer, template=template, end=tokenizer.end_of_document(special["eos_token"])
    )


def end_token(name: str) -> str | None:
    """Return the token that ends a text, or its id as text: 256 with bytes; None if no file beside says it.

    Args:
        name: "bytes", a `tokenizer.json` or its folder.

    Raises:
        InputError: the settings beside the tokenizer cannot be read.
    """
    if name == BYTES:
        return str(NUM_BYTES)
    path = (Path(name) if Path(name).is_dir() else Path(name).parent) / "tokenizer_config.json"
    return _settings_of(path)[1].get("eos_token") if path.is_file() else None


def _settings_of(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of a tokenizer, and its special tokens by name.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        settings = read_json(path)
        if not isinstance(settings, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as broken:
        raise InputError(
            f"{path} cannot be read: {reason(broken)}", hint="name the folder of a model with its tokenizer"
        ) from broken
    tokens = {key: _token(settings[key]) for key in settings if key.endswith("_token")}
    return settings, {key: token for key, token in tokens.items() if token}


def _token(value: Any) -> str:
    """Return a special token's text: files give it as text or as an object with its `content`; "" if none."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def conversations_in(path: Path, codec: Codec) -> Iterator[tuple[str, Conversation]]:
    """Yield each line's conversation, with the file and line for errors.

    Raises:
        InputError: the file cannot be read, or a line is no conversation.
    """
    try:
        with open_file(path) as file:
            number = 0
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > MOST_LINE_BYTES:
                    raise ValueError(f"line {number} has more than {MOST_LINE_BYTES:,} bytes")
                if line.strip():
                    yield where, codec.conversation(_record(line, where), where)
    except (OSError, ValueError) as refused:
        raise InputError(
            f"cannot read {path}: {reason(refused)}", hint="name a file of JSON lines in UTF-8"
        ) from refused


def _record(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = parsed_json(line)
    except UnicodeDecodeError:
        raise
    except ValueError as wrong:
        raise InputError(f"{where}: not JSON: {wrong}", hint="correct the line, or take it out") from wrong
    if not isinstance(record, dict):
        raise InputError(
            f"{where}: a {type(record).__name__}, not an object", hint="correct the line, or take it out"
        )
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedConversations:
    """Windows of whole conversations, with marks at the tokens of answers.

    `windows`: for each split `tokens`, `segments` and `answers`, each int32 [windows, sequence_length + 1].
    Padding has the id 0 and the last segment of its window. Windows come in epochs, each in its own order.
    """

    windows: Mapping[Split, Mapping[str, np.ndarray]]
    seed: int
    sequences: int

    def num_windows(self, split: Split) -> int:
        """Return the number of windows in one epoch of a split."""
        return len(self.windows[split]["tokens"])

    def batch(self, step: int, split: Split, rows: Rows = ALL) -> dict[str, np.ndarray]:
        """Return `tokens`, `segments` and `answers` int32 [rows, sequence_length + 1]."""
        first, size = step * self.sequences, self.num_windows(split)
        chosen = windows_at(first, self.sequences, size=size, seed=self.seed, split=split)[rows]
        return {name: array[chosen] for name, array in self.windows[split].items()}


def open_instructions(
    data: InstructionData, *, seed: int, sequences: int, sequence_length: int, vocab_size: int
) -> PackedConversations:
    """Read, tokenize and pack the conversations of a file.

    Raises:
        InputError: a line is no conversation or too long, a token is outside the vocabulary, or a split is
            empty.
    """
    codec = open_codec(data.tokenizer)
    window = sequence_length + 1
    found: dict[Split, list[Conversation]] = {"train": [], "held-out": []}
    for number, (where, each) in enumerate(conversations_in(Path(data.path), codec)):
        if len(each) > window and data.too_long == "refuse":
            raise InputError(
                f"{where}: its {len(each)} tokens are longer than a window of {window} (sequence_length + 1)",
                hint=f'use batch.sequence_length = {len(each) - 1}, or data.too_long = "leave-out"',
            )
        if len(each) > window:
            continue
        if len(each) and int(each.tokens.max()) >= vocab_size:
            raise InputError(
                f"{where}: holds token {int(each.tokens.max())}, outside model.vocab_size = {vocab_size}",
                hint=f"use the model's own tokenizer, or at least model.vocab_size = {each.tokens.max() + 1}",
            )
        if data.loss_on == "all":
            each = Conversation(tokens=each.tokens, answers=np.ones_like(each.answers))
        held_out = _is_held_out(number, data.held_out_fraction)
        found["held-out" if held_out else "train"].append(each)
    for split, conversations in found.items():
        if not conversations:
            raise InputError(
                f"{data.path}: no conversation is left for the {split} part",
                hint="use more lines, or another data.held_out_fraction",
            )
    windows: dict[Split, Mapping[str, np.ndarray]] = {
        split: _packed(each, window, seed, split) for split, each in found.items()
    }
    return PackedConversations(windows=windows, seed=seed, sequences=sequences)


def _is_held_out(number: int, fraction: float) -> bool:
    """Return whether a line, counted from 0, is kept for evaluation: a share of every stretch of lines."""
    return int((number + 1) * fraction) > int(number * fraction)


def _packed(
    conversations: Sequence[Conversation], window: int, seed: int, split: Split
) -> dict[str, np.ndarray]:
    """Return conversations in windows: each in the last window if it has room, else in a new one."""
    order = windows_at(0, len(conversations), size=len(conversations), seed=seed, split=split)
    rows: list[list[Conversation]] = []
    room = 0
    for place in order.tolist():
        each = conversations[place]
        if len(each) > room:
            rows.append([])
            room = window
        rows[-1].append(each)
        room -= len(each)
    arrays = {name: np.zeros((len(rows), window), np.int32) for name in ("tokens", "segments", "answers")}
    for number, row in enumerate(rows):
        start = 0
        for segment, each in enumerate(row):
            stop = start + len(each)
            arrays["tokens"][number, start:stop] = each.tokens
            arrays["answers"][number, start:stop] = each.answers
            arrays["segments"][number, start:stop] = segment
            start = stop
        arrays["segments"][number, start:] = len(row)
    return arrays
