"""Write checkpoints in the background: the run waits for one copy to the host; a thread hashes, writes, publishes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.checkpoint.copying import Pair, copy_bytes
from forge.checkpoint.publish import publish, write_checkpoint
from forge.checkpoint.publish_sharded import publish_sharded, write_sharded
from forge.checkpoint.tensors import as_bytes
from forge.checkpoint.tree import Split, split
from forge.checkpoint.writers import SharedSave, Writers
from forge.errors import CheckpointError

logger = logging.getLogger("forge")

Key = tuple[str, str]

_THREAD = "forge-checkpoint"


def wait_until_written() -> None:
    """Wait until every checkpoint under way in this process is published or has failed."""
    for thread in threading.enumerate():
        if thread.name == _THREAD and thread is not threading.current_thread():
            thread.join()


class BackgroundWriter:
    """Writes one checkpoint at a time, from buffers that are reused between saves.

    Each write has its own thread, which the interpreter waits for at exit: a submitted checkpoint is published unless
    the process is killed. An error is logged at once and raised by the next call.

    With `writers`, every rank has a BackgroundWriter and submits the same saves: each writes its share of the tensors,
    a write ends when the whole checkpoint is published, and an error of one rank is raised on all.
    """

    def __init__(self, writers: Writers | None = None) -> None:
        self._writers = writers.reconnected() if writers is not None else None
        self._buffers: dict[Key, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, target: Path, tree: dict[str, Any], then: Callable[[], None] | None = None) -> None:
        """Copy the tree and return; a thread writes the checkpoint `target`, then calls `then` (on rank 0 only).

        Waits first for a write under way. The tensors may change as soon as this returns.
        """
        self.wait()
        save = SharedSave(self._writers, Path(target)) if self._writers is not None else None
        try:
            content = split(tree, self._writers)
            copied, events = self._copy(content)
        except BaseException as error:
            if save is not None:
                save.abandon(error)
            raise
        arguments = (Path(target), copied, events, then, save)
        self._thread = threading.Thread(target=self._write, args=arguments, name=_THREAD, daemon=False)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or no thread can be started: write in this one
            self._thread = None
            self._write(*arguments)
            self.check()

    def check(self) -> bool:
        """Raise the error of a finished write, if any; return whether one is under way, without waiting for it."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, CheckpointError):
                raise error
            raise CheckpointError(f"A checkpoint failed in the background: {type(error).__name__}: {error}") from error
        return self._thread is not None

    def wait(self) -> None:
        """Wait for the write under way; raise its error."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def close(self) -> None:
        """Wait, free the buffers, and raise the error of the last write."""
        try:
            self.wait()
        finally:
            self._buffers = {}

    # -- the copy -----------------------------------------------------------------------------------------------------

    def _copy(self, content: Split) -> tuple[Split, list[torch.cuda.Event]]:
        """Copy the content to host buffers; on CUDA the events complete with the copies."""
        kept, self._buffers = self._buffers, {}
        devices: set[torch.device] = set()
        pairs: list[Pair] = []
        # buffers must not be inference tensors: the next save writes to them again
        with torch.inference_mode(False), torch.no_grad():
            for file, tensors in (("model", content.model), ("state", content.state)):
                for name, tensor in tensors.items():
                    buffer = self._buffer(kept.pop((file, name), None), tensor)
                    self._buffers[file, name] = buffer
                    # resolved first: torch would conjugate in the buffer, before the asynchronous copy has arrived
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
        save: SharedSave | None,
    ) -> None:
        try:
            self._await_copies(events, save)
            if save is not None:
                publish_sharded(content, save, then)
                return
            publish(target, content)
            if then is not None:
                then()
        except BaseException as error:
            self._error = error
            if save is None or save.writers.is_main:  # all ranks have the same error
                logger.error("The checkpoint %s failed: %s: %s", target, type(error).__name__, error)

    def _await_copies(self, events: list[torch.cuda.Event], save: SharedSave | None) -> None:
        try:
            for event in events:
                event.synchronize()
        except BaseException as error:
            if save is not None:
                save.abandon(error)
            raise


class DirectWriter(BackgroundWriter):
    """Writes a checkpoint before `submit` returns, from the tensors themselves: nothing is copied."""

    def submit(self, target: Path, tree: dict[str, Any], then: Callable[[], None] | None = None) -> None:
        if self._writers is not None:
            write_sharded(target, tree, self._writers, then)
            return
        write_checkpoint(target, tree)
        if then is not None:
            then()
