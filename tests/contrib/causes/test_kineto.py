"""What traces of torch.profiler record, read from small files in its format."""

import json
from types import SimpleNamespace

import pytest

import meshwright as mw
from meshwright import InputError
from meshwright.contrib.causes import gap_of, kineto_trace
from meshwright.report import Lanes
from tests.contrib.causes.kineto import BACKWARD, HOST, Kineto

GEMM = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_nn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"


def gpu_step():
    """A step whose forward pass, backward pass and update launch one kernel each, and one message."""
    t = Kineto(rank=0, world=2).step(3, 0, 1000)
    t.python("/home/me/train.py(12): main", -10, 2000).python("nn.Module: Net_0", 10, 200)
    t.python("models/net.py(40): forward", 12, 190).python("nn.Module: Linear_1", 20, 150)
    t.op("aten::linear", 30, 100).op("aten::addmm", 40, 80, sequence=7, dims=[[8], [4, 16], [16, 8]],
                                     types=["c10::BFloat16"] * 3)  # fmt: skip
    t.launch(GEMM, 60, 100, 200)
    t.op("autograd::engine::evaluate_function: AddmmBackward0", 300, 90, BACKWARD, sequence=7, forward=1)
    t.op("aten::mm", 310, 60, BACKWARD, dims=[[8, 4], [4, 16]]).launch(
        "sm90_xmma_gemm_tf32", 320, 330, 100, BACKWARD
    )
    t.put("user_annotation", "nccl:all_reduce", 395, 20, BACKWARD)
    t.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 400, 440, 150, BACKWARD, stream=20, **{
        "Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "dtype": "BFloat16",
        "Process Group Ranks": "[0, 1]"})  # fmt: skip
    t.put("user_annotation", "Optimizer.step#AdamW.step", 600, 200)
    t.op("aten::_foreach_add_", 610, 50).launch(
        "void at::native::multi_tensor_apply_kernel<...>(x)", 620, 650, 30
    )
    t.launch("Memcpy HtoD (Pageable -> Device)", 900, 905, 40, cat="gpu_memcpy", bytes=4096)
    return t


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_kernels_have_class_phase_module_line_and_format(name, tmp_path):
    recorded = kineto_trace([gpu_step().write(tmp_path / name)])
    assert recorded.devices == ("0/0",)
    assert recorded.num_ranks == 1
    found = [(w.kind, w.phase, w.scope, w.source, w.format_name) for w in recorded.work]
    assert found == [
        ("matmul", "forward", "Net_0/Linear_1", "net.py:40", "bf16"),
        ("matmul", "backward", "Net_0/Linear_1", "net.py:40", "tf32"),
        ("all-reduce", None, None, None, "bf16"),
        ("memory-bound", "optimizer", None, "train.py:12", "fp32"),
        ("copy-to-device", None, None, "train.py:12", None),
    ]
    product, _, message, _, copy = recorded.work
    assert (product.flops, product.shape) == (2 * 4 * 16 * 8, "[[8], [4, 16], [16, 8]]")
    assert (message.num_bytes, message.group, message.stream) == (200, "[0, 1]", "20")
    assert copy.num_bytes == 4096
    assert "1 of the 2 ranks of the run are given" in recorded.notes


def test_a_step_ends_when_the_device_has_done_what_was_launched(tmp_path):
    """The host runs ahead: each step takes it 100 us, and the device 400."""
    t = Kineto()
    for number in range(3):
        t.step(number, 100 * number, 100).op("aten::mm", 100 * number + 5, 20)
        t.launch(GEMM, 100 * number + 10, max(20, 400 * number + 20), 400)
    recorded = kineto_trace([t.write(tmp_path / "t.json")])
    assert [round(step.seconds * 1e6) for step in recorded.steps] == [420, 400, 400]


def test_what_checkpointing_runs_again_is_known_by_its_sequence_numbers(tmp_path):
    t = Kineto().step(0, 0, 1000)
    t.op("aten::mm", 10, 20, sequence=1).launch(GEMM, 12, 15, 10)
    engine = "autograd::engine::evaluate_function: "
    t.op(engine + "MmBackward0", 100, 300, BACKWARD, sequence=1, forward=1)
    t.op("aten::linear", 110, 30, BACKWARD, sequence=2).op("aten::mm", 112, 20, BACKWARD, sequence=2)
    t.launch(GEMM, 115, 120, 10, BACKWARD)
    t.op("MmBackward0", 200, 50, BACKWARD, sequence=1, forward=1).op("aten::mm", 210, 20, BACKWARD)
    t.launch(GEMM, 212, 220, 10, BACKWARD)
    recorded = kineto_trace([t.write(tmp_path / "t.json")])
    assert [(w.phase, w.recomputed) for w in recorded.work] == [
        ("forward", False), ("backward", True), ("backward", False),
    ]  # fmt: skip


@pytest.mark.parametrize(("begin", "found"), [(5_000, []), (45_000, [("python", 20_000)])])
def test_gradients_that_wait_for_an_exchange_are_no_python(begin, found, tmp_path):
    t = Kineto().step(0, 0, 50_000).python("torch/autograd/graph.py(9): _engine_run_backward", 0, 40_000)
    t.op("aten::mm", 10, 9_990).op("aten::copy_", 30_000, 9_000)
    t.put("user_annotation", "gloo:all_reduce", begin, 6_000, 12)
    host = kineto_trace([t.write(tmp_path / "t.json")]).host
    assert [(span.kind, round(span.seconds * 1e6)) for span in host if "backward" in span.name] == found


def test_without_a_gpu_operations_are_the_work_less_those_inside_of_them(tmp_path):
    t = Kineto().step(0, 0, 1000).op("aten::linear", 0, 100, sequence=1).op("aten::addmm", 10, 80, sequence=1)
    t.op("aten::expand", 12, 5).op("aten::copy_", 20, 10).op("aten::view", 200, 50)
    t.put(
        "user_annotation", "gloo:all_reduce", 300, 100, 12, **{"Input Dims": [[250]], "Input type": ["float"]}
    )
    recorded = kineto_trace([t.write(tmp_path / "t.json")])
    spent = {}
    for work in recorded.work:
        spent[work.name] = spent.get(work.name, 0) + round(work.seconds * 1e6)
    assert spent == {"aten::linear": 20, "aten::addmm": 70, "aten::copy_": 10, "gloo:all_reduce": 100}
    assert recorded.devices == ("0/cpu",)
    assert next(w.num_bytes for w in recorded.work if w.kind == "all-reduce") == 1000


def test_a_pause_of_the_host_is_named_by_the_function_that_fills_it(tmp_path):
    t = Kineto().step(0, 0, 50_000).python("/home/me/train.py(9): main", 0, 50_000)
    t.op("aten::mm", 10, 1000).python("/home/me/text.py(3): tokenize", 2000, 20_000)
    for place in range(18):
        t.python("<built-in method split of str object at 0x7f>", 2100 + 1000 * place, 900)
    t.op("aten::mm", 22_100, 1000)
    t.python("torch/utils/data/dataloader.py(720): __next__", 30_000, 9000).op("aten::stack", 30_100, 100)
    for place in range(100):
        t.op("aten::item", 40_000 + 50 * place, 5)
    t.op("aten::mm", 46_000, 2000)
    recorded = kineto_trace([t.write(tmp_path / "t.json")])
    found = {(h.kind, h.name, h.source) for h in recorded.host}
    assert ("python", "/home/me/text.py(3): tokenize", "text.py:3") in found
    assert ("data", "torch/utils/data/dataloader.py(720): __next__", "train.py:9") in found
    assert any(kind == "wait" and name == "aten::item" for kind, name, _ in found)
    assert "aten::stack" not in {w.name for w in recorded.work}


def test_a_wait_lasts_until_the_device_works_again(tmp_path):
    t = Kineto().step(0, 0, 3000).python("/home/me/train.py(9): main", 0, 3000)
    t.op("aten::mm", 10, 20).launch(GEMM, 12, 20, 500)
    t.op("aten::item", 100, 450).put("cuda_runtime", "cudaStreamSynchronize", 110, 420, correlation=99)
    t.op("aten::mm", 600, 20).launch(GEMM, 610, 700, 100)
    recorded = kineto_trace([t.write(tmp_path / "t.json")])
    (wait,) = (span for span in recorded.host if span.kind == "wait")
    assert (wait.name, wait.source) == ("aten::item", "train.py:9")
    assert [round(t * 1e6) for t in (wait.begin_seconds, wait.end_seconds)] == [110, 700]


def test_traces_of_pytorch_1_8_are_read(tmp_path):
    """Other names of kinds, annotations among operations, and stacks in the operations' arguments."""
    stack = "/opt/python3.7/site-packages/torch/nn/functional.py(9): linear;/home/me/train.py(54): main"
    t = Kineto().put("Operator", "ProfilerStep*3", 0, 900, "7")
    t.put("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 300, "7")
    t.put("Operator", "aten::addmm", 400, 100, "7", **{"Call stack": stack, "External id": 5})
    t.put("Runtime", "cudaLaunchKernel", 420, 5, "7", correlation=1, **{"external id": 5})
    t.put("Kernel", "volta_sgemm_128x64_nn", 430, 100, "stream 7", device=0, stream=7, correlation=1)
    recorded = kineto_trace([t.write(tmp_path / "t.json")])
    (work,) = recorded.work
    assert (work.kind, work.source) == ("matmul", "train.py:54")
    assert "data" in {span.kind for span in recorded.host}
    assert recorded.steps[0].name == "ProfilerStep*3"


def two_ranks(tmp_path, ranks, **about):
    for place, rank in enumerate(ranks):
        t = Kineto(rank=rank, **about).step(0, 0, 100).op("aten::mm", 10, 50)
        yield t.write(tmp_path / f"{place}.json")


def test_ranks_are_those_that_the_files_say_else_their_order(tmp_path):
    said = kineto_trace(list(two_ranks(tmp_path, (5, 2), host_name="a", baseTimeNanoseconds=7)))
    assert [step.rank for step in said.steps] == [2, 5]
    assert said.one_clock
    unsaid = kineto_trace(list(two_ranks(tmp_path, (None, 0, None))))
    assert [step.rank for step in unsaid.steps] == [0, 1, 2]
    assert not unsaid.one_clock
    with pytest.raises(InputError, match=r"0\.json and .*1\.json are both of rank 3"):
        kineto_trace(list(two_ranks(tmp_path, (3, 3))))


REFUSED = {
    "no events": ([], "holds no operation and no kernel"),
    "another device": ([("mtia_ccp_events", "k", 0, 5), ("cpu_op", "aten::mm", 0, 5)], "mtia_ccp_events"),
    "no kernels": (
        [("cpu_op", "aten::mm", 0, 5), ("cuda_runtime", "cudaLaunchKernel", 1, 2)],
        "1 launches of kernels and no kernel",
    ),
    "an age": ([("cpu_op", "aten::mm", 0, 5), ("cpu_op", "aten::mm", 10**30, 5)], "s apart, which cannot be"),
    "negative": ([("cpu_op", "aten::mm", 0, -5)], "which cannot be"),
    "words": ([("cpu_op", "aten::mm", "soon", 5)], "ts = 'soon' is no number of microseconds"),
    "two clocks": (
        [("user_annotation", "ProfilerStep#1", 0, 9), ("kernel", "gemm", -(10**9), 5)],
        "none of its 1 kernels lies within its steps",
    ),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_cannot_be_is_refused_in_words(what, tmp_path):
    events, words = REFUSED[what]
    t = Kineto()
    for event in events:
        t.put(*event)
    with pytest.raises(InputError) as refused:
        kineto_trace([t.write(tmp_path / "t.json")])
    assert words in refused.value.message
    assert refused.value.hint


STRANGE = (None, "x" * 100, -1, 10**200, 1.5, [], {}, [[[[]]]], True, [10**20, "a"])
KEYS = """Sequence number, Fwd thread id, External id, Input Dims, Input type, correlation, stream, bytes,
In msg nelems, dtype, Call stack, Process Group Ranks, Collective name"""


def strange(tmp_path, key, value):
    t = gpu_step()
    for event in t.events:
        event["args"][key] = value
    return kineto_trace([t.write(tmp_path / "t.json")])


@pytest.mark.parametrize("key", KEYS.replace("\n", " ").split(", "))
@pytest.mark.parametrize("value", STRANGE)
def test_strange_arguments_are_left_out(key, value, tmp_path):
    recorded = strange(tmp_path, key, value)
    assert len(recorded.work) == 5
    json.dumps([work.group or work.shape for work in recorded.work])


def test_a_device_that_is_no_device_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"its device \(or pid\) is \[\]"):
        strange(tmp_path, "device", [])


def test_events_of_a_kind_that_is_not_read_are_counted(tmp_path):
    t = Kineto().step(0, 0, 100).op("aten::mm", 1, 5).put("new_kind", "x", 1, 2).put("new_kind", "y", 3, 2)
    recorded = kineto_trace([t.write(tmp_path / "t.json")])
    assert recorded.unread == {"events of the kind 'new_kind', which is not read": 2}


@pytest.fixture(scope="module")
def weighed():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    return mw.weigh("tests.contrib.causes.torch_program:program", on="1xH100")


def eager_step(*, pause=(), extra=0, update=0, item=False):
    """Three steps on a GPU: 2 ms of kernels for forward and backward pass, launched just before they run.

    `pause`: begins and microseconds of idle time between launches. `extra`: further kernels after the step.
    `update`: kernels of the optimizer that take 1 us each, and 50 us to launch.
    """
    t, now = Kineto(), 0
    for index in range(3):
        begin = now
        for number, (name, engine) in enumerate((("aten::addmm", ""), ("aten::mm", "Backward0"))):
            if engine:
                t.op("autograd::engine::evaluate_function: AddmmBackward0", now, 1000, BACKWARD, 5 + index, 1)
            dims = [[64], [64, 64], [64, 64]] if not engine else [[64, 64], [64, 64]]
            tid = BACKWARD if engine else HOST
            t.op(name, now + 1, 990, tid, sequence=None if engine else 5 + index, dims=dims)
            t.launch(GEMM, now + 2, now + 3, 990, tid)
            now += 1000 + sum(long for place, long in pause if place == number)
        if item:
            t.op("aten::item", now, 200)
            t.put("cuda_runtime", "cudaStreamSynchronize", now, 190, correlation=-1)
            now += 2000
        if update:
            t.put("user_annotation", "Optimizer.step#AdamW.step", now, 50 * update)
        for _ in range(update):
            t.op("aten::add_", now, 45).launch(ADD, now + 5, now + 10, 1)
            now += 50
        for _ in range(extra):
            t.python("/home/me/train.py(70): metrics", now, 1000)
            t.op("aten::sort", now + 1, 900).launch(ADD, now + 2, now + 3, 990)
            now += 1000
        t.step(index, begin, now - begin)
    return t


EAGER = {
    "gaps": ({"pause": ((0, 150), (1, 150))}, "gaps", 300e-6),
    "an update launched one by one": ({"update": 60}, "update", 49 * 60e-6),
    "a number each step": ({"item": True}, "synchronization", 2e-3),
    "more work": ({"extra": 1}, "extra work", 990e-6),
}


@pytest.mark.parametrize("what", list(EAGER))
def test_a_cause_on_a_gpu_has_its_seconds(what, weighed, tmp_path):
    changed, kind, seconds = EAGER[what]
    gap = gap_of(kineto_trace([eager_step(**changed).write(tmp_path / "t.json")]), weighed)
    found = next(cause for cause in gap.causes if cause.kind == kind)
    assert found.seconds == pytest.approx(seconds, rel=0.35)
    named = sum(cause.seconds for cause in gap.causes)
    assert named + gap.unexplained_seconds == pytest.approx(gap.gap_seconds)


def test_the_file_of_one_rank_among_many_has_its_whole_step(weighed, tmp_path):
    t = eager_step(item=True)
    alone = gap_of(kineto_trace([t.write(tmp_path / "t.json")]), weighed)
    t.about["distributedInfo"] = {"backend": "nccl", "rank": 3, "world_size": 8}
    third = gap_of(kineto_trace([t.write(tmp_path / "t3.json")]), weighed)
    assert third.measured_seconds == pytest.approx(alone.measured_seconds)
    assert [cause.kind for cause in third.causes] == [cause.kind for cause in alone.causes]
    assert third.measured_seconds > 0


def test_a_product_that_a_convolution_launches_is_of_the_convolution(tmp_path):
    t = Kineto().step(0, 0, 1000).op("aten::cudnn_convolution", 10, 80).launch(GEMM, 20, 30, 50)
    (work,) = kineto_trace([t.write(tmp_path / "t.json")]).work
    assert work.kind == "convolution"


def test_a_forward_pass_alone_is_said_to_be_one_and_is_no_further_work(weighed, tmp_path):
    t = Kineto().step(0, 0, 3000).python("nn.Module: Linear_0", 0, 2900)
    t.op("aten::addmm", 10, 900, dims=[[64], [64, 64], [64, 64]]).launch(GEMM, 20, 30, 2500)
    gap = gap_of(kineto_trace([t.write(tmp_path / "t.json")]), weighed)
    assert "extra work" not in {cause.kind for cause in gap.causes}
    assert any("it is of a forward pass alone" in note for note in gap.notes)


def test_kernels_are_counted_by_module_and_those_of_none_are_said(weighed, tmp_path):
    t = Kineto().step(0, 0, 4000).python("nn.Module: DistributedDataParallel_0", 0, 900)
    t.python("nn.Module: Linear_0", 1, 800).op("aten::addmm", 10, 700, sequence=5).launch(GEMM, 20, 30, 100)
    t.op("autograd::engine::evaluate_function: AddmmBackward0", 1000, 200, BACKWARD, 5, 1)
    t.op("aten::mm", 1001, 90, BACKWARD).launch(GEMM, 1010, 1020, 200, BACKWARD)
    t.python("nn.Module: Other_3", 1500, 300).op("aten::mul", 1510, 200).launch(ADD, 1520, 1530, 50)
    t.op("aten::sort", 2000, 100).launch(ADD, 2010, 2020, 40)
    t.put("user_annotation", "Optimizer.step#AdamW.step", 3000, 500)
    t.op("aten::add_", 3010, 90).launch(ADD, 3020, 3030, 60)
    gap = gap_of(kineto_trace([t.write(tmp_path / "t.json")]), weighed)
    found = {row.name: (round(row.seconds * 1e6), row.num_kernels, row.is_weighed) for row in gap.modules}
    assert found == {
        "Linear": (300, 2, True),
        "(the update)": (60, 1, None),
        "Other": (50, 1, False),
        "(outside of modules)": (40, 1, None),
    }
    flops = next(row.flops for row in gap.modules if row.name == "Linear")
    assert flops == sum(weighed.account.modules[0].flops_by_phase.values())
    words = " ".join(str(gap).split())
    assert "2 kernels of a step, 22 % of their time, belong to no module" in words
    assert (
        "1 kernels of a step, 11 % of their time, are of modules that the weighed program does not" in words
    )


def test_messages_that_nothing_hides_are_counted_by_module(weighed, tmp_path):
    """A product of 200 us hides the first third of a gather of 300 us; the step takes 1,000."""
    t = Kineto().step(0, 0, 1000).python("nn.Module: Linear_0", 1, 800)
    t.op("aten::addmm", 10, 700, sequence=5).launch(GEMM, 20, 100, 200)
    facts = {"Collective name": "allgather", "In msg nelems": 64, "Out msg nelems": 64, "dtype": "Float"}
    t.launch("ncclDevKernel_AllGather", 30, 200, 300, stream=20, **facts)
    gap = gap_of(kineto_trace([t.write(tmp_path / "t.json")]), weighed)
    (row,) = gap.modules
    assert (row.name, round(row.seconds * 1e6), round(row.exposed_seconds * 1e6)) == ("Linear", 500, 200)
    assert gap.to_dict()["modules"][0]["exposed_seconds"] == row.exposed_seconds
    shown = " ".join(str(gap).split())
    assert "messages not hidden" in shown
    assert "200 us" in shown


def test_the_page_draws_the_measured_step_from_its_beginning_to_its_end(weighed, tmp_path):
    gap = gap_of(kineto_trace([eager_step(item=True).write(tmp_path / "t.json")]), weighed)
    blocks = [block for section in gap.page_document().sections for block in section.blocks]
    (lanes,) = [block for block in blocks if isinstance(block, Lanes)]
    measured = next(lane for lane in lanes.lanes if lane.name.startswith("measured"))
    assert lanes.lanes[0].name.startswith("predicted")
    words = [column.words for column in measured.columns]
    assert "matmul 100 %" in words[1]
    assert "gaps between kernels 100 %" in words[-1]
    assert measured.columns[-1].end == pytest.approx(1)
    assert "busy" not in gap.to_dict()


def test_a_message_of_no_known_kind_is_not_called_too_much(tmp_path):
    from meshwright.contrib.causes._eager_work import _surplus_of_messages

    t = Kineto().step(0, 0, 1000).op("aten::mm", 10, 20).launch("ncclDevKernel_Generic(x)", 50, 60, 500)
    recorded = kineto_trace([t.write(tmp_path / "t.json")])
    assert [work.kind for work in recorded.work] == ["message"]
    account = SimpleNamespace(messages=[SimpleNamespace(kind="all-reduce", array_bytes=8)])
    assert _surplus_of_messages(recorded, account, 1.0) == {}
    assert _surplus_of_messages(recorded, SimpleNamespace(messages=[]), 1.0) == {"message": 1.0}
