"""The hand-written loops of `benchmarks.scale`: torch's own strategies, on the data and network of all contenders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

import forge
from benchmarks.cases import Batch, Transformer, loss_of
from forge.distributed.positions import set_slice

WORLD, WINDOW, MAX_NORM, BATCH, LENGTH = 2, 2, 1.0, 32, 32
WARM_UP = 5
PARTS = 4
"""Equal parts of a micro-batch in a pipeline."""

Weights = list[Tensor]
Hand = Iterator[Weights]
"""A hand-written loop: makes an update at each `next` and yields its weights."""


class Batches:
    """Global batches in memory."""

    def __init__(self, updates: int):
        self.updates = WARM_UP + updates + 1
        generator = torch.Generator().manual_seed(1)
        tokens = [torch.randint(64, (2, BATCH, LENGTH), generator=generator) for _ in range(8)]
        self.pool: list[Batch] = [(x, y) for x, y in tokens]

    def __len__(self) -> int:
        return self.updates * WINDOW

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            yield self.pool[index % len(self.pool)]


def loss(network: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return loss_of(network, (x, y.flatten()))


def make_network() -> Transformer:
    torch.manual_seed(0)
    return Divisible(width=128)


class Divisible(Transformer):
    """The Transformer, with positions of a slice."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + F.embedding(forge.positions(x), self.position)
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True)).flatten(0, 1)


def _share(batch: Batch) -> Batch:
    rank, size = dist.get_rank(), BATCH // WORLD
    return batch[0][rank * size : (rank + 1) * size], batch[1][rank * size : (rank + 1) * size]


def ddp_by_hand(batches: Batches, zero: bool = False) -> Hand:
    network = make_network()
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)

    def exchange(last: bool) -> None:
        model.require_backward_grad_sync = last  # what `no_sync` sets

    return _train(model, network, batches, exchange, zero)


def fsdp_by_hand(batches: Batches) -> Hand:
    network = make_network()
    for block in network.blocks.layers:
        fully_shard(block)
    model: Any = fully_shard(network)

    def exchange(last: bool) -> None:
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)

    return _train(model, network, batches, exchange)


def context_by_hand(batches: Batches) -> Hand:
    """DDP over slices of sequences: the head and tail of each rank, as torch's load balancer has them."""
    rank, network = dist.get_rank(), make_network()
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    pieces = torch.arange(LENGTH).chunk(2 * WORLD)
    own = torch.cat([pieces[rank], pieces[-1 - rank]])

    def exchange(last: bool) -> None:
        model.require_backward_grad_sync = last

    def slices() -> Iterator[Batch]:
        for x, y in batches:
            yield x[:, own], y[:, own]

    around = functools.partial(divided_by_hand, own, dist.group.WORLD)
    return _train(model, network, slices(), exchange, around=around, share=lambda batch: batch)


@contextmanager
def divided_by_hand(own: Tensor, group: Any) -> Iterator[None]:
    """Attend over the slices of all ranks of a group, inside the `with`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        return RingByHand.apply(q, k, v, group)

    plain = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attend  # pyright: ignore[reportAttributeAccessIssue]
    set_slice(own)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = plain  # pyright: ignore[reportAttributeAccessIssue]
        set_slice(None)


class RingByHand(torch.autograd.Function):
    """Causal attention over the slices of all ranks, by torch's private functions."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Any:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

        torchs._cp_options.convert_to_f32 = False
        torchs._cp_options.rotate_method = torchs._RotateMethod.ALL_TO_ALL  # forge's `safe_method` says why
        out, lse = torchs._templated_ring_attention(group, 2, attend, q, k, v, is_causal=True)  # pyright: ignore
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        def backward(is_causal: bool, **tensors: Tensor) -> Any:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                **tensors, dropout_p=0.0, is_causal=is_causal
            )

        back: Any = torchs._templated_ring_attention_backward
        given = (ctx.group, 2, backward, grads[0].contiguous(), "grad_out", *ctx.saved_tensors)
        return *back(*given, True)[:3], None


def _train(
    model: nn.Module,
    network: nn.Module,
    batches: Iterable[Batch],
    exchange: Callable[[bool], None],
    zero: bool = False,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    share: Callable[[Batch], Batch] | None = None,
) -> Hand:
    share = share or _share
    parameters = network.parameters()
    optimizer: Any = torch.optim.Adam(parameters, lr=1e-3) if not zero else None
    if zero:
        optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=1e-3)
    for index, batch in enumerate(batches, 1):
        last = index % WINDOW == 0
        exchange(last)
        with around():
            (loss(model, share(batch)) / WINDOW).backward()
        if last:
            clip_grad_norm_(network.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            yield list(network.parameters())


# -- pipelines --------------------------------------------------------------------------------------------------------


@functools.cache
def pipes() -> DeviceMesh:
    """Return the ranks as pipelines of two; made once, since it makes process groups."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "pipe"))


class HalfByHand(nn.Module):
    """One stage: half of the blocks. Embedding and head are on all ranks, as in forge's pipeline."""

    def __init__(self, stage: int):
        super().__init__()
        self.network, self.is_last = make_network(), stage == 1
        layers = self.network.blocks.layers
        half = len(layers) // 2
        self.network.blocks.layers = layers[half:] if self.is_last else layers[:half]

    def forward(self, x: Tensor) -> Tensor:
        network = self.network
        hidden = x if self.is_last else network.embed(x) + network.position
        hidden = network.blocks(hidden, mask=network.mask, is_causal=True)
        return network.head(hidden).flatten(0, 1) if self.is_last else hidden


def inside_and_shared(network: Any) -> tuple[list[Any], list[Any]]:
    """The parameters of the blocks, and those that both stages hold."""
    inside = list(network.blocks.layers.parameters())
    own = {id(parameter) for parameter in inside}
    return inside, [parameter for parameter in network.parameters() if id(parameter) not in own]


def part_loss(output: Tensor, target: Tensor) -> Tensor:
    """The loss of one micro-batch, as a share of that of a window."""
    return F.cross_entropy(output, target.flatten()) / (PARTS * WINDOW)


def pipeline_by_hand(batches: Batches, shard: bool = False) -> Hand:
    """1F1B. With `shard`, stages are divided by FSDP2, which torch gathers and scatters once per update."""
    mesh = pipes()
    stage, pipe = mesh["pipe"].get_local_rank(), mesh["pipe"].get_group()
    half = HalfByHand(stage)
    network = half.network
    if shard:
        for layer in network.blocks.layers:
            fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
        fully_shard(half, mesh=mesh["data"], reshard_after_forward=False)
    inside, shared = inside_and_shared(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    made = PipelineStage(half, stage, 2, torch.device("cpu"), group=pipe)
    schedule = Schedule1F1B(made, PARTS, loss_fn=part_loss, scale_grads=False)
    for index, batch in enumerate(batches, 1):
        last = index % WINDOW == 0
        x, y = (tensor.chunk(mesh["data"].size())[mesh["data"].get_local_rank()] for tensor in batch)
        given: dict[str, Any] = {"target": y} if stage else {}
        schedule.step(*() if stage else (x,), **given, return_outputs=False, finalize_gradients=last)
        if last:
            sum_over(shared, pipe)
            _clip_over(inside, shared, pipe)
            optimizer.step()
            optimizer.zero_grad()
            yield list(network.parameters())


def _grad(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad  # pyright: ignore[reportReturnType]


def sum_over(parameters: list[nn.Parameter], group: dist.ProcessGroup, divisor: int = 1) -> None:
    """Sum gradients, or average them; the embedding has none in the last stage, the head none in the first."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [_grad(parameter) for parameter in parameters]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    if divisor > 1:
        flat /= divisor
    for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(summed.view(gradient.shape))


def _clip_over(inside: list[nn.Parameter], shared: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Clip by the norm over all stages: blocks are different on each rank of a pipeline, the rest counts once."""
    own, common = (_norm(parameters).double() for parameters in (inside, shared))
    square = own**2
    dist.all_reduce(square, group=group)
    norm = torch.linalg.vector_norm(torch.stack([square**0.5, common])).float()
    clip_grads_with_norm_([*inside, *shared], MAX_NORM, norm)


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
