"""Operations without a deterministic implementation: name the operation, its line, and a replacement.

In a run with `deterministic=True` torch raises an error that names only a kernel.
"""

from __future__ import annotations

import re

from forge.contract.run import Run
from forge.diagnose.again import forward_line, is_in_backward
from forge.diagnose.scene import scene_of

RAISED = re.compile(r"(.+?) does not have a deterministic implementation, but you set")

INSTEAD = {
    "upsample_": "F.interpolate(mode='nearest') has a deterministic backward, and so has a ConvTranspose2d.",
    "grid_sampler_": "Sample by indexing (gather the neighbours and weigh them), or run F.grid_sample on the CPU.",
    "ctc_loss": "Compute the loss on the CPU: F.ctc_loss(log_probs.cpu(), targets.cpu(), ...).",
    "nll_loss2d": "Flatten first: F.cross_entropy(logits.movedim(1, -1).flatten(0, -2), labels.flatten()).",
    "adaptive_avg_pool": "For one output per channel write x.mean((-2, -1)); else an AvgPool2d of fixed size.",
    "adaptive_max_pool": "For one output per channel write x.amax((-2, -1)); else a MaxPool2d of fixed size.",
    "avg_pool3d": "Pool over two dimensions with F.avg_pool2d, then over the third with F.avg_pool1d.",
    "max_pool3d": "Pool over two dimensions with F.max_pool2d, then over the third with F.max_pool1d.",
    "fractional_max_pool": "Use a MaxPool2d of fixed size.",
    "max_unpool": "Use F.interpolate(mode='nearest') or a ConvTranspose2d.",
    "reflection_pad": "Pad with zeros (padding_mode='zeros'), or concatenate flipped slices: x.flip(-1).",
    "replication_pad": "Pad with zeros (padding_mode='zeros'), or concatenate expanded edges.",
    "embedding_bag": "Take F.embedding(...).amax(1), or an EmbeddingBag with mode 'sum' or 'mean'.",
    "put_": "Write x.view(-1)[index] = values, or x.index_put_((index,), values).",
    "histc": "Use torch.histogram on the CPU, or torch.bincount of bucket numbers without weights.",
    "bincount": "Use torch.zeros(n).index_add_(0, indices, weights), which has a deterministic form.",
    "median": "Use torch.quantile(x, 0.5, dim), or x.sort(dim).values.",
    "kthvalue": "Use x.sort(dim).values.select(dim, k - 1).",
    "cumsum": "Multiply with a triangular matrix of ones, or run it on the CPU.",
    "scatter_reduce": "Sums and means can be written with index_add_, which has a deterministic form.",
    "scatter_add": "Use index_add_ along one dimension, which has a deterministic form.",
}
"""By a part of the kernel's name: a deterministic replacement that does the same, or nearly."""
OTHERWISE = "Write it with other operations, or run it on the CPU."


def explanation(trainer: Run, error: BaseException) -> str:
    """Return the message for torch's error about such an operation; "" for any other error."""
    found = RAISED.match(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return ""
    operation = found.group(1)
    asked = "deterministic=True" if trainer.deterministic else "torch.use_deterministic_algorithms is on"
    parts = [
        f"{asked}, but {operation} has no deterministic implementation.",
        _called_at(trainer, error) or _called_before_backward(trainer, error),
        next((advice for part, advice in INSTEAD.items() if part in operation), OTHERWISE),
        "Or train with trainer.deterministic=false: two runs may then differ in their last bits.",
    ]
    return " ".join(filter(None, parts))


def _called_at(trainer: Run, error: BaseException) -> str:
    """Name the innermost line of the user's code that forge called, and its module."""
    scene = None if is_in_backward(error) else scene_of(trainer.task, error)
    if scene is None:
        return ""
    module = f", in the module {scene.name} ({type(scene.module).__name__})" if scene.module is not None else ""
    return f"It was called at {scene.line}{module}."


def _called_before_backward(trainer: Run, error: BaseException) -> str:
    """Name the line of the forward pass whose gradient failed in backward."""
    if not is_in_backward(error):
        return ""
    line = forward_line(trainer, error)
    return f"It is in the backward of what was called at {line}." if line else "It is in the backward pass."
