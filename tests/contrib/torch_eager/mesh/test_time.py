"""The predicted time of PyTorch's eager step, against prices and schedules that are counted by hand."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.hardware import Fleet  # noqa: E402
from meshwright.predict import collective_seconds, machine_of  # noqa: E402
from tests.contrib.torch_eager.steps import weighed  # noqa: E402

WIDTH, ROWS = 4096, 8192
BF16 = torch.bfloat16


def exposed(prediction) -> dict[str, float]:
    return {part.name: part.exposed_seconds for part in prediction.slices}


def square(layers: int = 1, dtype=BF16) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(layers)))


def rows(dtype=BF16):
    return torch.zeros(ROWS, WIDTH, dtype=dtype, device="meta")


def product_seconds(times: int, format_name: str = "bf16", on: str = "1xH100") -> float:
    machine = machine_of(Fleet.parse(on), None)
    itemsize = 2 if format_name == "bf16" else 4
    each = machine.product_seconds(
        format_name, m=ROWS, n=WIDTH, k=WIDTH, num_bytes=itemsize * (2 * ROWS * WIDTH + WIDTH**2)
    )
    return times * float(each)


def test_products_are_priced_by_their_shapes_as_those_of_a_compiled_step():
    prediction = weighed(square(3), rows()).prediction
    machine = machine_of(Fleet.parse("1xH100"), None)
    # Forward three times, the gradients of three matrices, and of two layers' inputs: all of 2 m n k FLOPs.
    weights = machine.product_seconds(
        "bf16", m=WIDTH, n=WIDTH, k=ROWS, num_bytes=2 * (2 * ROWS * WIDTH + WIDTH**2)
    )
    assert exposed(prediction)["matmul"] == pytest.approx(product_seconds(5) + 3 * float(weights))
    flops = 8 * 2 * ROWS * WIDTH**2
    peak = machine.peak_flops_per_second["bf16"]
    assert prediction.mfu == pytest.approx(flops / prediction.step_seconds.expected / peak)


def test_other_kernels_take_as_long_as_their_bytes_at_seven_tenths_of_xlas_rate():
    with torch.device("meta"):
        gelu = nn.GELU()
        x = torch.zeros(ROWS, WIDTH, dtype=BF16, requires_grad=True)
    prediction = weighed(gelu, x).prediction
    passes = 2 + 1 + 2  # GELU, the sum that stands for a loss, GELU's gradient: that of the sum is one number
    machine = machine_of(Fleet.parse("1xH100"), None)
    per_second = machine.memory_bytes_per_second * machine.memory_efficiency * 0.7
    assert exposed(prediction)["memory-bound"] == pytest.approx(
        passes * 2 * ROWS * WIDTH / per_second, rel=0.01
    )


def test_fp32_products_run_in_the_format_that_pytorchs_switches_say():
    def seconds() -> float:
        return exposed(weighed(square(dtype=torch.float32), rows(torch.float32)).prediction)["matmul"]

    switch = torch.backends.cuda.matmul
    found = {}
    try:
        for name in ("ieee", "tf32"):
            switch.fp32_precision = name
            found[name] = seconds()
        switch.allow_tf32 = False  # the older switch, which most scripts have
        found["not allowed"] = seconds()
        switch.allow_tf32 = True
        found["allowed"] = seconds()
    finally:
        torch.set_float32_matmul_precision("highest")  # sets the old and the new switch
    assert found["ieee"] == found["not allowed"] > 3 * found["tf32"]
    assert found["tf32"] == found["allowed"]


def test_fsdp_hides_its_messages_behind_products_if_those_are_longer():
    module = square(8)
    prediction = weighed(module, rows(), on="8xH100", optimizer=torch.optim.SGD).prediction
    slices = {part.name: part for part in prediction.slices}
    gathers, products = slices["all-gather[fsdp]"], slices["matmul"].seconds
    # FSDP gathers each layer for the forward pass and again for the backward pass, and hides all but the
    # first gather, and those that it waits for at the turn.
    assert gathers.seconds < products / 3
    assert gathers.exposed_seconds < gathers.seconds / 5
    parts = sum(part.exposed_seconds for part in prediction.slices)
    assert parts == pytest.approx(prediction.step_seconds.expected)


def test_fsdp_is_as_slow_as_its_messages_if_those_are_longer():
    few = torch.zeros(8, WIDTH, dtype=BF16, device="meta")
    prediction = weighed(square(8), few, on="64xA100-40GB", optimizer=torch.optim.SGD).prediction
    slices = {part.name: part for part in prediction.slices}
    messages = sum(part.seconds for part in prediction.slices if part.kind == "communication")
    assert prediction.step_seconds.expected == pytest.approx(messages, rel=0.2)
    assert slices["matmul"].seconds < messages / 4


def test_messages_are_priced_as_those_of_a_compiled_step():
    prediction = weighed(square(8), rows(), on="8xH100", layout="data=8").prediction
    slices = {part.name: part for part in prediction.slices}
    machine = machine_of(Fleet.parse("8xH100"), None)
    wire_bytes = 2 * 7 / 8 * 8 * 2 * WIDTH**2
    once = collective_seconds(
        machine.rates.collective_for("all-reduce", 8),
        wire_bytes=wire_bytes,
        bytes_per_second=machine.inside_bytes_per_second,
    )
    assert once < slices["all-reduce[data]"].seconds < 1.5 * once  # in several buckets


def test_a_step_of_small_kernels_waits_for_the_host_and_has_no_interval():
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(64)))
        x = torch.zeros(4, 32)
    prediction = weighed(module, x).prediction
    gaps = exposed(prediction)["launch"]
    assert gaps > 0.3 * prediction.step_seconds.expected
    assert (prediction.step_seconds.low, prediction.step_seconds.high) == (None, None)
    assert any("gaps between kernels" in reason for reason in prediction.interval_reasons)


def test_tensor_parallel_products_are_shared_and_their_messages_wait():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def split(module, mesh):
        parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})

    # One A100 has the chip's rate. Two wait for the slower, and PyTorch's fleets reach 0.88 of that.
    one = weighed(square(2), rows(), on="1xA100-80GB").prediction
    two = weighed(square(2), rows(), on="2xA100-80GB", layout="tensor=2", parallelize=split).prediction
    half = exposed(one)["matmul"] / 2 / (0.96 * 0.88)
    assert exposed(two)["matmul"] == pytest.approx(half, rel=0.1)
    assert exposed(two)["all-reduce[tensor]"] > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile's own imports
@pytest.mark.parametrize(
    ("on", "plan", "words"),
    [
        ("8xCPU", None, "no rates are known of PyTorch's kernels on a CPU"),
        ("8xH100", lambda module, mesh: module.compile(), "compiled by torch.compile"),
    ],
)
def test_where_no_time_is_known_it_says_why(on, plan, words):
    weighing = weighed(square(2), rows(), on=on, parallelize=plan)
    assert weighing.prediction is None
    assert words in weighing.account.no_prediction
    assert f"STEP: none: {weighing.account.no_prediction}" in str(weighing)
    assert weighing.to_dict()["prediction"] is None


def test_the_time_is_in_text_json_and_page(tmp_path):
    weighing = weighed(square(8), rows(), on="8xH100", run=mw.RunLength(tokens_per_step=8 * ROWS))
    assert "tokens/s per device, MFU" in str(weighing)
    fields = weighing.to_dict()["prediction"]
    assert fields["step_seconds"]["expected"] == weighing.prediction.step_seconds.expected
    assert fields["tokens_per_second_per_device"] * fields["step_seconds"]["expected"] == pytest.approx(ROWS)
    page = weighing.to_html(tmp_path / "page.html")
    for words in ("Predicted time of one step", "reduce-scatter[fsdp]", "computing, or waiting for messages"):
        assert words in page


def test_the_classes_of_streams_are_pytorchs_own_afterwards():
    before = {name: getattr(torch.cpu.Stream, name) for name in ("wait_stream", "record_event", "wait_event")}
    weighed(square(2), rows(), on="8xH100")
    assert before == {name: getattr(torch.cpu.Stream, name) for name in before}


def test_a_run_has_hours_and_a_price_if_its_tokens_are_told():
    run = mw.RunLength(tokens_per_step=8 * ROWS, tokens=800 * ROWS, price_per_device_hour=2)
    weighing = weighed(square(2), rows(), on="8xH100", run=run)
    seconds = 100 * weighing.prediction.step_seconds.expected
    total = weighing.run_total
    assert total.seconds.expected == pytest.approx(seconds)
    assert total.cost.expected == pytest.approx(2 * 8 * seconds / 3600)
    assert "RUN: " in str(weighing)
    assert "COST: " in str(weighing)
    assert weighing.to_dict()["run_total"]["steps"] == 100
    with pytest.raises(mw.InputError, match="tokens in its step is not known"):
        weighed(square(2), rows(), on="8xH100", run=mw.RunLength(tokens="1B"))


def test_rows_that_begin_at_odd_numbers_slow_products_on_hopper():
    """GPT-2's vocabulary, as it is and padded; the share of the peak is a measured one."""

    def seconds(columns, on, dtype=BF16):
        with torch.device("meta"):
            head = nn.Linear(768, columns, bias=False, dtype=dtype)
        inputs = torch.zeros(ROWS, 768, dtype=dtype, device="meta")
        made = weighed(head, inputs, on=on, loss=lambda output: output.square().mean())
        return exposed(made.prediction)["matmul"]

    padded, halves, odd = (seconds(columns, "1xH200") for columns in (50_304, 50_258, 50_257))
    flops = 2 * 2 * ROWS * 768 * 50_257  # forward, and the weight's gradient
    assert odd == pytest.approx(flops / (0.125 * 989.4e12))
    assert odd > 1.9 * halves > 1.9 * padded
    assert seconds(50_257, "1xA100") == pytest.approx(seconds(50_304, "1xA100"), rel=0.01)
    fp32 = torch.float32
    assert seconds(50_257, "1xH200", fp32) == pytest.approx(seconds(50_304, "1xH200", fp32), rel=0.01)
