"""Data parallel training."""

from __future__ import annotations

from forge.distributed.replicated import Replicated


class DDP(Replicated):
    """Train on several processes that each hold a copy of the model, with torch's DistributedDataParallel.

    Start them with `forge fit RECIPE --nproc 4 -p ddp`, with torchrun, or with srun. The batch size of a recipe is the
    global one: every rank takes its part of each batch, so all ranks together follow the order of a single process, and
    a run can be resumed with another number of ranks. Gradients are averaged once per update, during the backward pass
    of the window's last micro-batch; a short last batch is weighted correctly. Gradients are sent over NCCL between
    GPUs and over gloo between CPUs.

    When to use it: if the model, its gradients and its optimizer state fit on every device. Otherwise use `fsdp`.

    What you see: the batch size per rank at the start. If a rank fails or stalls, all ranks end with a message that
    names it.

    Together with: with `compile`, torch splits compiled code at the ends of buckets, so that they are sent during the
    backward pass. This costs fusion: compile by blocks (compile.blocks), and set split_graphs=false if there are many
    blocks. With several optimizers `find_unused` is on, because each turn leaves the other parameters without
    gradients. When parameters are frozen or unfrozen during a run, the wrapper is rebuilt, because the old one would
    never average them. Buffers, such as BatchNorm's statistics, are those of rank 0, in training, evaluation and
    checkpoints; `sync_batchnorm` computes them over the whole batch.

    ::

        forge fit quickstart --nproc 2 -p ddp trainer.max_epochs=1
    """

    cures = {
        **Replicated.cures,
        "processes": "-p {name}",
        "divided_norms": "{name}.sync_batchnorm=true",
        "sparse": "-p {name}",
    }
