"""What a PyTorch module costs on a mesh, by hand, and what cannot be accounted, in words."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.distributed.tensor import Replicate  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.errors import InputError  # noqa: E402
from tests.contrib.torch_eager.steps import counted, weighed  # noqa: E402


class Stack(torch.nn.Module):
    """Square layers without biases."""

    def __init__(self, width=64, num_layers=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(width, width, bias=False) for _ in range(num_layers)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def weigh(module=None, *inputs, on="4xH100", **how):
    made = Stack() if module is None else module
    return weighed(made, *(inputs or (torch.zeros(8, 64),)), on=on, **how)


def messages(weighing):
    return {(m.kind, m.phase): (m.count, m.array_bytes, m.wire_bytes) for m in weighing.account.messages}


def test_each_repeated_block_is_gathered_twice_and_its_gradients_are_scattered_once():
    weighing = weigh(optimizer=torch.optim.AdamW)
    layer = 64 * 64 * 4
    assert str(weighing.layout) == "fsdp=4"
    assert messages(weighing) == {
        ("all-gather", "forward"): (3, 3 * layer, 3 * layer * 3 // 4),
        ("all-gather", "backward"): (3, 3 * layer, 3 * layer * 3 // 4),
        ("reduce-scatter", "backward"): (3, 3 * layer, 3 * layer * 3 // 4),
    }
    (rank,) = weighing.account.ranks  # the shards are even, so the last rank is as the first
    assert rank.parameters_bytes == rank.gradients_bytes == 3 * layer // 4
    assert rank.optimizer_state_bytes == 2 * 3 * layer // 4 + 3 * 4  # and a step's number for each layer
    assert rank.flops_by_phase == {
        "forward": 3 * 2 * 8 * 64 * 64,
        "backward": 5 * 2 * 8 * 64 * 64,  # the first layer's input has no gradient
        "recomputed": 0,
        "optimizer": 0,
    }
    assert weighing.ledger.flops.executed == 4 * 8 * 2 * 8 * 64 * 64
    assert weighing.ledger.flops.by_module == {"layers/*": weighing.ledger.flops.executed}
    assert weighing.fits is True


def test_blocks_below_which_all_is_frozen_are_gathered_once_more_for_no_backward_pass():
    """FSDP2 gathers ahead in the backward pass, and lets go of what none used: of the frozen block below."""
    made = Stack()
    for layer in made.layers[:2]:
        layer.requires_grad_(False)
    weighing, layer = weigh(made, optimizer=torch.optim.AdamW), 64 * 64 * 4
    assert messages(weighing) == {
        ("all-gather", "forward"): (3, 3 * layer, 3 * layer * 3 // 4),
        ("all-gather", "backward"): (2, 2 * layer, 2 * layer * 3 // 4),
        ("reduce-scatter", "backward"): (1, layer, layer * 3 // 4),
    }
    (rank,) = weighing.account.ranks
    assert rank.gradients_bytes == layer // 4
    assert rank.optimizer_state_bytes == 2 * layer // 4 + 4
    assert rank.flops_by_phase["backward"] == 2 * 8 * 64 * 64


@pytest.mark.parametrize("layout", ["fsdp=4", "data=4"])
def test_a_sparse_gradient_on_a_mesh_is_told_apart(layout):
    with pytest.raises(InputError, match=r"the backward pass failed .*a gradient is sparse") as raised:
        weigh(torch.nn.EmbeddingBag(100, 8, sparse=True), torch.zeros(4, 8, dtype=torch.long), layout=layout)
    assert raised.value.hint.startswith("give the embedding sparse=False")


class Nested(torch.nn.Module):
    """Layers that are lists, whose entries the module calls itself."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2)) for _ in range(3))
        self.pairs = torch.nn.ModuleList(pairs)

    def forward(self, x):
        for first, second in self.pairs:
            x = second(first(x).relu())
        return x.sum()


def test_of_lists_of_lists_each_innermost_module_is_a_block():
    gathers = messages(weigh(Nested()))["all-gather", "forward"]
    assert gathers[:2] == (6, 6 * 64 * 64 * 4)


def test_the_memory_adds_up_in_each_of_its_forms():
    memory = weigh(optimizer=torch.optim.AdamW).ledger.memory
    assert sum(memory.by_category.values()) == memory.reserved_bytes
    by_buffer = dict.fromkeys(memory.by_category, 0)
    for buffer in memory.buffers:
        by_buffer[buffer.category] += buffer.num_bytes
    idle = memory.by_category.get("fragmentation", 0)
    by_buffer["fragmentation"] = idle
    assert {k: v for k, v in by_buffer.items() if v} == memory.by_category
    place = memory.timeline.instants.index(memory.timeline.peak_instant)
    at_peak = {name: sizes[place] for name, sizes in memory.timeline.by_category.items() if sizes[place]}
    assert at_peak == {name: size for name, size in memory.by_category.items() if name != "fragmentation"}
    for sizes in zip(*memory.timeline.by_category.values(), strict=True):
        assert sum(sizes) <= memory.peak_bytes
    for name in ("parameters", "gathered_parameters", "optimizer_state", "saved_activations"):
        assert name in memory.timeline.by_category, name


def test_uneven_shards_are_padded_and_both_ends_of_the_mesh_are_run():
    weighing = weigh(torch.nn.Sequential(torch.nn.Linear(64, 5, bias=False)), torch.zeros(8, 64))
    first, last = weighing.account.ranks
    assert (first.rank, last.rank) == (0, 3)
    assert first.parameters_bytes == last.parameters_bytes == 2 * 64 * 4  # two rows, also where none is left
    assert messages(weighing)["all-gather", "forward"][1] == 4 * 2 * 64 * 4


@pytest.mark.parametrize("rows", [5, 64, 100])
def test_more_ranks_take_no_more_operations(rows, monkeypatch):
    """FSDP2 makes a shard for each rank, of which it reads two: the others were minutes of a large mesh."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    dispatched = []
    original = FakeTensorMode.dispatch

    def dispatch(self, func, *args, **kwargs):
        dispatched.append(func)
        return original(self, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", dispatch)
    module = torch.nn.Sequential(torch.nn.Linear(64, rows, bias=False))
    counts, ranks = [], []
    for devices in (128, 512):
        dispatched.clear()
        ranks.append(weigh(module, torch.zeros(8, 64), on=f"{devices}xH100").account.ranks)
        counts.append(len(dispatched))
    assert abs(counts[1] - counts[0]) < 128
    assert all(rank.parameters_bytes == 64 * 4 for both in ranks for rank in both), (
        "a row, also where none is"
    )


def split(module, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(module, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})


@pytest.mark.parametrize("layout", ["tensor=2", "tensor=4"])
def test_a_split_over_tensor_divides_the_flops_of_a_rank_and_sends_one_sum_each_way(layout):
    module = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False))
    x = torch.zeros(8, 64, requires_grad=True)
    size = int(layout[-1])
    alone = weigh(module, x, on="1xH100").account.ranks[0]
    weighing = weigh(module, x, on=f"{size}xH100", layout=layout, parallelize=split)
    rank = weighing.account.ranks[0]
    assert rank.flops_by_phase == {phase: count // size for phase, count in alone.flops_by_phase.items()}
    assert rank.parameters_bytes == alone.parameters_bytes // size
    whole = 8 * 64 * 4
    assert messages(weighing) == {
        ("all-reduce", "forward"): (1, whole, 2 * whole * (size - 1) // size),
        ("all-reduce", "backward"): (1, whole, 2 * whole * (size - 1) // size),
    }
    assert {item.axes for item in weighing.ledger.traffic} == {("tensor",)}


def test_data_and_fsdp_are_hybrid_and_data_alone_is_ddp():
    hybrid = weigh(on="16xH100", layout="data=2,fsdp=8")
    layer = 64 * 64 * 4
    assert {(item.kind, item.axes, item.link) for item in hybrid.ledger.traffic} == {
        ("all-gather", ("fsdp",), "inside"),
        ("reduce-scatter", ("fsdp",), "inside"),
        ("all-reduce", ("data",), "between"),
    }
    assert messages(hybrid)["all-reduce", "backward"][1] == 3 * layer // 8
    replicated = weigh(layout="data=4")
    assert messages(replicated) == {("all-reduce", "backward"): (1, 3 * layer, 3 * layer * 2 * 3 // 4)}
    assert replicated.account.ranks[0].parameters_bytes == 3 * layer
    assert replicated.ledger.memory.timeline.by_category["communication_buffers"][0] == 3 * layer


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own modules, when they are imported
def test_a_plan_compiled_by_torch_runs_as_it_was_written():
    def compiled(module, mesh):
        from torch.distributed.fsdp import fully_shard

        for layer in module.layers:
            layer.compile()
        fully_shard(module, mesh=mesh["fsdp"])

    weighing = weigh(parallelize=compiled)
    assert weighing.account.ranks[0].flops_by_phase["forward"] == 3 * 2 * 8 * 64 * 64


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_module_compiled_by_torch_is_weighed_by_its_original_and_has_no_time():
    plain = weigh()
    method = Stack()
    method.compile()
    for compiled in (torch.compile(Stack()), method):
        weighing = weigh(compiled)
        assert weighing.account.name == "Stack"
        assert weighing.account.messages == plain.account.messages
        assert weighing.account.ranks == plain.account.ranks
        assert (plain.prediction is None, weighing.prediction is None) == (False, True)
        assert "parts are compiled by torch.compile" in weighing.account.no_prediction
        assert any("compiles counts as it was written" in words for words in weighing.ledger.assumptions)


class CompiledDescent(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            torch.compile(lambda p: p.sub_(p.grad))(parameter)


def test_an_optimizer_that_compiles_its_step_leaves_no_time_and_is_said_once():
    weighing = weigh(optimizer=CompiledDescent)
    assert weighing.prediction is None
    assert "parts are compiled by torch.compile" in weighing.account.no_prediction
    said = [words for words in weighing.ledger.assumptions if "compiles counts as it was written" in words]
    assert len(said) == 1


def test_loss_parallel_holds_through_the_backward_pass_wherever_it_is_entered():
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    def plan(module, mesh):
        parallelize_module(module, mesh, ColwiseParallel(use_local_output=False))

    def loss(logits):
        with loss_parallel():
            return torch.nn.functional.cross_entropy(logits, torch.zeros(8, dtype=torch.long))

    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    head = torch.nn.Linear(64, 400, bias=False)
    weighing = weigh(head, on="4xH100", layout="tensor=4", parallelize=plan, loss=loss)
    # The largest logit, the sum of exponentials, and the logit of the target: a number for each row.
    assert messages(weighing)["all-reduce", "forward"][:2] == (3, 3 * 8 * 4)
    assert not [kind for kind, phase in messages(weighing) if phase == "backward"]
    assert weighing.account.ranks[0].saved_activation_bytes < 8 * 400 * 4
    assert handlers == DTensor._op_dispatcher._custom_op_handlers


def test_offloaded_shards_lie_on_the_host_with_their_gradients_and_the_optimizers_state():
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def spread(policy):
        def plan(module, mesh):
            for layer in module.layers:
                fully_shard(layer, mesh=mesh, **policy)
            fully_shard(module, mesh=mesh, **policy)

        return plan

    layer, how = 256 * 256 * 4, {"optimizer": torch.optim.AdamW}
    inputs = torch.zeros(2, 256)
    kept = weigh(Stack(256), inputs, parallelize=spread({}), **how)
    offloaded = weigh(Stack(256), inputs, parallelize=spread({"offload_policy": CPUOffloadPolicy()}), **how)
    assert offloaded.account.messages == kept.account.messages
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert getattr(offloaded.account.ranks[0], name) == getattr(kept.account.ranks[0], name), name
    shards = 3 * layer // 4
    # Parameters, gradients, two moments, and a step's number for each layer.
    assert offloaded.ledger.memory.host_bytes == 4 * shards + 3 * 4
    by_category = offloaded.ledger.memory.timeline.by_category
    assert not {"parameters", "optimizer_state"} & set(by_category)
    assert by_category["gradients"][-1] == 0  # each is there until it is copied
    # Each gather copies its shard to the device first.
    assert offloaded.ledger.memory.peak_bytes < kept.ledger.memory.peak_bytes - 3 * shards + layer // 4 + 1
    assert offloaded.prediction is None
    assert "in the host's memory" in offloaded.account.no_prediction
    assert "in host memory" in offloaded.to_html()

    class Keeps(torch.optim.Optimizer):  # as torchao's do, whose state is not made of the parameters
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                local = parameter.to_local()
                self.state[parameter]["kept"] = torch.zeros(local.shape, device=local.device)

    how = {"optimizer": Keeps, "parallelize": spread({"offload_policy": CPUOffloadPolicy()})}
    assert weigh(Stack(256), inputs, **how).ledger.memory.host_bytes == 3 * shards


def test_activations_that_are_saved_on_the_cpu_leave_the_device():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

    def plan(module, mesh):
        for place, layer in enumerate(module.layers):
            module.layers[place] = offload_wrapper(layer)

    rows = torch.zeros(4096, 64, requires_grad=True)
    kept = weigh(Stack(), rows, on="1xH100", parallelize=lambda module, mesh: None)
    offloaded = weigh(Stack(), rows, on="1xH100", parallelize=plan)
    one, weight = 4096 * 64 * 4, 64 * 64 * 4
    assert kept.ledger.memory.host_bytes == 0
    assert offloaded.ledger.memory.host_bytes == 3 * (one + weight)  # what each layer's product needs
    assert offloaded.account.ranks[0].flops_by_phase == kept.account.ranks[0].flops_by_phase


def pipelined(module, mesh):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(module, mesh.get_local_rank(), 4, torch.device("cpu"), group=mesh.get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: output.sum())

    class Runs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stage = module

        def forward(self, x):
            return schedule.step(x)

    return Runs()


def older_replicate(module, mesh):
    from torch.distributed._composable.replicate import replicate

    replicate(module, device_mesh=mesh)


def fsdp1(module, mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module)


def on_cuda(module, mesh):
    module.cuda()


def split_first(module, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    parallelize_module(module.layers[0], mesh, ColwiseParallel(output_layouts=Replicate()))


def fails(module, mesh):
    raise KeyError(mesh.mesh_dim_names[0])


@pytest.mark.parametrize(
    ("how", "message", "hint"),
    [
        ({"layout": "tensor=4"}, "how to split the module over tensor is not known", "give parallelize=f"),
        ({"layout": "fsdp=2,data=2"}, "replicas of FSDP2's shards lie outside", "write data=2,fsdp=2"),
        ({"layout": "fsdp=3"}, "layout fsdp=3: fsdp = 3 is not the fleet's 4 devices", "use fsdp=4"),
        ({"parallelize": 3}, "parallelize is a int, not callable", "give a function of the module"),
        ({"parallelize": lambda module: module}, "parallelize cannot be called with a module", "def f("),
        ({"parallelize": fails}, "parallelize failed at ", "it is called with the module and a mesh"),
        ({"parallelize": lambda module, mesh: 3}, "parallelize returned a int, not a module", "return the"),
        (
            {"parallelize": pipelined, "layout": "stage=4"},
            "the module runs ScheduleGPipe, a schedule of a pipeline",
            "pipelines are not accounted: give the module of one stage",
        ),
        (
            {"parallelize": older_replicate, "layout": "data=4"},
            "the forward pass failed in the module itself (DDPStack) inside PyTorch: code outside of",
            "make it an operation: torch.library.custom_op",
        ),
        ({"parallelize": fsdp1}, "parallelize failed at ", "call torch.distributed.fsdp.fully_shard"),
        (
            {"parallelize": on_cuda},
            "parallelize failed in layers.0 (Linear)",
            "spread the module over",
        ),
        (
            {"parallelize": split_first, "layout": "tensor=4", "optimizer": torch.optim.AdamW},
            "the optimizer failed inside PyTorch: it updates DTensors and plain tensors together",
            "let parallelize spread every parameter",
        ),
        (
            {"optimizer": torch.optim.Adafactor},
            "the optimizer failed inside PyTorch: DTensor has no rule for one of its operations",
            "give an optimizer that takes sharded parameters",
        ),
        ({"on": "v5p-8"}, "a PyTorch module is weighed as PyTorch runs it on GPUs, and v5p is a", "name a"),
        (
            {"run": mw.RunLength(tokens="1B")},
            "Stack is not a configuration, and the number of tokens",
            "state it: ",
        ),
        ({"overrides": ["a=1"]}, "a PyTorch module takes no overrides", "leave overrides"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_spread_is_said(how, message, hint):
    with pytest.raises(InputError) as raised:
        weigh(**how)
    assert raised.value.message.startswith(message)
    assert raised.value.hint.startswith(hint)


def test_a_parameter_without_rows_is_told_by_name():
    class Scaled(Stack):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return super().forward(x) * self.scale

    with pytest.raises(InputError, match="scale is a single number") as raised:
        weigh(Scaled())
    assert raised.value.hint.startswith("make it a tensor of shape [1]")


def test_a_part_that_runs_outside_of_its_block_is_told_how_it_is_gathered():
    class Reaches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                [torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(2)]
            )

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.blocks[0][0](x)  # without its block, whose parameters are sharded again

    with pytest.raises(
        InputError, match=r"failed in blocks\.0\.0 \(Linear\).*parameters are sharded"
    ) as raised:
        weigh(Reaches())
    assert "call fully_shard on this part too" in raised.value.hint


def test_the_allocator_reserves_beside_the_optimizers_state_what_a_later_step_needs():
    layer = torch.nn.Linear(4096, 4096, bias=False)  # 64 MiB, and twice that of AdamW
    weighing = weigh(layer, torch.zeros(16_384, 4096), on="1xH100", optimizer=torch.optim.AdamW)
    (rank,) = weighing.account.ranks
    held = 3 * 4 * 4096 * 4096
    rows = 4 * 16_384 * 4096  # the input, the result, and the result's gradient
    assert rank.peak_bytes >= held + 2 * rows
    assert rank.reserved_bytes >= rank.peak_bytes


def test_a_process_that_is_a_rank_already_is_told_to_name_a_function(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(InputError, match=r"torch\.distributed is initialised in this process") as raised:
        weigh()
    assert "package.module:function" in raised.value.hint


def test_a_module_that_is_spread_already_is_told_to_give_what_spreads_it():
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    module = Stack()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (4,)))
    finally:
        dist.destroy_process_group()
    with pytest.raises(InputError, match="FSDPStack are spread over a mesh already") as raised:
        counted(module, torch.zeros(8, 64))
    assert raised.value.hint.endswith("the function that spreads it as parallelize")


def test_nothing_is_left_of_the_ranks():
    import torch.distributed as dist

    def found():
        return torch.UntypedStorage.resize_, torch.nn.functional.dropout, dist.Reducer, sys.excepthook

    before = found()
    weigh(layout="data=4")
    assert not dist.is_initialized()
    assert found() == before


def test_it_prints_as_other_weighings_do_and_comes_as_json_and_as_a_page(tmp_path):
    weighing = weigh(optimizer=torch.optim.AdamW, run=mw.RunLength(tokens_per_step="2K"))
    text = str(weighing)
    assert text.startswith("Stack on 4xH100, layout fsdp=4, 12.3K parameters, 2,000 tokens per step\nFITS: ")
    fields = weighing.to_dict()
    assert fields["pytorch"]["messages"][0]["axes"] == ("fsdp",)
    assert fields["ledger"]["memory"]["fits"] is True
    page = weighing.to_html(tmp_path / "page.html")
    for words in ("Collectives of one rank by phase", "Ranks that were run", "gathered parameters"):
        assert words in page


class Routed(torch.nn.Module):
    """A block whose router is in fp32 between matrices in bf16, as transformers keeps some."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(64, 8, bias=False, dtype=torch.float32)
        self.up = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.up(x) * self.router(x.float()).softmax(-1).amax(-1, keepdim=True).to(x.dtype)


def routed(block=Routed):
    module = torch.nn.Sequential(block(), block(), block())
    return module, torch.zeros(2, 16, 64, dtype=torch.bfloat16)


def test_parameters_of_another_format_are_units_of_their_own():
    made = weigh(*routed(), optimizer=torch.optim.AdamW)
    assert any("*.router.weight (float32) are units of their own" in each for each in made.ledger.assumptions)
    gathered = [m.array_bytes for m in made.account.messages if m.kind == "all-gather"]
    assert sum(gathered) == 2 * 3 * (64 * 8 * 4 + 64 * 64 * 2)  # in both passes, each format by itself


def test_parameters_of_another_format_without_a_module_of_their_own_are_named():
    class Bare(Routed):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(64, dtype=torch.float32))

    with pytest.raises(InputError, match=r"together.* on real ranks: \*\.scale\n") as raised:
        weigh(*routed(Bare))
    assert "MixedPrecisionPolicy" in raised.value.hint


def test_a_plan_that_mixes_formats_in_a_unit_is_refused_by_the_names_of_parameters():
    def parallelize(module, mesh):
        for block in module:
            torch.distributed.fsdp.fully_shard(block, mesh=mesh["fsdp"])

    with pytest.raises(InputError, match=r"real ranks: \*\.router\.weight \(float32\)\n"):
        weigh(*routed(), parallelize=parallelize)
