"""Loader: any position is a slice, augmentation depends on (seed, epoch, index) alone, and workers fail with a name."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import forge
from forge.data import Loader, Weighted
from forge.data.sample_seeding import is_pure
from forge.rng import combine_seeds
from tests.support import forked
from tests.support.patience import PATIENCE
from tests.support.profiles import some


class Augmented(Dataset):
    """Draws from every generator there is."""

    def __init__(self, length: int = 12):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Faulty(Dataset):
    """Does something at sample 5."""

    def __init__(self, deed: Any, pure: bool = False):
        self.deed, self.pure = deed, pure

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.deed()
        return index


def fail() -> None:
    raise KeyError("no such file")


def stop() -> None:
    raise StopIteration


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_the_lock(gate: Any = None) -> None:
    """What a worker that is killed at the wrong moment does: nobody else gets the lock of torch's event any more."""
    if gate is not None:
        gate.wait()
    frame: Any = sys._getframe()
    while "done_event" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["done_event"]._cond.acquire()
    die()


def hang() -> None:
    threading.Event().wait()


def drop(held: list[Any]) -> None:
    """Let go of the last references to what is held."""
    held.clear()
    gc.collect()


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def batches(loader: Any) -> list[Any]:
    return [batch[0].tolist() if isinstance(batch, (list, tuple)) else batch.tolist() for batch in loader]


def generators() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


laws = given(
    length=st.integers(1, 40),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 99),
    data=st.data(),
)


class TestPosition:
    @laws
    def test_seeking_then_iterating_gives_the_tail_of_an_epoch(
        self, length: int, size: int, shuffle: bool, drop_last: bool, seed: int, epoch: int, data: st.DataObject
    ) -> None:
        drop_last = drop_last and length >= size
        loader = Loader(Augmented(length), size, shuffle, seed=seed, drop_last=drop_last)
        loader.set_epoch(epoch)
        before = generators()
        straight = batches(loader)
        done = data.draw(st.integers(0, len(straight)))
        loader.seek(epoch, done * size if done * size <= length else length)
        assert batches(loader) == straight[done:]
        assert batches(loader) == straight  # a seek is for one pass
        assert len(loader) == len(straight)
        assert generators() == before
        indices = [int(sample[0]) for batch in straight for sample in batch]
        assert loader.sample_indices(epoch, 0, len(indices)) == indices

    def test_only_the_samples_asked_for_are_fetched(self) -> None:
        fetched: list[int] = []

        class Watched(Dataset):
            def __len__(self) -> int:
                return 100

            def __getitem__(self, index: int) -> int:
                fetched.append(index)
                return index

        loader = Loader(Watched(), 10)
        loader.seek(0, 80)
        assert len(list(loader)) == 2
        assert fetched == list(range(80, 100))

    def test_seeking_outside_of_the_epoch_is_refused(self) -> None:
        with pytest.raises(forge.DataError, match="sample 9 is outside of an epoch of 8"):
            Loader(numbers(8), 2).seek(0, 9)

    def test_the_fingerprint_holds_what_must_not_change(self) -> None:
        loader = Loader(numbers(8), 2, True, drop_last=True)
        loader.set_default_seed(5)
        expected = {"order": "shuffled", "samples": 8, "batch_size": 2, "seed": 5, "drop_last": True}
        assert loader.fingerprint() == expected


class TestAugmentation:
    @given(size=st.integers(1, 13), epoch=st.integers(0, 5))
    def test_a_sample_does_not_depend_on_the_batch_that_it_is_in(self, size: int, epoch: int) -> None:
        one, other = Loader(Augmented(), 1, True, seed=3), Loader(Augmented(), size, True, seed=3)
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert torch.equal(torch.cat(list(one)), torch.cat(list(other)))

    @settings(max_examples=2)
    @given(size=st.integers(1, 5), ahead=st.integers(1, 3))
    def test_workers_change_nothing_across_epochs_and_seeks(self, size: int, ahead: int) -> None:
        alone = Loader(Augmented(), size, True, seed=3)
        helped = Loader(Augmented(), size, True, 2, seed=3, prefetch_factor=ahead)
        before = generators()
        for epoch, position in [(0, 0), (1, size), (1, 0), (0, 2 * size)]:
            for loader in (alone, helped):
                loader.seek(epoch, position)
            assert torch.equal(torch.cat(list(alone)), torch.cat(list(helped)))
        next(iter(helped))
        helped.set_epoch(4)
        alone.set_epoch(4)
        assert torch.equal(torch.cat(list(alone)), torch.cat(list(helped)))
        assert generators() == before

    def test_epochs_seeds_and_samples_are_augmented_differently(self) -> None:
        seen = set()
        for seed in (1, 2):
            loader = Loader(Augmented(), 4, seed=seed)
            for epoch in (0, 1):
                loader.set_epoch(epoch)
                seen |= {tuple(sample[1:].tolist()) for batch in loader for sample in batch}
        assert len(seen) == 4 * 12

    def test_the_generators_do_not_repeat_each_other(self) -> None:
        words = {combine_seeds(seed, epoch, index) for seed in range(9) for epoch in range(9) for index in range(99)}
        assert len(words) == 9 * 9 * 99
        assert len({word >> 32 for word in words} | {word & 0xFFFFFFFF for word in words}) > 2 * 9 * 9 * 99 - 10

    def test_a_sample_drawn_twice_in_an_epoch_is_augmented_twice(self) -> None:
        order = Weighted([1.0, 0.0], samples=6)
        samples = torch.cat(list(Loader(Augmented(2), 4, sampler=order)))
        assert len({tuple(sample.tolist()) for sample in samples}) == 6
        loader = Loader(Augmented(2), 2, sampler=order)
        loader.seek(0, 4)
        assert torch.equal(torch.cat(list(loader)), samples[4:])

    def test_the_generators_are_put_back_when_the_dataset_raises(self) -> None:
        before = generators()
        with pytest.raises(forge.DataError):
            list(Loader(Faulty(fail), 4))
        assert generators() == before

    def test_a_collate_function_that_draws_is_seeded_too(self) -> None:
        def masked(samples: list[Any]) -> torch.Tensor:
            return torch.rand(len(samples))

        loader = Loader(numbers(8), 4, collate_fn=masked)
        before = generators()
        first = torch.cat(list(loader))
        assert torch.equal(first, torch.cat(list(loader)))
        assert len(set(first.tolist())) == 8
        assert generators() == before

    def test_what_is_pure_is_known_or_said(self) -> None:
        augmented, said = Augmented(), Augmented()
        said.pure = True  # pyright: ignore[reportAttributeAccessIssue]
        assert all(map(is_pure, [numbers(2), [1], Subset(numbers(2), [0]), ConcatDataset([numbers(1)]), said]))
        assert not any(map(is_pure, [augmented, Subset(augmented, [0]), ConcatDataset([numbers(1), augmented])]))

    def test_only_a_pure_dataset_is_asked_for_many_samples_at_once(self) -> None:
        class Many(TensorDataset):
            def __getitems__(self, indices: list[int]) -> list[Any]:
                return [(self.tensors[0][index] + 100,) for index in indices]

        data = Many(torch.arange(2))
        assert batches(Loader(data, 2, pure=True)) == [[100, 101]]
        assert batches(Loader(data, 2)) == [[0, 1]]


class TestEdges:
    def test_the_last_batch_may_be_short_or_dropped(self) -> None:
        assert batches(Loader(numbers(5), 2)) == [[0, 1], [2, 3], [4]]
        assert batches(Loader(numbers(5), 2, drop_last=True)) == [[0, 1], [2, 3]]

    def test_an_empty_dataset_is_refused(self) -> None:
        with pytest.raises(forge.DataError, match="the dataset list is empty"):
            Loader([], 2)

    def test_what_is_no_dataset_is_refused(self) -> None:
        with pytest.raises(forge.DataError, match=r"a length and indices.*object is neither"):
            Loader(object(), 2)

    @pytest.mark.parametrize("option", ["generator", "timeout", "in_order"])
    def test_options_that_the_loader_has_its_own_of_are_refused(self, option: str) -> None:
        with pytest.raises(forge.DataError, match=f"its own {option}"):
            Loader(numbers(2), 1, **{option: 1})  # pyright: ignore[reportArgumentType]

    def test_senseless_numbers_are_refused(self) -> None:
        with pytest.raises(forge.DataError, match="batch_size is 0"):
            Loader(numbers(2), 0)
        with pytest.raises(forge.DataError, match="data_timeout=0"):
            Loader(numbers(2), 1, data_timeout=0)


class TestErrors:
    @pytest.mark.parametrize("pure", [True, False])
    @pytest.mark.parametrize(("deed", "kind"), [(fail, "KeyError: 'no such file'"), (stop, "StopIteration")])
    def test_a_dataset_that_raises_is_named_with_its_sample(self, deed: Any, kind: str, pure: bool) -> None:
        with pytest.raises(forge.DataError, match=rf"Faulty raised {kind} at sample 5, in the main process") as caught:
            list(Loader(Faulty(deed, pure), 4))
        assert type(caught.value.__cause__).__name__ == kind.split(":")[0]

    def test_and_with_its_worker_and_traceback(self) -> None:
        with pytest.raises(forge.DataError, match=r"Faulty raised KeyError.* at sample 5, in worker 1\.") as caught:
            list(Loader(Faulty(fail), 4, num_workers=2))
        assert "in fail" in caught.value.__notes__[0]

    def test_samples_that_do_not_fit_together_are_named(self) -> None:
        with pytest.raises(forge.DataError, match=r"default_collate could not.*samples \[0, 1\] of list.*pad_collate"):
            list(Loader([torch.zeros(1), torch.zeros(2)], 2))

    def test_a_worker_that_cannot_start_is_named(self) -> None:
        def init(worker: int) -> None:
            raise ValueError("no disk")

        with pytest.raises(forge.DataError, match=r"init raised ValueError: no disk in worker 0"):
            list(Loader(numbers(4), 2, num_workers=1, worker_init_fn=init))


class TestWorkers:
    @pytest.mark.parametrize("persistent", some([True, False]))
    def test_a_killed_worker_is_named_and_the_loader_goes_on(self, persistent: bool) -> None:
        loader = Loader(Faulty(die), 2, num_workers=2, persistent_workers=persistent)
        with pytest.raises(
            forge.DataError, match=r"Worker 0 \(pid \d+\).*Faulty was killed by signal 9.*out of memory"
        ):
            list(loader)
        loader.seek(0, 6)
        assert batches(loader) == [[6, 7]]

    def test_batches_lost_with_a_worker_are_told_as_its_death(self) -> None:
        loader = Loader(numbers(40), 1, num_workers=1)
        taken = iter(loader)
        next(taken)
        inner: Any = loader.loader._iterator

        def lost(timeout: float = 0) -> Any:
            inner._workers[0].kill()
            raise ConnectionResetError("the tensors of this batch are gone")

        inner._try_get_data = lost
        with pytest.raises(forge.DataError, match=r"Worker 0 .*was killed by signal 9"):
            list(taken)

    def test_a_death_between_batches_is_told_with_the_next(self) -> None:
        loader = Loader(numbers(40), 1, num_workers=1)
        taken = iter(loader)
        next(taken)
        batches: Any = loader.loader._iterator
        worker: Any = batches._workers[0]
        worker.kill()
        worker.join()
        for _ in range(1000):  # torch's handler would raise somewhere here
            pass
        with pytest.raises(forge.DataError, match="killed by signal 9"):
            list(taken)

    @pytest.mark.parametrize("persistent", [True, False])
    def test_workers_end_though_one_was_killed_with_a_lock(
        self, persistent: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("forge.data.workers._LOOK_EVERY", 0.2)
        gate, others = multiprocessing.Event(), set(multiprocessing.active_children())
        deed = functools.partial(die_with_the_lock, gate)
        loader = Loader(Faulty(deed), 1, num_workers=2, prefetch_factor=4, persistent_workers=persistent)
        taken = iter(loader)
        next(taken)
        workers = set(multiprocessing.active_children()) - others
        gate.set()
        assert wait([worker.sentinel for worker in workers], timeout=PATIENCE)
        thread = threading.Thread(target=drop, args=([taken, loader],), daemon=True)
        del taken, loader
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2

    def test_a_worker_that_hangs_is_named_with_its_stack(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forge.data.workers._LOOK_EVERY", 0.2)
        loader = Loader(Faulty(hang), 2, num_workers=2)
        taken = iter(loader)
        assert batches([next(taken), next(taken)]) == [[0, 1], [2, 3]]  # both workers have started, however slowly
        loader._pool.data_timeout = 0.5  # limit: it expires: what is waited for never comes
        with pytest.raises(
            forge.DataError, match=r"(?s)Worker 0 .*no batch for 0.5 seconds \(data_timeout\).* in hang\n"
        ):
            next(taken)

    def test_two_passes_at_once_over_persistent_workers_are_refused(self) -> None:
        loader = Loader(numbers(8), 2, num_workers=1)
        first = iter(loader)
        next(first)
        next(iter(loader))
        with pytest.raises(forge.DataError, match="iterated again during this pass"):
            next(first)

    def test_what_they_are_given_can_be_sent_to_another_process(self) -> None:
        loader = Loader(Augmented(), 4, num_workers=1, multiprocessing_context="spawn").loader
        given = (loader.dataset, loader.collate_fn, loader.worker_init_fn)
        assert [type(part) for part in pickle.loads(pickle.dumps(given))] == [type(part) for part in given]

    @pytest.mark.slow
    def test_they_can_be_spawned(self) -> None:
        loader = Loader(Augmented(), 4, num_workers=1, multiprocessing_context="spawn")
        assert torch.equal(torch.cat(list(loader)), torch.cat(list(Loader(Augmented(), 4))))

    def test_they_leave_signals_to_the_main_process(self) -> None:
        loader = Loader(numbers(40), 1, num_workers=2)
        taken = iter(loader)
        next(taken)
        for worker in loader.loader._iterator._workers:  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                os.kill(worker.pid, number)
        assert len(list(taken)) == 39


PROGRAM = """
import os, sys, threading
import torch
from torch.utils.data import Dataset
from forge.data import Loader

class Data(Dataset):
    def __len__(self): return 1000
    def __getitem__(self, index):
        if index == 900: threading.Event().wait()
        return index

loader = Loader(Data(), 1, num_workers=2)
batches = iter(loader)
next(batches)
print(*(worker.pid for worker in loader.loader._iterator._workers), flush=True)
loader.seek(0, 900)
if "stuck" in sys.argv: iter(loader)
if "wait" in sys.argv: sys.stdin.read()
"""


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class TestTheEnd:
    def start(
        self, *words: str, kind: type[subprocess.Popen[str]] = subprocess.Popen
    ) -> tuple[subprocess.Popen[str], list[int]]:
        main = kind([sys.executable, "-c", PROGRAM, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert main.stdout is not None
        return main, [int(pid) for pid in main.stdout.readline().split()]

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
    @pytest.mark.parametrize("words", [["wait"], ["wait", "stuck"]])
    def test_workers_end_when_the_main_process_is_killed(self, words: list[str]) -> None:
        main, workers = self.start(*words, kind=forked.Popen)
        main.kill()
        main.communicate()
        assert len(workers) == 2
        deadline = time.monotonic() + PATIENCE
        while any(map(is_running, workers)) and time.monotonic() < deadline:
            time.sleep(0.02)  # there is no event: nobody may wait for another's child
        assert not any(map(is_running, workers))

    @pytest.mark.slow
    @pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.slow), ["stuck"]])
    def test_workers_do_not_keep_the_interpreter_from_exiting(self, words: list[str]) -> None:
        main, workers = self.start(*words)
        main.communicate(timeout=PATIENCE)
        assert main.returncode == 0
        assert not any(map(is_running, workers))
