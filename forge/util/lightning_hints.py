"""Habits of Lightning: what a LightningModule has and a TaskModule has not, and what to write instead.

Nothing stands in their way: a task may have attributes of these names, and `hasattr` says what is true.
"""

from __future__ import annotations

from forge.contract.task import TaskModule

_RETURN = 'return {"loss": loss, "name": value} from the step, and forge logs it under the stage\'s name'
INSTEAD = {
    "log": _RETURN,
    "log_dict": _RETURN,
    "device": "the batch is on the right device already; new tensors go by `x.device`, or `torch.zeros_like(x)`",
    "current_epoch": "ask `self.trainer.progress.epoch`",
    "global_step": "ask `self.trainer.progress.update`",
    "manual_backward": "return the loss, and forge calls backward and steps",
    "hparams": "`self.init_args` has the arguments of `__init__`",
    "save_hyperparameters": "leave it out: `self.init_args` has the arguments of `__init__`, and they are saved",
}


def instead(error: BaseException) -> str:
    """What to write in place of the attribute that a task was asked for; empty for any other error."""
    name = getattr(error, "name", None)
    if isinstance(error, AttributeError) and isinstance(getattr(error, "obj", None), TaskModule) and name in INSTEAD:
        return f"A TaskModule has no self.{name}: {INSTEAD[name]} (docs/from-lightning.md)."
    return ""
