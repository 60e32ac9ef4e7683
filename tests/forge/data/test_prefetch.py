"""DevicePrefetch: batches travel ahead of use, and nobody can tell but by the clock."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import forge
from forge.data.accumulation_windows import length_of
from forge.data.prefetch import DevicePrefetch, _mapped
from forge.data.tensor import TensorLoader
from forge.env import Env
from forge.testing import assert_same, fit_tiny, tiny_batches
from forge_plugins.prefetch import Prefetch


class Copies:
    """Stands in for a side stream: marks what was begun and what was finished."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.finished: list[Any] = []
        self.dropped: list[Any] = []

    def begin(self, batch: Any) -> Any:
        self.begun.append(batch)
        return ("on its way", batch)

    def finish(self, begun: Any) -> Any:
        self.finished.append(begun[1])
        return begun[1]

    def drop(self, begun: Any) -> None:
        self.dropped.append(begun[1])


class Ahead(DevicePrefetch):
    """A prefetch that needs no accelerator."""

    def __init__(self, loader: Any, depth: int = 2):
        super().__init__(loader, "cpu", depth)
        self.copies = Copies()

    def _copies(self) -> Copies:
        return self.copies


class Stateful:
    """A loader that carries state: where it is in its stream of numbers."""

    def __init__(self, count: int = 6):
        self.count, self.at = count, [0]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}  # alive: it changes as the loader is read on

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = list(state["at"])

    def __iter__(self) -> Iterator[int]:
        while self.at[0] < self.count:
            self.at[0] += 1
            yield self.at[0] - 1
        self.at[0] = 0


class TestOrder:
    @given(count=st.integers(0, 9), depth=st.integers(1, 5))
    def test_batches_are_never_more_than_depth_ahead(self, count: int, depth: int) -> None:
        ahead = Ahead(list(range(count)), depth)
        seen = []
        for batch in ahead:
            seen.append(batch)
            assert ahead.copies.finished == seen
            assert len(ahead.copies.begun) == min(count, len(seen) + depth)
        assert seen == list(range(count))
        assert len(ahead) == count

    @given(
        samples=st.integers(1, 30), size=st.integers(1, 6), depth=st.integers(1, 4), epoch=st.integers(0, 3),
        data=st.data(),
    )  # fmt: skip
    def test_seeking_goes_through_to_the_inner_loader(
        self, samples: int, size: int, depth: int, epoch: int, data: st.DataObject
    ) -> None:
        inner = TensorLoader(torch.arange(samples), batch_size=size, shuffle=True, seed=1)
        ahead = Ahead(inner, depth)
        ahead.set_epoch(epoch)
        straight = [b[0].tolist() for b in ahead]
        batch = data.draw(st.integers(0, len(ahead)))
        ahead.seek(epoch, min(batch * size, samples))
        assert [b[0].tolist() for b in ahead] == straight[batch:]
        assert ahead.fingerprint() == inner.fingerprint()
        assert ahead.sample_indices(epoch, 0, samples) == [i for b in straight for i in b]

    def test_an_error_comes_out_at_its_batch_after_all_before_it(self) -> None:
        def batches() -> Iterator[int]:
            yield 0
            yield 1
            raise OSError("broken shard")

        class Loader:
            def __iter__(self) -> Iterator[int]:
                return batches()

        iterator = iter(Ahead(Loader(), depth=4))
        assert [next(iterator), next(iterator)] == [0, 1]
        with pytest.raises(OSError, match="broken shard"):
            next(iterator)
        assert list(iterator) == []

    def test_a_stop_iteration_of_user_code_keeps_its_place(self) -> None:
        class Stops:
            def __iter__(self) -> Any:
                return self

            def __next__(self) -> Any:
                raise StopIteration

        with pytest.raises(StopIteration) as caught:
            next(iter(Ahead(Stops())))
        assert caught.traceback[-1].name == "__next__"
        assert caught.traceback[-1].frame.code.path == caught.traceback[0].frame.code.path

    def test_an_epoch_left_halfway_lets_go_of_the_iterator(self) -> None:
        closed = []

        class Loader:
            def __iter__(self) -> Iterator[int]:
                try:
                    yield from range(5)
                finally:
                    closed.append(True)

        ahead = Ahead(Loader())
        iterator = iter(ahead)
        assert [next(iterator), next(iterator)] == [0, 1]
        del iterator
        gc.collect()
        assert closed == [True]
        assert ahead.copies.dropped == [2, 3]  # these were on their way
        assert list(ahead) == [0, 1, 2, 3, 4]

    def test_a_used_batch_is_let_go(self) -> None:
        class Ghost:
            pass

        class Loader:
            def __iter__(self) -> Iterator[Ghost]:
                return (Ghost() for _ in range(3))

        ahead = Ahead(Loader())
        ahead.copies.begun = ahead.copies.finished = deque(maxlen=0)  # pyright: ignore[reportAttributeAccessIssue]
        iterator = iter(ahead)
        seen = [weakref.ref(next(iterator)) for _ in range(3)]
        assert [ref() for ref in seen] == [None] * 3


class TestState:
    @given(taken=st.integers(0, 6), depth=st.integers(1, 4))
    def test_the_state_is_of_the_batch_handed_out(self, taken: int, depth: int) -> None:
        ahead = Ahead(Stateful(), depth)
        iterator = iter(ahead)
        seen = [next(iterator) for _ in range(taken)]
        state = ahead.state_dict()
        assert state == {"at": [taken]}
        assert hasattr(ahead, "load_state_dict")
        assert ahead.state_dict() == state  # asking changes nothing
        twin = Ahead(Stateful(), depth)
        twin.load_state_dict(copy.deepcopy(state))
        assert twin.state_dict() == state
        assert seen + list(twin) == list(range(6))

    def test_a_loaded_state_counts_from_then_on(self) -> None:
        ahead = Ahead(Stateful())
        next(iter(ahead))
        ahead.load_state_dict({"at": [4]})
        assert ahead.state_dict() == {"at": [4]}
        assert list(ahead) == [4, 5]

    def test_what_the_inner_loader_has_not_is_not_there(self) -> None:
        ahead = Ahead([1])
        assert not any(hasattr(ahead, name) for name in ("seek", "state_dict", "load_state_dict", "fingerprint"))
        assert length_of(Ahead(Stateful())) is None
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = ahead.no_such_thing


class TestOnTheCPU:
    def test_it_is_the_inner_loader_itself(self) -> None:
        batches = [torch.zeros(2), torch.ones(2)]
        prefetch = DevicePrefetch(batches, "cpu")
        assert all(a is b for a, b in zip(prefetch, batches, strict=True))
        assert type(iter(prefetch)) is type(iter([]))

    def test_a_depth_of_nothing_is_refused(self) -> None:
        with pytest.raises(forge.DataError, match="depth is 0"):
            DevicePrefetch([1], "cpu", depth=0)


@dataclass
class Record:
    x: torch.Tensor
    name: str = "record"


Pair = namedtuple("Pair", "x y")


def leaves(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(batch, lambda tensor: found.append(tensor) or tensor)
    return found


def every_form(tensor: torch.Tensor) -> Any:
    return {"a": [tensor, (tensor, "text")], "b": Pair(tensor, 1), "c": Record(tensor)}


class TestForms:
    def test_every_tensor_is_reached_and_every_form_kept(self) -> None:
        tensor = torch.zeros(2)
        batch = every_form(tensor)
        mapped = _mapped(batch, lambda found: found + 1)
        assert [leaf.tolist() for leaf in leaves(mapped)] == [[1.0, 1.0]] * 4
        assert (type(mapped["b"]), type(mapped["c"]), mapped["a"][1][1]) == (Pair, Record, "text")
        assert all(leaf is tensor for leaf in leaves(batch))


class TestPlugin:
    def test_on_the_cpu_no_loader_is_wrapped(self) -> None:
        seen: list[Any] = []

        @forge.on("start")
        def look(trainer: forge.Trainer) -> None:
            seen.extend(loader for stage in trainer.loaders.values() for loader in stage.values())

        fit_tiny([Prefetch(), look])
        assert len(seen) == 2
        assert not any(isinstance(loader, DevicePrefetch) for loader in seen)

    @pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
    def test_on_cuda_every_loader_of_every_stage_is_wrapped(self, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forge.data.prefetch.pick_device", torch.device)
        plugin, one, other = Prefetch(4), [1], [2]
        wrapped = build(plugin, {"one": one, "other": other, "none": None}, stage)
        assert [type(wrapped[name]) for name in wrapped] == [DevicePrefetch, DevicePrefetch, type(None)]
        assert (wrapped["one"].loader, wrapped["one"].depth, wrapped["other"].loader) == (one, 4, other)
        assert build(plugin, None, stage) is None
        assert build(plugin, one, stage) is wrapped["one"]  # one loader in two stages stays one
        assert build(plugin, wrapped["one"], stage) is wrapped["one"]

    def test_one_shot_iterators_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forge.data.prefetch.pick_device", torch.device)
        once = iter([1])
        assert build(Prefetch(), once, "train") is once

    def test_training_ahead_gives_the_same_weights(self) -> None:
        class Everywhere(Prefetch):
            """Prefetches on the CPU too."""

            @forge.hookimpl(wrapper=True)
            def forge_build_loader(self, trainer: forge.Run) -> Any:
                return Ahead((yield))

        def transform(x: torch.Tensor, y: torch.Tensor) -> Any:
            return x + torch.randn_like(x), y

        def train() -> TensorLoader:
            x, y = (torch.cat(parts) for parts in zip(*tiny_batches(), strict=True))
            return TensorLoader(x, y, batch_size=8, shuffle=True, transform=transform)

        plain, _ = fit_tiny([], train=train(), max_epochs=2)
        ahead, _ = fit_tiny([Everywhere()], train=train(), max_epochs=2)
        assert_same(ahead, plain)


def build(plugin: Prefetch, loaders: Any, stage: str) -> Any:
    """What the plugin makes of loaders on a machine that seems to have CUDA."""
    env = Env("cpu")
    env.device = torch.device("cuda", 0)
    trainer: Any = forge.Trainer(max_epochs=1, plugins=[], run_dir=False)
    trainer.env = env
    wrapper = plugin.forge_build_loader(trainer)
    next(wrapper)
    try:
        wrapper.send(loaders)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("the wrapper yielded twice")


@pytest.mark.gpu
class TestOnTheGPU:
    @pytest.mark.parametrize("depth", [1, 2, 5])
    def test_batches_arrive_whole_while_the_device_is_busy(self, depth: int) -> None:
        generator = torch.Generator().manual_seed(0)
        batches = [torch.randn(256, 1024, generator=generator) for _ in range(40)]
        weight = torch.randn(4096, 4096, device="cuda")
        sums, held = [], []
        for batch in DevicePrefetch(batches, "cuda", depth):
            for _ in range(5):
                weight = torch.tanh(weight @ weight)  # later kernels wait behind these
            sums.append(batch.double().sum())
            held.append(batch.clone())
            del batch  # its memory may be used again only after the sum was taken
        assert all(torch.equal(a.cpu(), b) for a, b in zip(held, batches, strict=True))
        expected = [batch.cuda().double().sum() for batch in batches]
        assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))

    def test_every_form_arrives_on_the_device_and_keeps_its_kind(self) -> None:
        tensor = torch.arange(6.0)
        (batch,) = list(DevicePrefetch([every_form(tensor)], "cuda"))
        assert all(leaf.is_cuda and torch.equal(leaf.cpu(), tensor) for leaf in leaves(batch))
        assert (type(batch["b"]), type(batch["c"]), batch["a"][1][1]) == (Pair, Record, "text")

    def test_packed_sparse_and_opaque_objects_arrive_too(self) -> None:
        class Opaque:
            def __init__(self, x: torch.Tensor):
                self.x = x

            def to(self, device: torch.device) -> Opaque:
                return Opaque(self.x.to(device))

        packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(1, 1)])
        given_in = [(packed, 1), (Opaque(torch.ones(2)),), (torch.eye(3).to_sparse(),), (torch.ones(2).cuda(),)]
        seen = list(DevicePrefetch(given_in, "cuda"))
        assert seen[0][0].data.is_cuda
        assert not seen[0][0].batch_sizes.is_cuda
        assert seen[1][0].x.is_cuda
        assert seen[2][0].is_cuda
        assert seen[3][0] is given_in[3][0]

    def test_reading_ahead_does_not_wait_for_the_device(self) -> None:
        batches = [torch.ones(1024, 1024) for _ in range(4)]
        iterator = iter(DevicePrefetch(batches, "cuda"))
        next(iterator)  # everything is allocated by now
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        batch = next(iterator)
        assert not busy.query()
        total = batch.sum()
        assert not busy.query()
        assert total.item() == 1024 * 1024

    def test_copies_under_way_do_not_write_into_freed_memory(self) -> None:
        prefetch = DevicePrefetch([torch.ones(1 << 24).pin_memory() for _ in range(4)], "cuda", depth=3)
        for _ in range(5):
            next(iter(prefetch))  # and the rest is abandoned
            fresh = [torch.zeros(1 << 24, device="cuda") for _ in range(6)]
            torch.cuda.synchronize()
            assert [tensor.sum().item() for tensor in fresh] == [0.0] * 6

    def test_a_batch_used_at_once_has_arrived(self) -> None:
        batches = [torch.ones(1 << 26).pin_memory() for _ in range(3)]
        torch.zeros(
            1 << 28, device="cuda"
        ).sum()  # memory that is given back holds zeros, not the batch of an earlier test
        assert [batch.sum().item() for batch in DevicePrefetch(batches, "cuda")] == [2.0**26] * 3

    def test_memory_used_on_another_stream_is_not_given_away(self) -> None:
        size, other = 1 << 24, torch.cuda.Stream()
        torch.cuda.empty_cache()  # so that a batch's memory is the first choice for the next tensor of its size
        iterator = iter(DevicePrefetch([torch.ones(size) for _ in range(3)], "cuda"))
        first = next(iterator)
        with torch.cuda.stream(other):
            torch.cuda._sleep(1_000_000_000)
            batch = next(iterator)
            place = batch.data_ptr()
            del batch
        fresh = torch.empty_like(first)
        assert not other.query()
        assert fresh.data_ptr() != place

    def test_training_with_the_plugin_gives_the_same_weights(self) -> None:
        plain, first = fit_tiny([], max_epochs=3, device="cuda")
        ahead, second = fit_tiny([Prefetch()], max_epochs=3, device="cuda")
        assert_same(ahead, plain)
        assert first.metrics == second.metrics

    def test_an_epoch_left_halfway_leaves_nothing_behind(self) -> None:
        prefetch = DevicePrefetch([torch.ones(1 << 20) for _ in range(8)], "cuda")
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            next(iter(prefetch))
        torch.cuda.synchronize()
        gc.collect()
        assert torch.cuda.memory_allocated() == before
