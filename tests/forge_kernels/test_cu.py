"""CUDA files are built by the helper of the C++ ones; what is missing is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge.errors import KernelError
from forge_kernels.ops.cpp import build

SOURCE = """
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


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name in ("TORCH_CUDA_ARCH_LIST", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "twice.cu").write_text(SOURCE)
    return tmp_path / "twice.cu"


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: bool = True, cuda: str | None = "13.0") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", cuda)


def test_a_missing_nvcc_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setenv("CUDA_HOME", "/no/such/cuda")
    with pytest.raises(
        KernelError, match=r"compiler /no/such/cuda/bin/nvcc was not found .install the CUDA toolkit 13.0"
    ):
        build.build(source)


def test_architectures_are_torchs(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert build._architectures() == ["-gencode=arch=compute_90,code=sm_90"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a+PTX")
    assert build._architectures() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(KernelError, match="write capabilities as numbers"):
        build._architectures()


@pytest.mark.gpu
def test_a_cuda_file_is_built_loaded_and_right(source: Path) -> None:
    reason = build.missing(source)
    if reason is not None and "nvcc" in reason:
        pytest.skip(reason)
    assert reason is None
    x = torch.randn(1000, 7, device="cuda")
    assert torch.equal(torch.ops.forge_cu_test.twice(x), 2 * x)
    assert build.build(source) == build.build(source)
