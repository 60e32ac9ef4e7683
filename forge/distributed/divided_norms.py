"""BatchNorm where a batch is divided over ranks: it takes statistics of less than the batch."""

from __future__ import annotations

import logging

from torch import nn

from forge import registry
from forge.contract.run import Run
from forge.torch_internals import BatchNorm
from forge.util.patterns import listed

logger = logging.getLogger("forge")


def dividing_norms(task: nn.Module) -> list[str]:
    """Return the names of BatchNorm modules in training that take statistics of less than a batch where it is
    divided."""
    norms = [(name, module) for name, module in task.named_modules() if isinstance(module, BatchNorm)]
    return [name for name, module in norms if module.training and not isinstance(module, nn.SyncBatchNorm)]


def warn_of_divided_batches(trainer: Run, who: str) -> None:
    """Warn that BatchNorm takes statistics of one rank's samples, so that the run differs from one process."""
    names = dividing_norms(trainer.task)
    if names and trainer.verb == "fit" and trainer.env.data_world > 1 and trainer.env.is_main:
        text = "%s: BatchNorm (%s) takes statistics of the samples of one rank, so the run differs from that of one "
        text += "process." + registry.advice("divided_norms", " On GPUs, {} takes them of the whole batch.")
        logger.warning(text + " GroupNorm and LayerNorm need none.", who, listed(names))
