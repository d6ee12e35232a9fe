from __future__ import annotations

import pytest

pytestmark = pytest.mark.quick

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from meshwright.contrib.torch_eager import NAMES, call_of, format_name, is_silent, tensor_text  # noqa: E402


def test_arguments_have_the_schemas_names_and_defaults():
    left, right = torch.empty(2, 3), torch.empty(3, 4)
    call = call_of(torch.ops.aten.addmm.default, (torch.empty(4), left, right), {"alpha": 2}, None)
    assert call.name == "aten.addmm"
    assert (call.shape("mat1"), call.shape("mat2"), call["beta"], call["alpha"]) == ((2, 3), (3, 4), 1, 2)
    assert str(call) == "aten.addmm(fp32[4], fp32[2, 3], fp32[3, 4])"


def test_tensors_in_lists_are_among_the_tensors():
    parts = [torch.empty(2), torch.empty(3)]
    assert call_of(torch.ops.aten.cat.default, (parts,), {}, None).tensors() == parts


def test_formats_have_our_names_and_where_we_have_none_pytorchs():
    names = (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64, torch.bits8)
    assert [format_name(dtype) for dtype in names] == [
        "bf16", "fp8-e4m3", "int64", "bool", "complex fp32", "bits8",
    ]  # fmt: skip
    assert tensor_text(torch.empty(8, 1024, dtype=torch.bfloat16)) == "bf16[8, 1024]"


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
    gone = [n for n in NAMES if not hasattr(torch.ops.aten, n) and not hasattr(torch.ops.aten, f"{n}_")]
    assert not gone
