"""Points for TensorBoard's PROJECTOR page: files beside the events, the latest of each name.

SummaryWriter.add_embedding makes a folder for every update and lists only those of its own process.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import forge
from forge.metrics import drawing
from forge.util.files import atomic_write

logger = logging.getLogger("forge")

CONFIG = "projector_config.pbtxt"
FOLDER = "projector"
WIDEST = 8192
"""Largest size of a sheet of images that is shown, in pixels."""


def write(folder: str | Path, name: str, embedding: forge.Embedding) -> None:
    """Write points, replacing earlier ones of that name."""
    home = Path(folder) / FOLDER / quote(name, safe="")
    home.mkdir(parents=True, exist_ok=True)
    vectors = embedding.vectors.detach().cpu().float().nan_to_num().numpy()
    with atomic_write(home / "vectors.tsv") as path:
        np.savetxt(path, vectors, fmt="%.6g", delimiter="\t")
    for file in ("labels.tsv", "drawing.png"):
        (home / file).unlink(missing_ok=True)
    if embedding.labels:
        # tabs separate columns, and empty lines are dropped
        lines = "".join(f"{' '.join(str(label).split()) or '–'}\n" for label in embedding.labels)
        with atomic_write(home / "labels.tsv") as path:
            path.write_text(lines, encoding="utf-8")
    size = None if embedding.images is None else _draw(home / "drawing.png", embedding.images)
    _list(Path(folder), home, name, size)


def clear(folder: str | Path) -> None:
    """Remove all points of an earlier fit."""
    (Path(folder) / CONFIG).unlink(missing_ok=True)
    shutil.rmtree(Path(folder) / FOLDER, ignore_errors=True)


def as_text(embedding: forge.Embedding) -> str:
    """Return the text for the TEXT page."""
    count, width = embedding.vectors.shape
    return f"{count:,} points of {width:,} dimensions. The PROJECTOR page shows the latest."


def _list(folder: Path, home: Path, name: str, size: tuple[int, int] | None) -> None:
    """Add the points to the list, beside those of other names."""
    from google.protobuf import text_format
    from tensorboard.plugins.projector import projector_config_pb2

    config: Any = projector_config_pb2.ProjectorConfig()  # pyright: ignore[reportAttributeAccessIssue]
    if (folder / CONFIG).exists():
        try:
            text_format.Parse((folder / CONFIG).read_text(encoding="utf-8"), config)
        except (text_format.ParseError, UnicodeDecodeError) as error:
            logger.warning("tensorboard: %s is damaged and is written again: %s.", folder / CONFIG, error)
            os.replace(folder / CONFIG, folder / f"{CONFIG}.damaged")
            config.Clear()
    others = [entry for entry in config.embeddings if entry.tensor_name != name]
    del config.embeddings[:]
    config.embeddings.extend(others)
    entry = config.embeddings.add(tensor_name=name, tensor_path=_from(folder, home / "vectors.tsv"))
    if (home / "labels.tsv").exists():
        entry.metadata_path = _from(folder, home / "labels.tsv")
    if size is not None:
        entry.sprite.image_path = _from(folder, home / "drawing.png")
        entry.sprite.single_image_dim.extend(size)
    text = text_format.MessageToString(config)
    with atomic_write(folder / CONFIG) as path:
        path.write_text(text, encoding="utf-8")


def _draw(file: Path, images: Tensor) -> tuple[int, int]:
    """Draw all images on one square sheet, row by row; return (width, height) of each."""
    images = images.detach().cpu()
    images = images.float() if images.is_floating_point() else images.float() / 255
    columns = math.ceil(math.sqrt(len(images)))
    most = WIDEST // columns
    if max(images.shape[2:]) > most:
        images = F.interpolate(images, size=(min(images.shape[2], most), min(images.shape[3], most)), mode="area")
    height, width = images.shape[2:]
    channels = images.size(1)
    sheet = torch.zeros(columns * columns, channels, height, width)
    sheet[: len(images)] = images
    sheet = sheet.view(columns, columns, channels, height, width).permute(2, 0, 3, 1, 4)
    drawn = drawing.png(forge.Image(sheet.reshape(channels, columns * height, columns * width)))
    with atomic_write(file) as path:
        path.write_bytes(drawn)
    return width, height


def _from(folder: Path, file: Path) -> str:
    """Return a path relative to the folder of the list, as TensorBoard needs it."""
    return file.relative_to(folder).as_posix()
