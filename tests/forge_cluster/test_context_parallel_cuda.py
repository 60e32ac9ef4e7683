"""context_parallel on a GPU: the kernels that the ring runs around, on one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from forge_cluster.context_parallel.ring import Ring

pytestmark = pytest.mark.gpu


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["flash", "efficient"])
@pytest.mark.parametrize("length", [24, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_the_ring_of_one_rank_is_attention(alone: None, dtype: torch.dtype, length: int, causal: bool) -> None:
    made = [torch.randn(2, heads, length, 32, device="cuda", dtype=dtype) for heads in (4, 2, 2)]
    results = []
    for ring in (Ring(dist.group.WORLD, True), None):
        q, k, v = own = [tensor.clone().requires_grad_() for tensor in made]
        if ring is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        else:
            out = ring.attend(q, k, v, causal, None)
        results.append((out, *torch.autograd.grad(out.square().sum(), own)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-3)
