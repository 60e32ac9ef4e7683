"""all_finite in C++: built when it is first used, equal to plain torch, and plain torch where there is no compiler."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_kernels.ops.cpp import build
from forge_kernels.ops.cpp.finite import ALL_FINITE, DTYPES, SOURCE, all_finite

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None, reason="needs a C++ compiler and ninja"
)
shapes = st.lists(st.integers(0, 9), max_size=3)
values = st.sampled_from([0.0, 1.0, -3.5, 6e4, float("inf"), -float("inf"), float("nan")])


@needs_compiler
def test_the_cpp_is_built_and_takes_over_from_python():
    assert all_finite([torch.ones(3)])
    assert build.missing(SOURCE) is None
    assert torch._C._dispatch_has_kernel_for_dispatch_key("forge::all_finite", "CPU")


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), values), max_size=4))
def test_any_list_equals_the_reference(entries):
    tensors = [torch.randn(shape).to(dtype) for shape, dtype, _ in entries]
    for tensor, (_, _, value) in zip(tensors, entries, strict=True):
        if tensor.numel():
            tensor.view(-1)[-1] = value
    found = all_finite(tensors)
    assert found.dtype == torch.bool
    assert found.shape == ()
    assert torch.equal(found, ALL_FINITE.reference(tensors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_entry_of_a_long_tensor_is_seen(dtype):
    tensors = [torch.zeros(100_003, dtype=dtype), torch.zeros(70_001, dtype=dtype)]
    assert all_finite(tensors)
    tensors[1][-1] = float("nan")
    assert not all_finite(tensors)


def test_strides_do_not_matter():
    whole = torch.zeros(8, 6, 4)
    whole[3, 1, 2] = float("nan")
    assert not all_finite([whole.permute(2, 0, 1)])
    assert all_finite([whole[:, ::2]])
    assert not all_finite([whole[:, 1::2]])
    assert all_finite([whole[0, 0].expand(5, 4)])


@pytest.mark.parametrize("tensors", [[torch.arange(3)], [torch.ones(2, dtype=torch.complex64)], [], [torch.ones(0)]])
def test_what_the_cpp_does_not_take_goes_to_plain_torch(tensors):
    assert all_finite(tensors)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_inside_functorch_it_is_the_reference(transform):
    def loss(x):
        return torch.where(all_finite([x * 2]), x.sum(), 0.0)

    def right(x):
        return torch.where(ALL_FINITE.reference([x * 2]), x.sum(), 0.0)

    x = torch.ones(3, 2)
    assert torch.equal(transform(loss)(x), transform(right)(x))


def test_compiles_whole():
    torch.compiler.reset()
    compiled = torch.compile(all_finite, fullgraph=True, backend="aot_eager")
    bad = [torch.ones(5), torch.tensor([1.0, float("nan")])]
    assert compiled([torch.ones(5), torch.ones(2)])
    assert not compiled(bad)


def test_the_operator_is_registered_as_torch_asks():
    all_finite([torch.ones(1)])
    torch.library.opcheck(torch.ops.forge.all_finite.default, ([torch.ones(3), torch.ones(2, 2)],))


# -- building ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C++ file that takes no time to compile, and an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    path = tmp_path / "small.cpp"
    path.write_text('extern "C" int seven() { return 7; }\n')
    return path


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line from every run of the compiler that compiles a file."""
    log, wrapper = tmp_path / "runs", tmp_path / "counting"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo run >> {log};; esac\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", str(wrapper))
    return log


def built(source: Path) -> str | None:
    """Build as a new process would."""
    build.missing.cache_clear()
    return build.missing(source)


@needs_compiler
def test_what_is_built_is_kept_until_the_source_changes(source: Path, compiled: Path) -> None:
    assert built(source) is built(source) is None
    assert compiled.read_text().count("run") == 1
    source.write_text('extern "C" int seven() { return 8; }\n')
    assert built(source) is None
    assert compiled.read_text().count("run") == 2


@needs_compiler
def test_a_build_that_was_killed_keeps_nobody_waiting(source: Path, compiled: Path) -> None:
    assert built(source) is None
    (folder,) = source.with_name("cache").iterdir()
    next(folder.glob("*.so")).unlink()
    (folder / "lock").touch()  # as torch before 2.15 leaves it
    assert built(source) is None


@needs_compiler
def test_of_two_that_build_at_once_one_waits(source: Path, compiled: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(build.missing.__wrapped__, [source, source])) == [None, None]
    assert compiled.read_text().count("run") == 1


@needs_compiler
def test_an_error_of_the_compiler_is_shown(source: Path) -> None:
    source.write_text("int seven() { return eight; }\n")
    assert re.match(r"small\.cpp could not be built: .*error: .*eight", str(built(source)))


def test_a_missing_compiler_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert re.match(r"small\.cpp could not be built: .*no-such-compiler: .*not found", str(built(source)))


# -- CUDA -------------------------------------------------------------------------------------------------------------

TWICE = """
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

__global__ void doubled(const float* x, float* out, long count) {
  long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (i < count) out[i] = 2 * x[i];
}

at::Tensor twice(const at::Tensor& x) {
  const c10::cuda::CUDAGuard guard(x.device());
  auto in = x.contiguous();
  auto out = at::empty_like(in);
  if (in.numel())
    doubled<<<(in.numel() + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
        in.data_ptr<float>(), out.data_ptr<float>(), in.numel());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

TORCH_LIBRARY_FRAGMENT(forge_cu_test, m) { m.def("twice(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(forge_cu_test, CUDA, m) { m.impl("twice", &twice); }
"""


def test_a_cuda_file_without_a_device_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build.missing(source.with_name("twice.cu")) == "twice.cu needs a CUDA device, and torch finds none here"


@pytest.mark.gpu
def test_a_cuda_file_is_built_loaded_and_right(source: Path) -> None:
    if shutil.which("nvcc") is None or shutil.which("ninja") is None:
        pytest.skip("needs nvcc and ninja")
    path = source.with_name("twice.cu")
    path.write_text(TWICE)
    assert build.missing(path) is None
    x = torch.randn(1000, 7, device="cuda")
    assert torch.equal(torch.ops.forge_cu_test.twice(x), 2 * x)
