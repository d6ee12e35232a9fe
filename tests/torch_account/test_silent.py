from __future__ import annotations

import pytest

from meshwright.torch_account._flops import NAMES, is_silent


def test_in_place_forms_and_families_are_silent_too():
    for name in (
        "cumsum",
        "cumsum_",
        "_foreach_addcdiv_",
        "_fused_adamw_",
        "native_layer_norm_backward",
        "view_copy",
    ):
        assert is_silent(name), name


def test_products_are_not_silent():
    for name in (
        "mm",
        "addmm_",
        "_foreach_mm",
        "convolution",
        "linalg_qr",
        "_fft_r2c",
        "_cdist_forward",
        "cholesky",
    ):
        assert not is_silent(name), name


def test_each_name_is_an_operation_of_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    gone = [n for n in NAMES if not hasattr(torch.ops.aten, n) and not hasattr(torch.ops.aten, f"{n}_")]
    assert not gone
