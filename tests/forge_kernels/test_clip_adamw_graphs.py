"""clip_adamw and ClipAdamW in CUDA graphs, which are emulated in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from forge.errors import KernelError
from forge_kernels.ops import clip_adamw_optimizer, clip_adamw_tables
from forge_kernels.ops.clip_adamw import CLIP_ADAMW, clip_adamw, ops
from forge_kernels.ops.clip_adamw_optimizer import ClipAdamW
from tests.support.clip_adamw_kit import (
    OPTIONS,
    assert_close,
    backward,
    both_step,
    flat,
    lists,
    mapped,
    network,
    pair,
    same,
)
from tests.support.kernel_kit import DEVICE

POISON = -0x5A5A


class Graph:
    """A CUDA graph in host memory: a capture writes copies and launches down, and only a replay does them."""

    capturing: Graph | None = None

    def __init__(self):
        self.work: list[Callable[[], Any]] = []

    def __enter__(self) -> Graph:
        Graph.capturing = self
        return self

    def __exit__(self, *error: object) -> None:
        Graph.capturing = None

    def replay(self) -> None:
        for each in self.work:
            each()


def do(work: Callable[[], Any]) -> None:
    if Graph.capturing is None:
        work()
    else:
        Graph.capturing.work.append(work)


class Launch:
    """A kernel that a capture writes down. It never reads a table that was not copied, and a capture's is kept."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            tables = [a for a in args if isinstance(a, Tensor) and a.dtype in (torch.int32, torch.int64)]
            if Graph.capturing is not None:
                kept = {t.data_ptr() for t in tensors_in(clip_adamw_tables._captured)}
                assert all(table.data_ptr() in kept for table in tables)

            def work() -> None:
                assert not any((table == POISON).any() for table in tables), "a table was read before it was copied"
                self.kernel[grid](*args, **options)

            do(work)

        return launch


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def copied(values: Tensor, device: torch.device) -> Tensor:
    there, here = torch.full_like(values, POISON), values.clone()
    do(lambda: there.copy_(here))
    return there


@pytest.fixture
def emulated_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        pytest.skip("real graphs are in test_kernel_clip_adamw_cuda.py")
    for module in (clip_adamw_tables, clip_adamw_optimizer):
        monkeypatch.setattr(module, "capturing", lambda device: Graph.capturing is not None)
    monkeypatch.setattr(clip_adamw_tables, "copied", copied)
    monkeypatch.setattr(clip_adamw_tables, "_captured", [])
    for name in ("_squares", "_settle", "_update"):
        monkeypatch.setattr(ops, name, Launch(getattr(ops, name)))


class Updates:
    """Updates of the same parameters, eager, captured and replayed, beside the reference of what has run."""

    def __init__(self):
        self.args = lists([(5,), (3, 4)])
        self.right = mapped(self.args, torch.clone)
        self.held: list[Any] = []

    def inputs(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Gradients at an address of their own, and a rate of their own."""
        grads = [torch.randn_like(p) for p in self.args[0]]
        self.held.append(grads)
        return grads, {**OPTIONS, "lr": 1e-3 * len(self.held)}

    def capture(self) -> Callable[[], None]:
        grads, options = self.inputs()
        before = mapped(self.args, torch.clone)
        with Graph() as graph:
            clip_adamw(self.args[0], grads, *self.args[2:], **options)
        assert same(flat(self.args), flat(before))

        def replay() -> None:
            graph.replay()
            self.compare(grads, options)

        return replay

    def eager(self) -> None:
        grads, options = self.inputs()
        clip_adamw(self.args[0], grads, *self.args[2:], **options)
        self.compare(grads, options)

    def compare(self, grads: list[Tensor], options: dict[str, Any]) -> None:
        CLIP_ADAMW.reference(self.right[0], grads, *self.right[2:], **options)
        for place in (0, 2, 3, 4):
            torch.testing.assert_close(self.args[place], self.right[place], rtol=1e-5, atol=1e-6)


def test_an_eager_step_after_an_unplayed_capture_sends_tables(emulated_graphs):
    updates = Updates()
    updates.capture()  # the first of all: it makes the plan
    updates.eager()
    updates.capture()
    grads, options = updates.held[-1], {**OPTIONS, "lr": 1e-3 * len(updates.held)}
    clip_adamw(updates.args[0], grads, *updates.args[2:], **options)  # the very values that were captured
    updates.compare(grads, options)


def test_a_graph_goes_on_with_its_own_tables(emulated_graphs):
    updates = Updates()
    updates.eager()
    first = updates.capture()
    second = updates.capture()
    second()
    first()
    updates.eager()
    third = updates.capture()
    for replay in (first, third, second, updates.eager, third, first, second):
        replay()


def test_a_second_graph_does_not_wait_for_the_first(emulated_graphs):
    args = lists([(5,)])
    right = mapped(args, torch.clone)
    graphs = [Graph(), Graph()]
    for graph in graphs:
        with graph:
            clip_adamw(*args, **OPTIONS)
    for graph in reversed(graphs):
        graph.replay()
        CLIP_ADAMW.reference(*right, **OPTIONS)
    torch.testing.assert_close(flat(args), flat(right), rtol=1e-5, atol=1e-6)


def test_a_graph_reads_a_rate_on_the_device_at_each_replay(emulated_graphs):
    args, rate = lists([(5,)]), torch.tensor(1e-2)
    right = mapped(args, torch.clone)
    options = {**OPTIONS, "lr": rate}
    with Graph() as graph:
        clip_adamw(*args, **options)
    for value in (1e-2, 0.5):
        rate.fill_(value)
        graph.replay()
        CLIP_ADAMW.reference(*right, **options)
        clip_adamw(*args, **OPTIONS)  # with a number, meanwhile
        CLIP_ADAMW.reference(*right, **OPTIONS)
    torch.testing.assert_close(flat(args), flat(right), rtol=1e-5, atol=1e-6)


def test_the_optimizer_goes_on_after_a_failed_capture(emulated_graphs):
    ours, optimizer, theirs, right = pair()
    both_step(ours, optimizer, theirs, right, 0)
    held = [p.grad for p in ours.parameters()]
    for o in (optimizer, right):
        o.param_groups[0]["lr"] = 0.3
    ours.zero_grad(set_to_none=True)
    backward(ours, 1)
    with Graph():
        optimizer.step()
    optimizer.step()
    backward(theirs, 1)
    clip_grad_norm_(theirs.parameters(), 0.5)
    right.step()
    assert len(held) == 4
    assert_close(ours, theirs)


def test_a_parameters_first_step_cannot_be_captured(emulated_graphs):
    net = network()
    optimizer = ClipAdamW(net.parameters())
    backward(net, 0)
    with pytest.raises(KernelError, match="Step once before the capture"), Graph():
        optimizer.step()
    assert not any(optimizer.state.values())
