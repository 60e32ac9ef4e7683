"""Scenarios of manual optimization."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from tests.forge_lightning.both import Scenario, Subject, hearing


class Manual(Subject):
    """One optimizer, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss, on_step=True, on_epoch=True)


class Returns(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        return {"loss": self.loss(batch), "more": batch_idx}


class Gathers(Manual):
    """Gradients of two batches, and a validation between them that drops them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Closes(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class SecondOrder(Closes):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Scheduled(Manual):
    """Schedulers of both kinds, stepped by hand."""

    def schedulers(self) -> Any:
        return self.lr_schedulers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.schedulers()[0].step()

    def on_train_epoch_end(self) -> None:
        self.schedulers()[1].step(self.trainer.callback_metrics["train_loss"])

    def configure_optimizers(self) -> Any:
        optimizer = Adam(self.parameters(), lr=0.02)
        plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return [optimizer], [ExponentialLR(optimizer, 0.9), plateau]


class Adversarial(Manual):
    """Two optimizers that train in turns."""

    toggles = "none"

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        both: Any = self.optimizers()
        first, second = both
        if self.toggles == "methods":
            self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(F.softplus(-self.critic(self.net(batch[0]))).mean())
        first.step()
        if self.toggles == "methods":
            self.untoggle_optimizer(first)
        if batch_idx % 2:
            return
        if self.toggles == "with":
            with second.toggle_model():
                self._second(second, batch)
        else:
            self._second(second, batch)
        self.heard.append([p.requires_grad for p in self.parameters()])

    def _second(self, second: Any, batch: Any) -> None:
        loss = (self.critic(self.net(batch[0])) - batch[1]).square().mean()
        self.log("critic", loss, on_epoch=True)
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self) -> Any:
        return [Adam(self.net.parameters(), lr=0.02), SGD(self.critic.parameters(), lr=0.1)]


class ByMethods(Adversarial):
    toggles = "methods"


class ByWith(Adversarial):
    toggles = "with"


class Shared(Adversarial):
    """Both optimizers step the same parameters."""

    def configure_optimizers(self) -> Any:
        return [Adam(self.parameters(), lr=0.02), SGD(self.parameters(), lr=0.1)]


class Plain(Manual):
    """Plain torch calls in place of Lightning's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()
        wrapped: Any = self.optimizers()
        self.heard.append((self.trainer.is_last_batch, type(wrapped.optimizer).__name__))
        assert isinstance(wrapped, torch.optim.Optimizer)


def manual() -> dict[str, Scenario]:
    kinds = (Manual, Returns, Gathers, Closes, SecondOrder, Scheduled, Adversarial, ByMethods, ByWith, Shared, Plain)
    found = {f"manual-{kind.__name__.lower()}": Scenario(kind) for kind in kinds}
    found |= {f"manual-{kind.__name__.lower()}-hooks": Scenario(hearing(kind)) for kind in (Manual, Closes, ByMethods)}
    return found
