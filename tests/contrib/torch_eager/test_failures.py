from __future__ import annotations

import inspect
import logging

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

import meshwright as mw  # noqa: E402
from meshwright.errors import InputError  # noqa: E402
from tests.contrib.torch_eager.steps import counted  # noqa: E402


def refused(*arguments, **keywords) -> InputError:
    with pytest.raises(InputError) as raised:
        counted(*arguments, **keywords)
    return raised.value


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def line_of(function) -> str:
    return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"


X = torch.randn(4, 8)


@pytest.mark.parametrize(
    ("module", "message", "hint"),
    [
        (nn.Linear, "Linear is a class, not a module", "make one: Linear(...)"),
        (
            lambda x: x,
            "function is no PyTorch module",
            "give a torch.nn.Module, or 'package.module:function'",
        ),
        (
            nn.DataParallel(nn.ReLU()),
            "the module is wrapped in DataParallel already",
            "give its .module; on a mesh, wrap it in the function that is given as parallelize",
        ),
    ],
)
def test_what_is_no_module_of_one_eager_device_is_said(module, message, hint):
    error = refused(module, X)
    assert error.message == message
    assert error.hint.startswith(hint)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_takes_no_fake_tensors():
    assert (
        "is compiled by TorchScript, which does not accept fake tensors"
        in refused(torch.jit.script(nn.ReLU()), X).message
    )


def test_arrays_of_other_libraries_are_no_tensors():
    error = refused(nn.Linear(8, 8), {"x": [np.zeros((4, 8))]})
    assert error.message == "an input is numpy's ndarray, not a tensor ([0][0]['x'][0])"
    assert error.hint == "torch.from_numpy(numpy.asarray(...)) makes one"


def test_an_optimizer_with_parameters_of_its_own_is_refused():
    layer = nn.Linear(8, 8)
    error = refused(layer, X, optimizer=torch.optim.Adam(layer.parameters()))
    assert (
        error.message == "the optimizer is a Adam that already holds real parameters; the account runs a copy"
    )
    assert error.hint == "give the class, torch.optim.Adam, or functools.partial(torch.optim.Adam, lr=...)"


@pytest.mark.parametrize("name", ["optimizer", "loss"])
def test_optimizer_and_loss_are_callable(name):
    error = refused(nn.Linear(8, 8), X, **{name: 7})
    assert error.message == f"the {name} is a int, not callable"


def test_autocast_is_a_floating_point_format():
    assert (
        refused(nn.Linear(8, 8), X, autocast="bf16").message
        == "autocast='bf16' is not a floating-point format"
    )
    assert refused(nn.Linear(8, 8), X, autocast=torch.int8).hint == "use torch.bfloat16 or torch.float16"


def test_a_wrong_shape_is_told_with_module_line_and_inputs():
    error = refused(nn.Sequential(nn.ReLU(), nn.Linear(9, 2)), X)
    assert error.message.startswith("the forward pass failed in 1 (Linear) inside PyTorch: RuntimeError: ")
    assert error.hint == "the inputs were fp32[4, 8]"
    function = lambda x: x @ x  # noqa: E731
    error = refused(nn.Sequential(Does(function)), X)
    assert error.message.startswith(
        f"the forward pass failed in 0 (Does) at {line_of(function)}: RuntimeError: "
    )


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x[x > 0], "the shape that aten.nonzero returns depends on the data"),
        (
            lambda x: x * x.sum().item(),
            "the number that aten._local_scalar_dense returns depends on",
        ),
        (
            lambda x: x if x.sum() > 0 else -x,
            "the number that aten._local_scalar_dense returns depends on",
        ),
    ],
)
def test_what_depends_on_the_data_is_told_with_its_operation_and_line(function, words):
    error = refused(Does(function), X)
    assert words in error.message
    assert f"in the module itself (Does) at {line_of(function)}" in error.message
    assert error.hint.startswith("account the module with that part replaced")


@pytest.mark.parametrize("weights", [None, torch.float32, torch.float16])
def test_bins_that_are_as_many_as_is_asked_depend_on_no_data(weights):
    """Rows are counted so for each expert; PyTorch's own shape is that of real numbers below the length."""
    given = torch.tensor([0, 2, 2, 6])
    heavy = None if weights is None else torch.ones(4, dtype=weights)
    real, seen = torch.bincount(given, heavy, minlength=8), []

    def count(x):
        bins = torch.bincount(given, heavy, minlength=8)
        seen.append((bins.shape, bins.dtype))
        return x * bins.to(x.dtype)

    counted(Does(count), X)
    assert set(seen) == {(real.shape, real.dtype)}
    assert "aten.bincount" in refused(Does(lambda x: x + torch.bincount(given).sum()), X).message


def test_an_operation_without_a_fake_form_is_told_how_to_get_one():
    with torch.library._scoped_library("meshwright_test", "DEF") as library:
        library.define("secret(Tensor x) -> Tensor")
        library.impl("secret", lambda x: x.clone(), "CPU")
        error = refused(Does(lambda x: torch.ops.meshwright_test.secret(x)), X)
    assert "meshwright_test.secret has no fake form" in error.message
    assert error.hint == "register it: @torch.library.register_fake('meshwright_test::secret')"


def test_a_failing_loss_and_a_failing_backward_pass_are_named():
    assert refused(nn.Linear(8, 8), X, loss=lambda _: 1 / 0).message.startswith("the loss failed at ")

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no gradient")

    error = refused(nn.Sequential(nn.Linear(8, 8), Does(Odd.apply)), X)
    assert error.message.startswith("the backward pass failed at ")
    assert error.message.endswith("ValueError: no gradient")


def test_another_device_fails_in_words():
    found = refused(Does(lambda x: x + torch.ones(4, 8, device="meta")), X)
    assert "on different devices, cpu and meta" in found.message
    assert "y.to(x.device)" in found.hint


def test_no_traceback_is_logged_and_the_log_is_afterwards_as_before(caplog):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    refused(nn.Linear(9, 2), X)
    assert not caplog.records
    assert logger.level == before


def test_a_module_split_over_two_devices_is_refused_as_pytorch_refuses_it():
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, device="meta"))
    with pytest.raises(RuntimeError, match="device"):
        module(torch.ones(2, 8))
    with pytest.raises(mw.InputError, match=r"0\.weight on cpu and 1\.weight on meta") as refused:
        counted(module, torch.ones(2, 8))
    assert "module.to('meta')" in refused.value.hint
    assert counted(module.to("meta"), torch.ones(2, 8)).num_parameters == 144


def test_buffers_may_be_real_where_parameters_are_not():
    """As `accelerate.init_empty_weights` leaves them."""
    module = torch.nn.BatchNorm1d(8, device="meta")
    module.running_mean = torch.zeros(8)
    assert counted(module, torch.ones(2, 8)).num_parameters == 16
