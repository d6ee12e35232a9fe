"""The lecture notes' rule by their own numbers, and its reasons beside ledgers made by hand and real ones."""

import math

import pytest

import meshwright as mw
from meshwright.compiler import Argument
from meshwright.config import load_config
from meshwright.contrib.rule_of_thumb import rule_of_thumb
from meshwright.ledger import Buffer, MemoryLedger, Timeline


def memory(buffers=(), most=None, **by_category: int) -> MemoryLedger:
    return MemoryLedger(
        reserved_bytes=sum(by_category.values()),
        argument_bytes=0,
        peak_bytes=None,
        allowance={},
        usable_bytes=None,
        by_category=by_category,
        optimizer_state_by_moment={},
        buffers=tuple(buffers),
        timeline=Timeline(
            instants=(0, 1),
            last_instant=1,
            peak_instant=0,
            by_category={name: (0, size) for name, size in (most or by_category).items()},
        ),
    )


def buffer(shape: str, category="gradients") -> Buffer:
    sizes = [int(size) for size in shape.partition("[")[2].strip("]").split(",")]
    words = dict.fromkeys(("name", "moment", "rule", "phase", "module", "operation", "source_line"), "")
    return Buffer(
        **words,
        num_bytes={"f": 4, "b": 2}[shape[0]] * math.prod(sizes),
        shape=shape,
        format=shape.partition("[")[0],
        category=category,
        certainty="named",
        first_instant=0,
        last_instant=1,
    )


def argument(*shape: int, ways=1, role="parameters") -> Argument:
    return Argument(
        path="",
        role=role,
        shape=shape,
        dtype="float32",
        device_bytes=4 * math.prod(shape) // ways,
        replicated=ways == 1,
    )


@pytest.fixture
def made(weighing):
    def make(preset, *overrides, axes=(("data", 1),), arguments=(), found=None):
        compiled = weighing(
            compiled={
                "mesh_axes": axes,
                "num_devices": math.prod(size for _, size in axes),
                "arguments": arguments,
            }
        ).compiled
        return rule_of_thumb(load_config(preset, overrides), compiled, found or memory())

    return make


def row(found, quantity):
    return next(r for r in found.rows if r.quantity == quantity)


def test_the_cruncher_of_the_notes_by_the_notes_own_numbers(made):
    """B = 2, D = 4, two layers, AdaGrad: D x D x 2 + D parameters, B x D x 2 activations."""
    overrides = ("model.width=4", "batch.sequences=2", "optimizer.kind=adagrad")
    found = made("cruncher", *overrides)
    assert (found.parameters, found.activations, found.gradients, found.optimizer_state) == (36, 16, 36, 36)
    assert found.total_bytes == 4 * (36 + 16 + 36 + 36)
    assert row(found, "total").whole_bytes == found.total_bytes


@pytest.mark.parametrize(
    ("overrides", "moments"),
    [
        (("optimizer.kind=sgd",), 0),
        (("optimizer.kind=sgd", "optimizer.momentum=0.9"), 1),
        (("optimizer.kind=adagrad",), 1),
        (("optimizer.kind=adamw",), 2),
    ],
)
def test_each_optimizer_keeps_so_many_numbers_for_a_parameter(made, overrides, moments):
    found = made("cruncher", *overrides)
    assert found.optimizer_state == moments * found.parameters


def test_activations_are_one_output_of_each_layer(made):
    assert made("linear").activations == 0
    assert made("lenet").activations == 64 * (20 * 26 * 26 + 50 * 9 * 9 + 128)
    stages = 4 * 64 * 24**2 + 5 * (128 * 12**2 + 256 * 6**2 + 512 * 3**2)  # the 1 x 1 beside the four
    assert made("resnet18-fashion").activations == 256 * (64 * 48**2 + stages)
    assert made("bytes-nano").activations == 8 * 64 * 64 * 2  # tokens 8 x 64, width 64, two blocks


CRUNCHER = ((64, 64), (64, 64), (64, 1))


def test_what_is_split_and_what_every_device_holds_is_read_off_the_shards(made):
    whole = 4 * load_config("cruncher").model.num_parameters
    eighth = [argument(*shape, ways=8) for shape in CRUNCHER]
    split = made("cruncher", axes=(("fsdp", 8),), arguments=eighth, found=memory(parameters=whole // 8)).rows[
        0
    ]
    assert split.device_bytes == whole / 8 == split.compiled_bytes
    assert split.why == "split over fsdp=8: each number is stored on 1 of 8 devices"
    held = [argument(*shape) for shape in CRUNCHER]
    everywhere = made("cruncher", axes=(("data", 8),), arguments=held, found=memory(parameters=whole))
    assert everywhere.rows[0].why == "not split: each number is stored on 8 of 8 devices"
    alone = made("cruncher", arguments=held, found=memory(parameters=whole - 16_384)).rows[0]
    assert alone.why == (
        "one device holds all of it; at the peak 16.0 KiB of their place hold other values or none"
    )


def test_arrays_that_are_split_otherwise_are_told_apart_by_their_share(made):
    arguments = [argument(30, 100, ways=4), argument(10, 100), argument(500, ways=2), argument(500, ways=2)]
    axes = (("data", 2), ("fsdp", 2), ("tensor", 2))
    why = made("cruncher", axes=axes, arguments=arguments, found=memory(parameters=9000)).rows[0].why
    assert why == (
        "60.0 % split over fsdp=2 and tensor=2: each number is stored on 2 of 8 devices, "
        "20.0 % not split: each number is stored on 8 of 8 devices, "
        "20.0 % split 2 ways: each number is stored on 4 of 8 devices"
    )


def test_the_optimizers_counts_of_steps_are_told_apart_from_its_moments(made):
    assert row(made("cruncher"), "optimizer state").why == "the optimizer keeps none"
    count = argument(role="optimizer_state")
    counted = made("cruncher", arguments=[count], found=memory(optimizer_state=4))
    assert row(counted, "optimizer state").why == "the optimizer keeps none, but 4 bytes of step counts"
    arguments = [argument(*shape, role="optimizer_state") for shape in CRUNCHER]
    adagrad = made(
        "cruncher",
        "optimizer.kind=adagrad",
        arguments=[*arguments, count],
        found=memory(optimizer_state=33_028),
    )
    assert row(adagrad, "optimizer state").why == "one device holds all of it, and 4 bytes of step counts"


def gradients(made, buffers, most, *overrides, ways=1):
    arguments = [argument(*shape, ways=ways) for shape in CRUNCHER]
    found = memory(
        buffers, {"gradients": most}, parameters=1, gradients=sum(each.num_bytes for each in buffers)
    )
    axes = (("fsdp", ways),)
    return row(made("cruncher", *overrides, axes=axes, arguments=arguments, found=found), "gradients").why


def test_gradients_are_counted_and_said_to_be_alive_together_or_not(made):
    one, head = buffer("f32[64,64]"), buffer("f32[64,1]")
    all_of_them = [one, one, head]
    assert gradients(made, all_of_them, 33_024) == (
        "3 arrays at the peak, the largest f32[64,64], for 3 arrays of parameters"
    )
    assert gradients(made, [one], 16_640) == (
        "one array at the peak, f32[64,64], for 3 arrays of parameters; "
        "never all at once: at most 16.2 KiB are filed so at any instant"
    )
    assert gradients(made, [], 33_024) == "none is alive at the peak"
    assert gradients(made, [], 0) == "no value of the step is filed as a gradient"
    narrow = [buffer("bf16[64,64]"), buffer("bf16[64,64]"), head]
    assert gradients(made, narrow, 2 * 8192 + 256, "precision=bf16") == (
        "3 arrays at the peak, the largest bf16[64,64], some in f32, for 3 arrays of parameters"
    )


def test_gradients_that_are_whole_beside_split_parameters_are_counted(made):
    buffers = [buffer("f32[64,64]"), buffer("f32[8,64]"), buffer("f32[8,1]")]
    assert gradients(made, buffers, 33_024, ways=8) == (
        "3 arrays at the peak, the largest f32[64,64], for 3 arrays of parameters; "
        "1 as large as a whole parameter, of which a device holds a part"
    )


def test_what_the_rule_leaves_out_is_named_largest_first_and_the_column_adds_up(made):
    found = made("cruncher", found=memory(parameters=100, logits_and_loss=2048, batch=10, fragmentation=5))
    others = row(found, "everything else")
    assert others.why == "not in the rule: logits and loss 2.00 KiB, batch 10 B, fragmentation 5 B"
    assert sum(r.compiled_bytes for r in found.rows[:-1]) == found.rows[-1].compiled_bytes == 2163
    assert row(made("cruncher"), "everything else").why == "nothing"


def test_what_splits_or_shortens_activations_is_a_reason(made):
    kept = [buffer("bf16[2,64,64]", "saved_activations"), buffer("f32[2,64]", "saved_activations")]
    found = memory(kept, {"saved_activations": 20_480}, saved_activations=16_896)
    overrides, axes = ("batch.microbatch_sequences=1",), (("data", 2), ("tensor", 2))
    assert row(made("bytes-nano", *overrides, axes=axes, found=found), "activations").why == (
        "2 arrays at the peak, the largest bf16[2,64,64], some in f32; up to 20.0 KiB at another instant; "
        "sequences are split 2 ways over 4 devices; 1 of 4 sequences at a time; "
        "rematerialisation dots-attention"
    )
    linear = row(made("linear", found=found), "activations").why
    assert linear.endswith("whatever the backward pass needs counts, not outputs of layers alone")
    assert row(made("cruncher"), "activations").why == "none is alive at the peak"


def test_it_is_jsons_types(made):
    fields = made("cruncher", found=memory(parameters=4)).to_dict()
    assert fields["total_bytes"] == 4 * (2 * fields["parameters"] + fields["activations"])
    assert [r["quantity"] for r in fields["rows"]][-1] == "total"


def test_beside_a_real_program_of_the_cruncher_rows_and_reasons_are_those_by_hand():
    overrides = ["optimizer.kind=adamw"]
    weighed = mw.weigh("cruncher", on="8xCPU", layout="fsdp=8", overrides=overrides)
    found, memory = weighed.rule_of_thumb, weighed.ledger.memory
    assert found is not None
    parameters = 2 * 64 * 64 + 64
    assert found.total_bytes == 4 * (4 * parameters + 64 * 64 * 2)
    by_quantity = {r.quantity: r for r in found.rows}
    where = "split over fsdp=8: each number is stored on 1 of 8 devices"
    assert by_quantity["parameters"].compiled_bytes == 4 * parameters / 8
    assert by_quantity["parameters"].why == where
    assert by_quantity["optimizer state"].compiled_bytes == pytest.approx(2 * 4 * parameters / 8, abs=4)
    assert by_quantity["optimizer state"].why.startswith(f"{where}, and 4 bytes of step counts")
    whole = [b for b in memory.buffers if b.category == "gradients" and b.num_bytes in (4 * 64 * 64, 4 * 64)]
    assert f"{len(whole)} as large as a whole parameter" in by_quantity["gradients"].why
    assert sum(r.compiled_bytes for r in found.rows[:-1]) == memory.reserved_bytes


def test_beside_a_real_program_of_a_linear_model_there_is_nothing_to_split_or_keep():
    found = mw.weigh("linear", on="1xCPU").rule_of_thumb
    assert found is not None
    assert found.total_bytes == 4 * (16 + 0 + 16 + 0)
    parameters, state = found.rows[:2]
    assert (parameters.whole_bytes, parameters.compiled_bytes) == (64, 64)
    assert parameters.why == "one device holds all of it"
    assert (state.compiled_bytes, state.why) == (0, "the optimizer keeps none")


def test_of_lenet_over_fsdp_the_convolutions_lie_whole_on_every_device():
    weighed = mw.weigh("lenet", on="8xCPU", layout="fsdp=8")
    assert weighed.rule_of_thumb is not None
    hidden, rest = 800 * 128, 200 + 25_050 + 128 + 1_290
    held = sum(a.device_bytes for a in weighed.compiled.arguments if a.role == "parameters")
    assert held == 4 * (hidden // 8 + rest)
    assert weighed.rule_of_thumb.rows[0].why.startswith(
        f"{100 * hidden / (hidden + rest):.1f} % split over fsdp=8: each number is stored on 1 of 8 devices, "
        f"{100 * rest / (hidden + rest):.1f} % not split: each number is stored on 8 of 8 devices"
    )
