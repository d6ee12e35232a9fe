from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

from meshwright.contrib.torch_eager import Fakes, mode_of  # noqa: E402
from meshwright.errors import InputError  # noqa: E402


def fakes():
    return Fakes(FakeTensorMode(allow_non_fake_inputs=True))


def test_a_copy_is_fake_and_keeps_shapes_ties_buffers_and_wishes_for_gradients():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    module[0].bias.requires_grad_(False)
    module.note, module[0].weight.kind = torch.zeros(3), "matrix"
    copy = fakes().module(module)
    assert all(isinstance(t, FakeTensor) for t in (*copy.parameters(), *copy.buffers(), copy.note))
    assert copy[2].weight is copy[0].weight
    assert isinstance(copy[0].weight, nn.Parameter)
    assert copy[0].weight.kind == "matrix"
    assert [p.requires_grad for p in copy.parameters()] == [p.requires_grad for p in module.parameters()]
    assert {k: (v.shape, v.dtype) for k, v in copy.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in module.state_dict().items()
    }
    assert not isinstance(module.note, FakeTensor)


def test_views_of_one_storage_stay_views_of_one_storage():
    whole = torch.empty(10, dtype=torch.bfloat16)
    first, second = fakes().tree([whole[:4], whole[2:].view(2, 4).t()])
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert (second.shape, second.stride(), second.storage_offset()) == ((4, 2), (1, 4), 2)
    assert second.untyped_storage().nbytes() == 20


def test_one_tensor_given_twice_stays_one():
    x = torch.empty(3)
    first, second = fakes().tree((x, {"again": x})).__iter__()
    assert first is second["again"]


def test_meta_tensors_become_the_cpus_and_others_keep_their_device():
    assert fakes().tensor(torch.empty(3, device="meta"), "x").device.type == "cpu"


def test_the_mode_of_fake_tensors_is_kept():
    mode = FakeTensorMode()
    with mode:
        module, x = nn.Linear(2, 2), torch.empty(3)
    assert mode_of(module) is mode
    assert mode_of(nn.ReLU(), [x]) is mode
    assert mode_of(nn.Linear(2, 2)) is not mode


def test_a_parameter_outside_of_the_modules_own_is_copied_too():
    module = nn.Linear(2, 2)
    module.others = [nn.Parameter(torch.zeros(5))]
    copy = fakes().module(module)
    assert isinstance(copy.others[0], FakeTensor)
    assert isinstance(module.others[0], nn.Parameter)


def test_old_weight_norm_whose_weight_is_no_leaf_is_copied():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    module.cached = module.weight * 2
    assert isinstance(fakes().module(module).cached, FakeTensor)


def test_a_lazy_module_has_no_shapes_yet():
    with pytest.raises(InputError) as raised:
        fakes().module(nn.LazyLinear(3))
    assert raised.value.message == "weight has no shape yet: the module is lazy"
    assert raised.value.hint == "call the module once on a small input first"


def test_unusual_tensors_are_refused():
    with pytest.raises(InputError, match=r"an input is a tensor of an unusual kind \(sparse_coo\)"):
        fakes().tree([torch.eye(3).to_sparse()])

    class Odd(torch.Tensor):
        pass

    with pytest.raises(InputError, match=r"an input is a tensor of an unusual kind \(Odd\)"):
        fakes().tree([torch.eye(3).as_subclass(Odd)])


def test_what_cannot_be_copied_is_said():
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(InputError, match="Linear cannot be copied: TypeError: cannot pickle") as raised:
        fakes().module(module)
    assert "locks" in raised.value.hint
