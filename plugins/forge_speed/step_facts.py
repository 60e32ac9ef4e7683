"""What the first trial learns about a task: device, optimizers, layers and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW

from forge.contract.hooks import hookimpl
from forge.contract.run import Run
from forge.contract.step import Step
from forge.engine.trainer import Trainer
from forge.torch_internals import BatchNorm, pytree
from forge.tuning.step_timer import StepTimer
from forge.util.blocks import repeated


@dataclass(slots=True)
class StepFacts:
    """What decides which levers apply to a task."""

    device: str = "cpu"
    "Its type: cpu, cuda."
    blocks: tuple[str, ...] = ()
    "Classes of repeated blocks."
    convolutions: bool = False
    "Whether weights have four dimensions."
    batch_norm: bool = False
    "Whether a layer's statistics depend on the micro-batch."
    attention: bool = False
    "Whether the first update calls torch's attention."
    float32: bool = True
    "Whether all weights are float32."
    not_fused: str = ""
    "Why the optimizers get no fused step; empty if they do."
    window: int = 1
    "Micro-batches in an update."
    samples: int = 0
    "Samples in the first update."
    inputs: str = ""
    "Shapes and types of the first micro-batch."

    @classmethod
    def of(cls, trainer: Run) -> StepFacts:
        """Return the facts about a run that has been built."""
        task = trainer.task
        weights = [p for p in task.parameters() if p.is_floating_point()]
        return cls(
            device=trainer.env.device.type,
            blocks=repeated_classes(task),
            convolutions=any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in task.modules()),
            batch_norm=any(isinstance(m, BatchNorm) for m in task.modules()),
            float32=all(p.dtype is torch.float32 for p in weights),
            not_fused=_not_fused(trainer),
            window=trainer.window,
        )


def repeated_classes(task: nn.Module) -> tuple[str, ...]:
    """Return the classes of the outermost repeated blocks."""
    return tuple(dict.fromkeys(type(block).__name__ for block in repeated(task).values()))


def _not_fused(trainer: Run) -> str:
    """Return why no optimizer of the run would gain a fused step."""
    reasons = []
    for optimizer in trainer.optimizers.values():
        if type(optimizer) not in (SGD, Adam, AdamW, Adagrad):
            reasons.append(f"torch has no fused {type(optimizer).__name__}")
        elif any(group.get(way) is not None for group in optimizer.param_groups for way in ("fused", "foreach")):
            reasons.append(f"{type(optimizer).__name__} chooses its step itself")
        else:
            return ""
    return reasons[0] if reasons else "no optimizer"


class LookingTimer(StepTimer):
    """Measures a trial, and learns the facts about its step."""

    def __init__(self, share: int = 1):
        super().__init__(share)
        self.facts = StepFacts()
        self._calls = 0
        self._plain: Any = None

    @hookimpl
    def forge_start(self, trainer: Trainer) -> None:
        super().forge_start(trainer)
        self.facts = StepFacts.of(trainer)
        self._plain = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._counted  # pyright: ignore[reportAttributeAccessIssue]

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        if step.index == 0:
            self._stop_counting()
            self.facts.attention, self.facts.samples = self._calls > 0, step.samples
            leaves = [leaf for leaf in pytree.tree_leaves(step.window[0]) if isinstance(leaf, Tensor)]
            self.facts.inputs = ", ".join(f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in leaves)
        super().forge_step_end(step)

    @hookimpl
    def forge_end(self, trainer: Trainer) -> None:
        self._stop_counting()
        super().forge_end(trainer)

    def _counted(self, *arguments: Any, **options: Any) -> Tensor:
        self._calls += 1
        return self._plain(*arguments, **options)

    def _stop_counting(self) -> None:
        if self._plain is not None:
            functional.scaled_dot_product_attention = self._plain  # pyright: ignore[reportAttributeAccessIssue]
            self._plain = None
