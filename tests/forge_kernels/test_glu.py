"""swiglu and geglu against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import KernelError
from forge_kernels.ops.glu import GEGLU, SWIGLU, swiglu
from tests.support.kernel_kit import (
    DEVICE,
    check_against_reference,
    check_compiles_whole,
    check_launches_where_the_tensors_are,
    check_second_derivative_is_refused,
    check_transformed,
    every_transform,
    few,
    run,
)

both = pytest.mark.parametrize("kernel", [SWIGLU, GEGLU], ids=lambda kernel: kernel.name)
shapes = st.lists(st.integers(0, 20), min_size=1, max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def pair(shape, dtype, scale=1.0):
    return [(torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_() for _ in range(2)]


@both
@few
@given(shape=shapes, dtype=dtypes, scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_any_shape_and_dtype_equals_the_reference(kernel, shape, dtype, scale):
    check_against_reference(kernel, pair(shape, dtype, scale))


@both
def test_strides_do_not_matter(kernel):
    whole = torch.randn(33, 2, 20, device=DEVICE).transpose(0, 2).requires_grad_()
    check_against_reference(kernel, [whole[:, 0], whole[:, 1].detach().requires_grad_()])


@both
def test_halves_of_a_wider_tensor_are_read_in_place(kernel, monkeypatch):
    from forge_kernels.triton import glu as triton_glu

    monkeypatch.setattr(triton_glu, "FORWARD", (16, 4))
    monkeypatch.setattr(triton_glu, "BACKWARD", (16, 4))
    whole = torch.randn(2, 3, 100, device=DEVICE, requires_grad=True)
    gate, up = whole.chunk(2, -1)
    for part, rows in zip((gate, up), triton_glu._as_rows(gate, up), strict=True):
        assert rows.data_ptr() == part.data_ptr()
    check_against_reference(kernel, [part.detach().requires_grad_() for part in (gate, up)])
    (result,) = torch.autograd.grad(kernel.function(gate, up).sum(), whole)
    torch.testing.assert_close(result, torch.autograd.grad(kernel.reference(gate, up).sum(), whole)[0])


@both
def test_compiles_whole(kernel):
    check_compiles_whole(kernel, pair((3, 100), torch.float32))


def test_the_operator_is_registered_as_torch_asks():
    from forge_kernels.triton.glu import glu

    torch.library.opcheck(glu, (*pair((3, 5), torch.float32), "silu"))


@both
def test_it_can_be_differentiated_once_only(kernel):
    gate, up = pair((3, 5), torch.float32)
    check_second_derivative_is_refused(lambda gate: kernel.function(gate, up), gate)


def test_it_runs_on_the_device_of_its_tensors(monkeypatch):
    from forge_kernels.triton import glu as triton_glu

    args = pair((3, 5), torch.float32)
    check_launches_where_the_tensors_are(monkeypatch, triton_glu, lambda: run(swiglu, args, {}))


@every_transform
@both
def test_transforms_run_as_plain_torch(kernel, transform):
    gate, up = (x.detach() for x in pair((3, 5), torch.float32))
    check_transformed(transform, lambda x: kernel.function(x, up), lambda x: kernel.reference(x, up), gate)


@both
def test_what_is_not_floating_point_is_refused(kernel):
    whole = torch.ones(3, 5, device=DEVICE, dtype=torch.int64)
    with pytest.raises(KernelError, match=f"{kernel.name} needs floating-point tensors; gate is int64"):
        kernel.function(whole, whole)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(KernelError, match=r"same shape.*\(3, 5\).*\(5, 3\)"):
        swiglu(torch.ones(3, 5, device=DEVICE), torch.ones(5, 3, device=DEVICE))
