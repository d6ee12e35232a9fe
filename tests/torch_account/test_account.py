from __future__ import annotations

import subprocess
import sys

import pytest

import meshwright as mw
from meshwright.errors import InputError
from meshwright.extras import how_to_install

NOTHING_HEAVY = """
import sys
import meshwright.torch_account
found = [name for name in ("torch", "jax") if name in sys.modules]
sys.exit(str(found) if found else 0)
"""


def test_the_package_imports_neither_torch_nor_jax():
    done = subprocess.run([sys.executable, "-c", NOTHING_HEAVY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_pytorch_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError) as raised:
        mw.account_torch(object())
    assert raised.value.message == "PyTorch is not installed"
    assert raised.value.hint == how_to_install("torch")


def test_a_linear_layer_counts_as_by_hand():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    layer, x = torch.nn.Linear(100, 10), torch.empty(32, 100)
    account = mw.account_torch(
        layer, x, optimizer=torch.optim.AdamW, loss=lambda output: output.square().mean()
    )
    assert account.num_parameters == 1010
    assert account.flops.forward == 2 * 32 * 100 * 10
    assert account.flops.backward == 2 * 32 * 100 * 10  # of the weights alone: the input asks for none
    assert account.flops.by_operation == {"aten.addmm": 64_000, "aten.mm": 64_000}
    assert account.flops.by_format == {"fp32": 128_000}
    memory = account.memory
    assert (memory.parameters_bytes, memory.gradients_bytes, memory.inputs_bytes) == (4040, 4040, 12_800)
    assert memory.optimizer_state_bytes == 2 * 4040 + 2 * 4  # two moments, and each parameter's step
    assert memory.saved_activation_bytes == 32 * 10 * 4  # the output, for the square
    assert memory.hand_sum_bytes == 4040 + 4040 + 8088 + 1280


def test_inputs_may_be_given_by_name_and_nested():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Adds(torch.nn.Module):
        def forward(self, parts, *, scale, flag=False):
            return parts["left"] @ parts["right"][0] * scale if flag else None

    x = torch.empty(4, 4)
    account = mw.account_torch(Adds(), {"left": x, "right": [x]}, scale=torch.ones(()), flag=True)
    assert account.flops.forward == 2 * 4**3
    assert account.memory.inputs_bytes == 64 + 4


def test_a_module_that_would_not_fit_this_machine_takes_no_memory():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import resource

    with torch.device("meta"):
        wide = torch.nn.Sequential(*(torch.nn.Linear(65_536, 65_536) for _ in range(16)))
        x = torch.empty(1024, 65_536)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    account = mw.account_torch(wide, x, optimizer=torch.optim.AdamW)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert account.num_parameters > 68e9
    assert account.memory.peak_bytes > 1e12
    assert grown * 1024 < 200e6
