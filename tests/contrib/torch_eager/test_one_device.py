from __future__ import annotations

import copy
import subprocess
import sys

import pytest

from meshwright.contrib.torch_eager import parts_of_function
from meshwright.errors import InputError
from meshwright.extras import how_to_install
from tests.contrib.torch_eager import steps
from tests.contrib.torch_eager.steps import counted

NOTHING_HEAVY = """
import sys
import meshwright.contrib.torch_eager
found = [name for name in ("torch", "jax") if name in sys.modules]
sys.exit(str(found) if found else 0)
"""


def test_the_package_imports_neither_torch_nor_jax():
    done = subprocess.run([sys.executable, "-c", NOTHING_HEAVY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_pytorch_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError) as raised:
        parts_of_function("examples.torch_modules:lenet", ())
    assert raised.value.message == "PyTorch is not installed"
    assert raised.value.hint == how_to_install("torch")


def test_a_linear_layer_counts_as_by_hand():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer, x = torch.nn.Linear(100, 10), torch.empty(32, 100)
    account = counted(layer, x, optimizer=torch.optim.AdamW, loss=lambda output: output.square().mean())
    assert account.num_parameters == 1010
    assert account.forward == 2 * 32 * 100 * 10
    assert account.backward == 2 * 32 * 100 * 10  # of the weights alone: the input asks for none
    assert account.by_operation == {"aten.addmm": 64_000, "aten.mm": 64_000}
    assert account.by_format == {"fp32": 128_000}
    rank = account.rank
    assert (rank.parameters_bytes, rank.gradients_bytes, rank.inputs_bytes) == (4040, 4040, 12_800)
    assert rank.optimizer_state_bytes == 2 * 4040 + 2 * 4  # two moments, and each parameter's step
    assert rank.saved_activation_bytes == 32 * 10 * 4  # the output, for the square
    assert rank.rule_of_thumb_bytes == 4040 + 4040 + 8088 + 1280


def test_inputs_may_be_given_by_name_and_nested():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Adds(torch.nn.Module):
        def forward(self, parts, *, scale, flag=False):
            return parts["left"] @ parts["right"][0] * scale if flag else None

    x = torch.empty(4, 4)
    account = counted(Adds(), {"left": x, "right": [x]}, scale=torch.ones(()), flag=True)
    assert account.forward == 2 * 4**3
    assert account.rank.inputs_bytes == 64 + 4


def test_a_module_that_would_not_fit_this_machine_takes_no_memory():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import resource

    with torch.device("meta"):
        wide = torch.nn.Sequential(*(torch.nn.Linear(65_536, 65_536) for _ in range(16)))
        x = torch.empty(1024, 65_536)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    account = counted(wide, x, optimizer=torch.optim.AdamW)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert account.num_parameters > 68e9
    assert account.rank.peak_bytes > 1e12
    assert grown * 1024 < 200e6


def test_a_gpu_takes_libraries_workspaces_besides_and_its_weighing_has_a_time():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer, x = torch.nn.Linear(100, 10), torch.empty(32, 100)
    on_gpu, on_cpu = (counted(layer, x, on=on) for on in ("1xRTX-4090", "1xCPU"))
    assert on_gpu.rank.flops_by_phase == on_cpu.rank.flops_by_phase
    workspaces = on_gpu.at_peak["workspaces"]
    assert on_gpu.rank.peak_bytes == on_cpu.rank.peak_bytes + workspaces
    assert on_gpu.weighing.fits is True
    assert (on_cpu.weighing.fits, on_cpu.weighing.prediction) == (None, None)


def test_modules_are_in_the_text_the_page_and_the_json(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    block = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))] * 2
    made = counted(torch.nn.Sequential(*map(copy.deepcopy, block)), torch.zeros(4, 8)).weighing
    page = made.to_html(tmp_path / "page.html")
    for words in ("Modules of one rank, with all inside them", "*/2", "Linear", "560"):
        assert words in page, words
    scopes = [module["scope"] for module in made.to_dict()["pytorch"]["modules"]]
    assert scopes == ["", "*", "*/0", "*/1", "*/2"]


@pytest.mark.parametrize("wrap", ["checkpoint", "ddp", "fsdp"])
def test_what_spreads_or_wraps_a_module_changes_no_scope(wrap):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)), torch.nn.ReLU())
    plain = counted(module, torch.zeros(4, 8))

    def checkpointed(given, mesh):
        apply_activation_checkpointing(given, check_fn=lambda part: isinstance(part, torch.nn.Linear))

    how = {
        "checkpoint": {"parallelize": checkpointed},
        "ddp": {"on": "2xCPU", "layout": "data=2"},
        "fsdp": {"on": "2xCPU", "layout": "fsdp=2"},
    }
    found = steps.weighed(module, torch.zeros(4, 8), **{"on": "1xCPU", **how[wrap]}).account.modules
    shown = [(each.scope, each.kind, each.num_parameters, each.flops_by_phase["forward"]) for each in found]
    assert shown == [
        (each.scope, each.kind, each.num_parameters, each.flops_by_phase["forward"])
        for each in plain.modules.values()
    ]
