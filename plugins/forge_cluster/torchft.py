"""Replicas that go on when one of them dies, by torchft."""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, TCPStore

import forge
from forge.data.accumulation_windows import batch_size
from forge.data.sharding import cut, part_of
from forge.errors import DataError, RecipeError, StackError
from forge.optim.optimizers import drop_gradients
from forge.rng import RNGState, seed_all, seed_of
from forge.snapshot.capture import capture
from forge.snapshot.non_finite import moving_buffers
from forge.snapshot.restore import restore
from forge.torch_internals import pytree

if TYPE_CHECKING:
    from torchft.manager import Manager  # pyright: ignore[reportMissingImports]

logger = logging.getLogger("forge")

TRIES = 20
"""How often in a row an update may fail before the run ends."""
QUORUM = 4
"""How many times longer a replica waits for a quorum than for an answer: others may notice a loss only by `timeout`."""
PATIENCE = 30.0
"""Seconds between two lines that say that a replica waits for others."""


class Torchft(forge.Plugin):
    """Data parallel training in replicas that go on when one of them dies, and take it back without a restart.

    Every replica is a `forge fit` of its own, with the same recipe and seed and its own run folder. They find each
    other by a small server, torchft's lighthouse. Before each update those that are alive agree on who takes part
    (a quorum); each trains its part of the batch, and the gradients are added up. If one dies in the middle of an
    update, the others train the same batch again without it. If it is started again, it gets the state of a
    healthy replica over the network, at the update where that one is, and takes part from there.

    What stays the same: every batch of the order counts once, whole, whatever number of replicas there is. So the
    weights after N updates are those of one process up to rounding, and the same bits on all replicas. A replica
    alone trains the bits of a run without the plugin. What does not: how sums are rounded depends on who was there;
    dropout and augmentation draw other numbers after a death; BatchNorm's statistics are each replica's own.

    When to use it: when losing a machine is normal and restarting all others from a checkpoint costs too much. It needs
    `pip install torchft-nightly` and `torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000` on some host, whose
    address is TORCHFT_LIGHTHOUSE. Every replica reads whole batches and cuts out its part. Gradients are added up after
    the backward pass, not during it. Metrics of training are those of the replica's own part; validations see all data.

    Together with: optimizers, schedules, `amp`, `accumulate`, `clip`, `guard` and `ema` work as usual. Keep checkpoints
    too, for the case that all replicas die. Several optimizers and those with a closure are refused.

    ::

        forge fit quickstart -p torchft  # once per replica, with REPLICA_GROUP_ID=0, 1, ... and TORCHFT_LIGHTHOUSE set
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        lighthouse: str | None = None
        "Address of torchft's lighthouse, as http://host:port; null: TORCHFT_LIGHTHOUSE."
        least: int = 1
        "Replicas that an update needs; with fewer, a replica waits for others."
        timeout: float = 60.0
        "Seconds without an answer after which a replica counts as dead."
        hostname: str | None = None
        "Name or address of this host, by which the others reach it; null: its own name."

    config: Config
    provides = ("strategy",)

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        for name, least in (("least", 1), ("timeout", 1e-9)):
            if getattr(self.config, name) < least:
                raise RecipeError(f"torchft.{name} is {getattr(self.config, name):g}; it must be above 0.")
        self._forget()

    def _forget(self) -> None:
        self._manager: Manager | None = None
        self._store: TCPStore | None = None
        self._group: Any = None
        self._run: forge.Run | None = None
        self._buffers: list[Any] = []
        self._before: dict[str, Any] = {}
        self._position: dict[str, Any] | None = None
        self._received: dict[str, Any] | None = None
        self._adopted = False
        self._together = 0

    # -- build and end ------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.verb != "fit":
            return
        if trainer.env.world > 1:
            raise StackError("torchft: a replica is one process here. Start each without torchrun or srun's tasks.")
        if len(trainer.optimizers) > 1:
            raise StackError("torchft trains with one optimizer; this task has several. Use ddp, or remove torchft.")
        for entry in trainer.optimizers.entries.values():
            if entry.needs_closure:
                kind = type(entry.optimizer).__name__
                raise StackError(f"torchft cannot train with {kind}, which runs the window itself. Use ddp.")
        self._run, self._buffers = trainer, moving_buffers(trainer.task)
        self._manager = self._connected(trainer)

    @forge.hookimpl
    def forge_end(self) -> None:
        manager, group = self._manager, self._group
        self._forget()
        if manager is not None:
            manager.shutdown(wait=False)
            group.shutdown()

    def _connected(self, trainer: forge.Run) -> Manager:
        address = self.config.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not address:
            raise StackError(
                "torchft needs the address of its lighthouse: start one with\n"
                "  torchft_lighthouse --bind 0.0.0.0:29510 --min_replicas 1 --join_timeout_ms 1000\n"
                "and set TORCHFT_LIGHTHOUSE=http://HOST:29510, or torchft.lighthouse."
            )
        os.environ.setdefault("RUST_LOG", "warn")  # it prints several lines per update
        try:
            from torchft.manager import Manager  # pyright: ignore[reportMissingImports]
            from torchft.process_group import (  # pyright: ignore[reportMissingImports]
                ProcessGroupGloo,
                ProcessGroupNCCL,
            )
        except ImportError as error:
            raise StackError(f"torchft needs a package: pip install torchft-nightly. ({error})") from error
        limit = timedelta(seconds=self.config.timeout)
        self._group = (ProcessGroupNCCL if trainer.env.device.type == "cuda" else ProcessGroupGloo)(timeout=limit)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of this replica alone
        number = os.environ.get("REPLICA_GROUP_ID") or str(os.getpid())
        logging.getLogger("torchft").setLevel(logging.CRITICAL)  # what fails is said below, in one line
        return Manager(
            pg=self._group,
            load_state_dict=self._take,
            state_dict=self._give,
            min_replica_size=self.config.least,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit * QUORUM,
            connect_timeout=limit,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=address,
            replica_id=f"replica_{number}",
            hostname=self.config.hostname or _own_name(),
            init_sync=False,  # the seed gives all replicas the same weights
            max_retries=TRIES,
        )

    # -- who takes part -----------------------------------------------------------------------------------------------

    @forge.hookimpl(wrapper=True)
    def forge_plan_step(self, trainer: forge.Run) -> Generator[None, int, int]:
        if self._manager is not None and trainer.at_boundary:
            if self._adopted:  # with this update's quorum the state of another came, and the data start there
                self._adopted = False
            else:
                self._manager.load_state_dict({"step": trainer.progress.update, "batches_committed": 0})
                self._before = trainer.feed.state_dict()
                self._meet()
                if self._received is not None:
                    self._adopt(trainer)
                    self._adopted = True
        return (yield)

    def _meet(self) -> None:
        """Agree on the replicas of the next update; wait until there are enough."""
        manager, begun, said = self._manager, time.monotonic(), PATIENCE
        assert manager is not None
        while True:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The given buffer is not writable")  # it is copied
                    manager.start_quorum()
                break
            except (TimeoutError, RuntimeError) as error:
                manager._quorum_future = None  # its error would be raised again by the next attempt
                waited = time.monotonic() - begun
                if waited > said:
                    said = waited + PATIENCE
                    logger.warning("torchft: no quorum for %.0f s (%s); waiting for other replicas.", waited, error)
        together = manager.num_participants()
        if together != self._together:
            update = manager.current_step()
            logger.info("torchft: %d replica%s from update %d on.", together, "s" * (together != 1), update)
        self._together = together

    def _give(self) -> dict[str, Any]:
        """Return the state for a replica that joins; torchft asks for it while the quorum is formed."""
        assert self._run is not None
        state = capture(self._run)
        return state if self._position is None else {**state, "data": self._position}

    def _take(self, state: dict[str, Any]) -> None:
        """Keep what was received until it can be restored, as copies: its memory is read only."""
        self._received = pytree.tree_map_only(Tensor, Tensor.clone, state)

    def _adopt(self, trainer: forge.Run) -> None:
        """Continue where another replica is, with its weights and random numbers of this replica's own."""
        state, self._received = self._received, None
        assert state is not None
        restore(trainer, state, "The state of another replica")
        seed_all(seed_of(trainer.seed or 0, os.getpid(), trainer.progress.update))
        logger.info("torchft: took over the state of another replica at update %d.", trainer.progress.update)

    # -- an update ----------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_train_step(self, step: forge.Step) -> bool:
        manager, trainer = self._manager, step.trainer
        assert manager is not None
        random, buffers = RNGState.capture(trainer.env.device), [owner[name].clone() for owner, name in self._buffers]
        first = True
        while True:
            batches, factors = self._part(step)
            with step.substitute(batches, factors):
                step.prepared = None
                step.run_window(record=first)
                self._add_up(step)
                if manager.should_commit():
                    step.record("replicas", float(manager.num_participants()))
                    step.finish()
                    return True
            first = False
            drop_gradients(step.optimizer)
            random.restore(trainer.env.device)
            for (owner, name), before in zip(self._buffers, buffers, strict=True):
                owner[name].copy_(before)
            logger.warning("torchft: update %d failed, and is trained again: %s", *self._why(step))
            with self._at_boundary(step):
                self._meet()
            if self._received is not None:
                self._skip_to_the_others(step)
                return True

    def _why(self, step: forge.Step) -> tuple[int, str]:
        """Return the number of an update that failed, and the first line of the error."""
        assert self._manager is not None
        error = self._manager.errored()
        said = "another replica gave up" if error is None else str(getattr(error, "original_exception", error))
        return step.index + 1, said.splitlines()[0][:160]

    @contextmanager
    def _at_boundary(self, step: forge.Step) -> Iterator[None]:
        """Make the state as it is before this update available to a replica that joins now."""
        trainer = step.trainer
        self._position = self._before
        trainer.at_boundary = True
        try:
            yield
        finally:
            trainer.at_boundary, self._position = False, None

    def _skip_to_the_others(self, step: forge.Step) -> None:
        """Take over the state of those who finished this update without this replica: it counts from theirs."""
        trainer = step.trainer
        self._adopt(trainer)
        progress = trainer.progress  # the loop adds this step, which is in the counts already
        progress.update -= 1
        progress.micro -= len(step.window)
        progress.sample -= step.samples
        progress.skipped -= 1
        progress.epoch -= step.ends_epoch
        self._adopted = True

    def _part(self, step: forge.Step) -> tuple[Sequence[Any], list[Any] | None]:
        """Return this replica's part of each micro-batch, and what its loss counts."""
        manager, trainer = self._manager, step.trainer
        assert manager is not None
        rank, world = manager.participating_rank(), manager.num_participants()
        if world <= 1 and rank == 0:
            return step.window, None
        parts, factors = [], []
        for number, batch in enumerate(step.window):
            size = batch_size(batch)
            if not size:
                raise DataError(
                    f"The train loader yields a {type(batch).__name__}, which cannot be divided among replicas: its "
                    "number of samples is not known. Yield tensors, or lists and dicts of them."
                )
            place = cut(0, size, rank or 0, max(world, 1))
            parts.append(part_of(batch, place, size))
            share = 0.0 if rank is None else place.samples / size
            if trainer.task_defines_num_items and share:
                items = torch.as_tensor(step.items[number], dtype=torch.float64)
                share = torch.as_tensor(trainer.task.num_items(parts[-1])) / items.clamp(min=1)
            whole = 1 / step.divisor if step.factors is None else step.factors[number]
            factors.append(share * whole)
        return parts, factors

    def _add_up(self, step: forge.Step) -> None:
        """Add up the gradients of all replicas. A parameter that none of them used keeps no gradient."""
        manager = self._manager
        assert manager is not None
        if manager.num_participants() <= 1:
            return
        parameters = [p for p in step.parameters() if p.requires_grad]
        used = torch.tensor([float(p.grad is not None) for p in parameters], device=step.trainer.env.device)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        flats = [(same, torch.cat([g.reshape(-1) for g in same])) for same in _by_dtype(grads)]
        for work in [manager.allreduce(flat, reduce_op=ReduceOp.SUM) for flat in (*(f for _, f in flats), used)]:
            work.wait()
        for same, flat in flats:
            for grad, total in zip(same, flat.split([g.numel() for g in same]), strict=True):
                grad.copy_(total.view_as(grad))
        for parameter, count in zip(parameters, used.tolist(), strict=True):
            if not count:
                parameter.grad = None


def _by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    kinds = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [[tensor for tensor in tensors if tensor.dtype == kind] for kind in kinds]


def _own_name() -> str:
    """Return a name of this host that can be resolved: others connect to it."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return "127.0.0.1"
    return socket.gethostname()
