"""Conversations become tokens, a mask of answers, and windows; what cannot be read is refused in words."""

import json

import numpy as np
import pytest

from meshwright.config import load_config
from meshwright.errors import InputError
from meshwright.trainer.data import open_data

CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|stop|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FORGETS = "{{ messages[-1]['content'] }}"
TALKS = [
    {"role": "system", "content": "You count."},
    {"role": "user", "content": "one, two?"},
    {"role": "assistant", "content": "three é"},
    {"role": "user", "content": "four?"},
    {"role": "assistant", "content": "five"},
]


def written(folder, *records):
    path = folder / "talks.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


@pytest.fixture
def model(tmp_path):
    """The folder of a tokenizer of bytes and a few words, with a chat template."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")

    def make(template=CHATML, **settings):
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=alphabet,
            special_tokens=["<|start|>", "<|stop|>"],
            show_progress=False,
        )
        made.train_from_iterator(["one two three four five assistant user system"] * 4, trainer)
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        made.save(str(folder / "tokenizer.json"))
        tree = {
            "eos_token": "<|stop|>",
            "chat_template": template,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps({**tree, **settings}))
        return folder

    return make


def config_for(path, tokenizer="bytes", *overrides, vocab_size=512):
    given = {
        "model.vocab_size": vocab_size,
        "batch.sequences": 2,
        "batch.sequence_length": 63,
        "model.loss_chunk": 63,
        "data.source": "instructions",
        "data.path": str(path),
        "data.tokenizer": str(tokenizer),
        "data.held_out_fraction": 0.5,
    }
    return load_config("bytes-nano", {**given, **dict(each.split("=", 1) for each in overrides)})


def answers_of(batch, row, segment):
    """The tokens that one conversation of a batch teaches, and all of its tokens."""
    own = batch["segments"][row] == segment
    return batch["tokens"][row][own & (batch["answers"][row] == 1)], batch["tokens"][row][own]


def test_only_answers_of_a_chat_are_marked(tmp_path, model):
    import tokenizers

    folder = model()
    data = open_data(config_for(written(tmp_path, {"messages": TALKS}, {"messages": TALKS}), folder))
    taught, whole = answers_of(data.batch(0, "train"), 0, 0)
    codec = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    decoded = codec.decode(taught.tolist(), skip_special_tokens=False)
    assert decoded == "three é<|stop|>\nfive<|stop|>\n"
    assert codec.decode(whole.tolist(), skip_special_tokens=False).count("<|start|>") == len(TALKS)


def test_a_chat_is_tokenized_as_transformers_does(tmp_path, model):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = model()
    data = open_data(config_for(written(tmp_path, {"messages": TALKS}, {"messages": TALKS}), folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TALKS, tokenize=True, return_dict=False)
    np.testing.assert_array_equal(answers_of(data.batch(0, "train"), 0, 0)[1], expected)


def test_a_completion_is_taught_with_its_end_and_the_prompt_is_not(tmp_path):
    line = {"prompt": "2 + 2 = ", "completion": "four é"}
    batch = open_data(config_for(written(tmp_path, line, line))).batch(0, "train")
    taught, whole = answers_of(batch, 0, 0)
    assert bytes(taught[:-1].astype(np.uint8)).decode() == "four é"
    assert taught[-1] == whole[-1] == 256
    assert bytes(whole[:-1].astype(np.uint8)).decode() == "2 + 2 = four é"


def test_an_instruction_with_its_input_is_a_chat_of_two(tmp_path, model):
    asked = {"instruction": "Count", "input": "one, two", "output": "three"}
    chat = {
        "messages": [
            {"role": "user", "content": "Count\n\none, two"},
            {"role": "assistant", "content": "three"},
        ]
    }
    folder = model()
    one, other = (
        open_data(config_for(written(tmp_path, line, line), folder)).batch(0, "train")
        for line in (asked, chat)
    )
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_conversations_are_packed_whole_and_each_once(tmp_path):
    lines = [{"prompt": f"{n:02d}" * (1 + n % 5), "completion": "yes" * (n % 4 + 1)} for n in range(40)]
    data = open_data(config_for(written(tmp_path, *lines)))
    seen = []
    for split in ("train", "held-out"):
        windows = data.windows[split]
        for tokens, segments in zip(windows["tokens"], windows["segments"], strict=True):
            assert (np.diff(segments) >= 0).all()
            for segment in range(segments.max() + 1):
                own = tokens[segments == segment]
                if own.any():  # padding is zeros
                    seen.append(bytes(own[:-1].astype(np.uint8)).decode())
    assert sorted(seen) == sorted(line["prompt"] + line["completion"] for line in lines)
    assert data.num_windows("train") < 20, "several share a window"
    batch = data.batch(3, "train")
    assert (batch["answers"][batch["tokens"] == 0] == 0).all(), "padding is not taught"


def test_all_tokens_are_taught_if_asked(tmp_path):
    line = {"prompt": "a", "completion": "b"}
    batch = open_data(config_for(written(tmp_path, line, line), "bytes", "data.loss_on=all")).batch(
        0, "train"
    )
    assert batch["answers"][0][batch["segments"][0] == 0].all()


REFUSED = {
    "no JSON": ("{", "talks.jsonl:1: not JSON: Expecting property name", "take it out"),
    "no object": ("[1]", "talks.jsonl:1: a list, not an object", "take it out"),
    "other keys": (
        '{"question": "?"}',
        "neither messages, nor prompt and completion, nor instruction and output; its keys: question",
        "one of these forms",
    ),
    "no text": (
        '{"prompt": 1, "completion": "x"}',
        "talks.jsonl:1: 'prompt' is 1, not text",
        "correct the line",
    ),
    "no list": (
        '{"messages": "hello"}',
        "'messages' is no list of objects with a role and a content",
        "write",
    ),
    "no template": (
        json.dumps({"messages": TALKS}),
        "messages need a chat template, and bytes has none",
        "prompt and completion",
    ),
    "too long": (
        json.dumps({"prompt": "a" * 70, "completion": "b"}),
        "its 72 tokens are longer than a window of 64",
        'use batch.sequence_length = 71, or data.too_long = "leave-out"',
    ),
    "one line": (
        json.dumps({"prompt": "a", "completion": "b"}),
        "no conversation is left for the",
        "more lines",
    ),
}


@pytest.mark.parametrize(("line", "words", "hint"), REFUSED.values(), ids=list(REFUSED))
def test_a_line_that_is_no_conversation_is_refused(line, words, hint, tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(InputError) as refused:
        open_data(config_for(path))
    assert words in refused.value.message
    assert hint in refused.value.hint


def test_long_conversations_are_left_out_if_asked(tmp_path):
    long, short = {"prompt": "a" * 70, "completion": "b"}, {"prompt": "a", "completion": "b"}
    data = open_data(
        config_for(written(tmp_path, long, long, short, short), "bytes", "data.too_long=leave-out")
    )
    assert data.num_windows("train") == data.num_windows("held-out") == 1


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    line = {"prompt": "a", "completion": "b"}
    with pytest.raises(InputError, match=r"holds token 256, outside model\.vocab_size = 256"):
        open_data(config_for(written(tmp_path, line, line), vocab_size=256))


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path, model):
    path = written(tmp_path, {"messages": TALKS})
    with pytest.raises(InputError, match="writes message 3 differently when others follow it"):
        open_data(config_for(path, model(FORGETS)))


def test_a_chat_without_an_answer_is_refused(tmp_path, model):
    path = written(tmp_path, {"messages": TALKS[:2]})
    with pytest.raises(InputError, match="no message is of the role 'assistant'"):
        open_data(config_for(path, model()))


def test_words_of_the_template_itself_reach_the_user(tmp_path, model):
    path = written(tmp_path, {"messages": TALKS})
    with pytest.raises(InputError, match="refuses a conversation: no system messages, please"):
        open_data(config_for(path, model("{{ raise_exception('no system messages, please') }}")))
    with pytest.raises(InputError, match=r"the chat template of .* cannot be read"):
        open_data(config_for(path, model("{% for %}")))


def test_a_template_cannot_reach_python(tmp_path, model):
    path = written(tmp_path, {"messages": TALKS})
    with pytest.raises(InputError, match="refuses a conversation: access to attribute '__class__'"):
        open_data(config_for(path, model("{{ messages.__class__.__mro__ }}")))


def test_a_tokenizer_without_an_end_is_refused(tmp_path, model):
    path = written(tmp_path, {"messages": TALKS})
    with pytest.raises(InputError, match="names no eos_token, which ends an answer"):
        open_data(config_for(path, model(eos_token=None)))


ENDLESS = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "of processor time",
    "{{ 9999999999**9999999 > 1 }}": "of processor time",
    "{{ 'a' * 10**11 }}": "of memory",
    "{{ 'a'|center(10**10) }}": "of memory",
    "{{ 'a' * 2 * 10**7 }}": "writes more than 16,777,216 characters",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "calls itself without end",
    "{{ 1/0 }}": "ZeroDivisionError",
    "{{ 'x'.encode('y') }}": "LookupError",
    "{{ messages|dictsort }}": "AttributeError",
    "{% break %}": "SyntaxError",
    "{{ '\\ud800' }}": "half of a pair",
    "": "writes nothing for its answers",
}


@pytest.mark.parametrize(("template", "words"), ENDLESS.items())
def test_a_template_has_limits_and_fails_in_words(template, words, tmp_path, model, monkeypatch):
    monkeypatch.setattr("meshwright.contrib.texts._templates.CPU_SECONDS", 0.4)
    path = written(tmp_path, {"messages": TALKS})
    with pytest.raises(InputError, match=words):
        open_data(config_for(path, model(template)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chat_template": [5]}, "5 is no object with a name and a template"),
        ({"chat_template": {"a": 1}}, "chat_template = .* is not text"),
        ({"chat_template": [{"name": "default"}]}, "messages need a chat template"),
        ({"eos_token": 5}, "names no eos_token"),
        ({"eos_token": {"content": None}}, "names no eos_token"),
        ("[" * 100_000, "nested 100000 levels deep"),
        ("[]", "it is not an object"),
    ],
)
def test_settings_of_another_kind_are_refused_in_words(settings, words, tmp_path, model):
    folder = model(**(settings if isinstance(settings, dict) else {}))
    if isinstance(settings, str):
        (folder / "tokenizer_config.json").write_text(settings)
    with pytest.raises(InputError, match=words):
        open_data(config_for(written(tmp_path, {"messages": TALKS}), folder))


def test_a_tokenizer_that_panics_or_lacks_a_token_is_refused_in_words(tmp_path, model, capfd):
    folder = model()
    tree = json.loads((folder / "tokenizer.json").read_text())
    panics = {**tree, "normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}
    (folder / "tokenizer.json").write_text(json.dumps(panics))
    path = written(tmp_path, {"messages": TALKS})
    with pytest.raises(InputError, match="is not a tokenizer: Precompiled"):
        open_data(config_for(path, folder))
    assert capfd.readouterr().err == "", "Rust prints its panics"
    lacks = {"type": "WordLevel", "vocab": {"<|start|>": 0, "<|stop|>": 1}, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(json.dumps({**tree, "model": lacks}))
    with pytest.raises(InputError, match=r"the tokenizer tokenizer\.json fails: .*\[UNK\]"):
        open_data(config_for(path, folder))
