"""BackgroundWriter: a checkpoint costs the run one copy into held host buffers; a thread hashes, writes, publishes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.checkpoint.copying import Pair, copy_bytes
from forge.checkpoint.publish import publish
from forge.checkpoint.tensors import as_bytes
from forge.checkpoint.tree import Split, split
from forge.checkpoint.write_sharded import publish_together
from forge.checkpoint.writers import Meeting, Team
from forge.errors import CheckpointError

logger = logging.getLogger("forge")

Key = tuple[str, str]

_THREAD = "forge-checkpoint"


def settle() -> None:
    """Wait until every checkpoint that this process is writing is published, or has failed."""
    for thread in threading.enumerate():
        if thread.name == _THREAD and thread is not threading.current_thread():
            thread.join()


class BackgroundWriter:
    """Writes one checkpoint at a time, from buffers that are kept between saves.

    Each write has a thread of its own that the interpreter waits for before it exits, so what was submitted is
    published unless the process is killed. An error of a write is logged when it happens and raised by the next call.

    With a `team` every rank has a writer and submits the same saves: each writes its share of the tensors, a write is
    over when the whole is published, and an error of one rank is the error of all.
    """

    def __init__(self, team: Team | None = None) -> None:
        self._team = team.apart() if team is not None else None
        self._buffers: dict[Key, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, target: Path, tree: dict[str, Any], then: Callable[[], None] | None = None) -> None:
        """Copy the tree and return; the checkpoint `target` is written meanwhile, then `then` is called in the thread.

        Waits first for a write that is still under way. The tensors may change as soon as this returns. In a team only
        rank 0 calls `then`.
        """
        self.wait()
        meeting = Meeting(self._team, Path(target)) if self._team is not None else None
        try:
            content = split(tree, self._team)
            copied, events = self._copy(content)
        except BaseException as error:
            if meeting is not None:
                meeting.abandon(error)
            raise
        arguments = (Path(target), copied, events, then, meeting)
        self._thread = threading.Thread(target=self._write, args=arguments, name=_THREAD, daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or there is no thread to be had: better late than never
            self._thread = None
            self._write(*arguments)
            self.check()

    def check(self) -> None:
        """Raise the error of a finished write, if there was one; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, CheckpointError):
                raise error
            raise CheckpointError(f"A checkpoint failed in the background: {type(error).__name__}: {error}") from error

    def wait(self) -> None:
        """Wait for the write under way; raise its error."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def close(self) -> None:
        """Wait, let go of the buffers, and raise the error of the last write."""
        try:
            self.wait()
        finally:
            self._buffers = {}

    # -- the copy -----------------------------------------------------------------------------------------------------

    def _copy(self, content: Split) -> tuple[Split, list[torch.cuda.Event]]:
        """The same content in host memory of our own; on CUDA the events tell when it is there."""
        kept, self._buffers = self._buffers, {}
        devices: set[torch.device] = set()
        pairs: list[Pair] = []
        # buffers must be ordinary tensors, whatever mode the caller is in: they are written to again at the next save
        with torch.inference_mode(False), torch.no_grad():
            for file, tensors in (("model", content.model), ("state", content.state)):
                for name, tensor in tensors.items():
                    buffer = self._buffer(kept.pop((file, name), None), tensor)
                    self._buffers[file, name] = buffer
                    # resolved first: torch conjugates in the buffer, without waiting for what is still to come over
                    source = tensor.resolve_conj().resolve_neg()
                    if source.is_cpu and source.is_contiguous():
                        pairs.append((as_bytes(buffer), as_bytes(source)))
                    else:
                        buffer.copy_(source, non_blocking=source.is_cuda)
                    if tensor.is_cuda:
                        devices.add(tensor.device)
            copy_bytes(pairs)
        events = [torch.cuda.Event(blocking=True) for _ in devices]
        for device, event in zip(devices, events, strict=True):
            event.record(torch.cuda.current_stream(device))
        model = {name: self._buffers["model", name] for name in content.model}
        state = {name: self._buffers["state", name] for name in content.state}
        return Split(content.document, model, state, content.layout), events

    def _buffer(self, kept: Tensor | None, tensor: Tensor) -> Tensor:
        fits = kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype)
        if kept is None or not fits or (tensor.is_cuda and not kept.is_pinned()):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        return kept

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _write(
        self,
        target: Path,
        content: Split,
        events: list[torch.cuda.Event],
        then: Callable[[], None] | None,
        meeting: Meeting | None,
    ) -> None:
        try:
            self._await_copies(events, meeting)
            if meeting is not None:
                publish_together(content, meeting, then)
                return
            publish(target, content)
            if then is not None:
                then()
        except BaseException as error:
            self._error = error
            if meeting is None or meeting.team.is_main:  # all ranks have the same
                logger.error("The checkpoint %s failed: %s: %s", target, type(error).__name__, error)

    def _await_copies(self, events: list[torch.cuda.Event], meeting: Meeting | None) -> None:
        try:
            for event in events:
                event.synchronize()
        except BaseException as error:
            if meeting is not None:
                meeting.abandon(error)
            raise
