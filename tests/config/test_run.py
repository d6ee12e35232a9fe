import pytest
from pydantic import ValidationError

from meshwright.config import AdamWOptimizer, BatchConfig, RunConfig, load_config, preset_names
from meshwright.errors import InputError


@pytest.mark.parametrize("preset", preset_names())
def test_a_config_survives_json(preset: str):
    config = load_config(preset)
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_tokens_per_step_are_those_of_the_whole_fleet():
    assert load_config("llama3-405b").batch.tokens_per_step == 2048 * 8192


def test_a_list_of_results_is_in_the_order_in_which_a_block_makes_them():
    assert load_config("bytes-nano", ["remat=save:context,value,query"]).remat == "save:query,value,context"


def test_only_a_transformer_rematerialises_by_default():
    assert load_config("llama3-8b").remat == "dots-attention"
    assert load_config("cruncher").remat == "none"


@pytest.mark.parametrize(
    ("preset", "override", "message", "hint"),
    [
        ("cruncher", "batch.sequence_length=2", "takes rows, not sequences", "batch.sequence_length = 1"),
        ("cruncher", "layer_loop=keep", "layer_loop = 'keep' has no effect on a cruncher", '"auto"'),
        ("bytes-nano", "gradient_sum=bf16", "precision = 'fp32' has no products in bf16", '"fp32"'),
        ("cruncher", "gradient_sum=all-fp32", "but a cruncher model sums gradients", '"fp32"'),
        ("bytes-10m", "layer_loop=keep", "the layers are separate parameters (model.unroll)", '"auto"'),
        (
            "bytes-nano",
            "remat=save:query,kee",
            "remat = 'save:query,kee': no result is called 'kee'",
            "'key'",
        ),
        ("bytes-nano", "remat=save:key,key", "names 'key' twice", "use 'save:key'"),
        ("bytes-nano", "remat=save:", "remat = 'save:' keeps no result", "full"),
        ("bytes-nano", "remat=save:expert_up", "names 'expert_up', which the blocks of this model", "mlp_up"),
        ("bytes-nano", "remat=saved", 'remat = "saved": expected one of', "known: alternate-dots"),
        ("bytes-nano", "remat=save_qkv_proj", 'remat = "save_qkv_proj"', "'save:query,key,value'"),
        ("cruncher", "remat=full", "remat = 'full' has no effect on a cruncher", 'remat = "none"'),
        ("linear", "data.source=python-stdlib", "gives tokens, but a linear", 'data.source = "synthetic"'),
        ("lenet", "batch.sequence_length=2", "takes images, not sequences", "batch.sequence_length = 1"),
        (
            "lenet-fashion",
            "model.kind=cruncher model.width=8 model.num_layers=1",
            "gives images, but a cruncher model takes rows",
            "synthetic",
        ),
        ("lenet", "data.source=python-stdlib", "gives tokens, but a lenet model takes images", '"synthetic"'),
        ("line", "model.input_dim=2", "model.input_dim = 2, but data.source = 'line'", "model.input_dim = 1"),
        ("gpt2-124m", "batch.sequence_length=2048", "longer than model.max_positions = 1024", "= 1024"),
        ("bytes-nano", "batch.microbatch_sequences=3", "batch.sequences = 8 is not a multiple", "= 6"),
        (
            "bytes-nano",
            "batch.sequences_per_replica=4 batch.microbatch_sequences=3",
            "batch.sequences_per_replica = 4 is not a multiple of batch.microbatch_sequences = 3",
            "sequences_per_replica = 3",
        ),
        (
            "bytes-nano",
            "schedule.scale=linear",
            "schedule.scale = 'linear', but nothing says for which batch",
            "set batch.base_sequences",
        ),
        (
            "bytes-nano",
            "batch.base_sequences=4",
            'batch.base_sequences = 4 has no effect with schedule.scale = "none"',
            'schedule.scale = "linear" or "sqrt"',
        ),
        ("bytes-10m", "schedule.warmup_steps=200", "is not below steps = 200", "warmup_steps = 199"),
        ("bytes-nano", "layout=tenosr=2", "layout = 'tenosr=2': layout", "did you mean 'tensor'?"),
    ],
)
def test_sections_that_disagree_are_refused(preset: str, override: str, message: str, hint: str):
    with pytest.raises(InputError) as caught:
        load_config(preset, override.split())
    assert message in caught.value.message
    assert hint in caught.value.hint


LINE = ["data.source=line", "data.slope=1.0", "data.intercept=0.0", "data.noise=0.0"]


@pytest.mark.parametrize(
    ("preset", "taken"), [("cruncher", "rows"), ("lenet", "images"), ("bytes-nano", "sequences")]
)
def test_points_about_a_line_are_for_a_linear_model_of_one_input(preset: str, taken: str):
    with pytest.raises(InputError) as caught:
        load_config(preset, LINE)
    assert f"data.source = 'line' gives points about a line, but a {load_config(preset).model.kind}" in str(
        caught.value
    )
    assert f"model takes {taken}" in caught.value.message
    assert caught.value.hint == 'use data.source = "synthetic"'
    assert load_config("linear", [*LINE, "model.input_dim=1"]).data.source == "line"


@pytest.mark.parametrize(
    ("preset", "overrides", "message", "hint"),
    [
        (
            "bytes-nano",
            ["offload=activations"],
            "= 'activations', but with remat = 'dots-attention' blocks save more than their input",
            'use remat = "full", or offload = "optimizer"',
        ),
        (
            "cruncher",
            ["offload=both", "optimizer.momentum=0.9"],
            "= 'both', but a cruncher model has no blocks whose input is saved",
            'use offload = "optimizer"',
        ),
        (
            "linear",
            ["offload=optimizer"],
            "= 'optimizer', but optimizer.kind = 'sgd' without momentum keeps no moments",
            "leave it out, or set optimizer.momentum",
        ),
        (
            "cruncher",
            ["offload=state", "optimizer.momentum=0.9"],
            "= 'state', but a cruncher model without stacked layers fetches none one by one",
            'use offload = "optimizer"',
        ),
        (
            "bytes-nano",
            ["offload=state", "model.unroll=true"],
            "= 'state', but a transformer model without stacked layers fetches none one by one",
            'use offload = "optimizer"',
        ),
        (
            "bytes-nano",
            ["offload=state", "layer_loop=unroll"],
            "= 'state', but layer_loop = \"unroll\" has no loop that fetches one layer at a time",
            'use offload = "optimizer"',
        ),
        (
            "bytes-nano",
            ["offload=all", "zero1=true", "remat=full"],
            "= 'all', but zero1 gathers all parameters on the devices when a step begins",
            'use offload = "optimizer"',
        ),
        (
            "bytes-nano",
            ["offload=state", "lora.rank=4"],
            "= 'state', but lora.rank = 4 freezes the layers, and those stay on the devices",
            'use offload = "optimizer"',
        ),
        (
            "bytes-nano",
            ["offload=all"],
            "= 'all', but with remat = 'dots-attention' blocks save more than their input",
            'use remat = "full", or offload = "optimizer"',
        ),
        (
            "lenet",
            ["offload=all"],
            "= 'all', but a lenet model without stacked layers fetches none one by one",
            "offload: leave it out; offload: leave it out, or set optimizer.momentum",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(preset, overrides, message, hint):
    with pytest.raises(InputError) as caught:
        load_config(preset, overrides)
    assert f"offload {message}" in caught.value.message
    assert hint in caught.value.hint


def test_the_word_none_stands_for_toml_s_missing_null():
    assert AdamWOptimizer(kind="adamw", learning_rate=1.0, clip_norm="none").clip_norm is None  # pyright: ignore


def test_records_are_frozen():
    batch = BatchConfig(sequences=8)
    with pytest.raises(ValidationError, match="frozen"):
        batch.sequences = 9  # pyright: ignore


def test_a_number_in_quotes_is_no_number():
    with pytest.raises(ValidationError, match="valid integer"):
        BatchConfig.model_validate_json('{"sequences": "8"}')


@pytest.mark.parametrize("fraction", ["0", "0.6"])
def test_at_most_half_of_the_data_is_held_out_and_at_least_some(fraction):
    with pytest.raises(InputError, match="held_out_fraction"):
        load_config("bytes-nano", [f"data.held_out_fraction={fraction}"])


TOKENS = ["data.source=tokens", "data.path=t.bin", "data.dtype=uint16"]


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["data.documents=packed"], "data.documents = 'packed' needs the id", "set data.end_of_document"),
        (["data.end_of_document=5"], "data.end_of_document = 5 has no effect", 'data.documents = "packed"'),
        (["data.documents=packed", "data.end_of_document=-1"], "data.end_of_document", "at least 0"),
        (["data.order=epoch"], "data.order", "epochs"),
    ],
)
def test_documents_and_order_that_cannot_be_are_refused(overrides, message, hint):
    with pytest.raises(InputError) as caught:
        load_config("bytes-nano", [*TOKENS, *overrides])
    assert message in caught.value.message
    assert hint in str(caught.value)


def test_windows_are_random_and_documents_joined_unless_told():
    data = load_config("bytes-nano", TOKENS).data
    assert (data.order, data.documents, data.end_of_document) == ("random", "joined", None)  # pyright: ignore
    assert load_config("bytes-nano", ["data.order=epochs"]).data.order == "epochs"  # pyright: ignore


def test_a_folder_of_images_is_as_the_configs_file_or_the_working_directory_sees_it(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text('preset = "lenet-fashion"\n[data]\nfolder = "images"\n')
    monkeypatch.chdir(tmp_path.parent)
    for config in (
        load_config(str(tmp_path / "run.toml")),
        load_config("lenet-fashion", [f"data.folder={tmp_path.name}/images"]),
    ):
        assert config.data.folder == str(tmp_path / "images")  # pyright: ignore
