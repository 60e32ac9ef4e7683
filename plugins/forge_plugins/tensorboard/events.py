"""Event files for TensorBoard, in the order and under the names that it needs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forge
from forge.metrics import drawing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("forge")

PATIENCE = 16
"""Attempts to get a file name that sorts last, an eighth of a second apart."""


def new_file(folder: Path, first: int | None, flush_seconds: int) -> SummaryWriter:
    """A writer to a new file, which takes back everything from update `first` on.

    TensorBoard reads files in the order of their names, and a name begins with the second that it was made in.
    """
    from torch.utils.tensorboard import SummaryWriter

    tries = PATIENCE
    while True:
        there = set(folder.glob("*tfevents*"))
        writer = SummaryWriter(str(folder), max_queue=1000, flush_secs=flush_seconds, purge_step=first)
        made = set(folder.glob("*tfevents*")) - there
        if not there or not made or max(made) > max(there):
            return writer
        if not tries:
            logger.warning(
                "tensorboard: %s is newer than this machine's clock: updates may be drawn twice.", max(there)
            )
            return writer
        tries -= 1
        writer.close()
        for file in made:
            file.unlink()
        time.sleep(1 / 8)  # until the next second


def add_restart(writer: SummaryWriter, first: int) -> None:
    """Make TensorBoard drop everything from update `first` on."""
    from tensorboard.compat.proto import event_pb2

    log: Any = event_pb2  # its classes are created at import
    file_of(writer).add_event(log.Event(session_log=log.SessionLog(status=log.SessionLog.START)), first)


def add_scalars(writer: SummaryWriter, scalars: Mapping[str, float], update: int) -> None:
    """Write all scalars of a log as one event; add_scalar would make one for each."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    file_of(writer).add_summary(Summary(value=values), update)


def add_image(writer: SummaryWriter, name: str, image: forge.Image, update: int) -> None:
    """Write an image, and its caption as a text."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

    height, width = image.data.shape[-2:]
    channels = 1 if image.data.ndim == 2 else image.data.size(0)
    shown = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=drawing.png(image))
    file_of(writer).add_summary(Summary(value=[Summary.Value(tag=name, image=shown)]), update)
    if image.caption:
        add_text(writer, f"{name}/caption", image.caption, update)


def add_histogram(writer: SummaryWriter, name: str, histogram: forge.Histogram, update: int) -> None:
    """Write a histogram; in its sums every value counts as the middle of its bin."""
    counts, edges = histogram.counts.detach().cpu().double(), histogram.edges.detach().cpu().double()
    left, right = edges[:-1], edges[1:]
    middle = (left + right) / 2
    filled = counts.nonzero().flatten().tolist() or [0]
    writer.add_histogram_raw(
        name,
        min=left[filled[0]].item(),
        max=right[filled[-1]].item(),
        num=counts.sum().item(),
        sum=(counts * middle).sum().item(),
        sum_squares=(counts * middle**2).sum().item(),
        bucket_limits=right.tolist(),
        bucket_counts=counts.tolist(),
        global_step=update,
    )


def add_text(writer: SummaryWriter, name: str, markdown: str, update: int) -> None:
    """Write a text under its own name; the writer's add_text would append "/text_summary"."""
    from torch.utils.tensorboard.summary import text

    summary = text(name, markdown)
    summary.value[0].tag = name
    file_of(writer).add_summary(summary, update)


def add_hyperparameters(writer: SummaryWriter, values: Mapping[str, bool | int | float | str]) -> None:
    """Write hyperparameters for the HPARAMS page to this run's file; add_hparams would create a second run.

    The page finds its columns in the runs: every hyperparameter of any of them, and every scalar. A list of columns in
    one run, as add_hparams writes it, would hide those of all others.
    """
    from torch.utils.tensorboard.summary import hparams

    _, start, _ = hparams(dict(values), {})
    file_of(writer).add_summary(start)


def add_end_of_session(writer: SummaryWriter) -> None:
    """Mark the run as a success. TensorBoard keeps the first end, so a run that may be resumed has none."""
    from torch.utils.tensorboard.summary import hparams

    _, _, end = hparams({}, {})
    file_of(writer).add_summary(end)


def file_of(writer: SummaryWriter) -> Any:
    """Return the writer's file, which takes raw events and summaries."""
    return writer._get_file_writer()
