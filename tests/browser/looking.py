"""A task that logs everything that can be looked at. `forge fit looking.py:Looking`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import forge
from forge_recipes.digits import Batch, DigitsMLP, digits
from forge_recipes.looks import Looks


class Looking(DigitsMLP):
    """Digits, with predictions, mistakes, a confusion matrix, a text and the hidden layer."""

    def __init__(self, hidden: int = 64, lr: float = 3e-3):
        super().__init__(hidden=hidden, lr=lr)
        self._looks = Looks([str(digit) for digit in range(10)])
        self._wrong = 0

    def validation_step(self, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        hidden = self.net[:-1](images)
        logits = self.net[-1](hidden)
        self._looks.add(images.unsqueeze(1), labels, logits, hidden)
        self._wrong += int((logits.argmax(1) != labels).sum())
        return super().validation_step(batch)

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        assert self.trainer is not None
        note, self._wrong = forge.Text(f"**{self._wrong}** digits were read wrongly."), 0
        return {**self._looks.finish(self.trainer.env), "note": note}


data = digits
