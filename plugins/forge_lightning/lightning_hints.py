"""Hints for users of Lightning: replacements for attributes that only a LightningModule has.

A task may define attributes of these names; only a missing one gives the hint.
"""

from __future__ import annotations

_RETURN = 'return {"loss": loss, "name": value} from the step, and forge logs it under the stage\'s name'
INSTEAD = {
    "log": _RETURN,
    "log_dict": _RETURN,
    "device": "the batch is on the right device already; new tensors go by `x.device`, or `torch.zeros_like(x)`",
    "current_epoch": "ask `self.trainer.progress.epoch`",
    "global_step": "ask `self.trainer.progress.update`",
    "manual_backward": "return the loss, and forge calls backward and steps",
    "optimizers": "return the loss, and forge steps; several optimizers are a dict, and the step gets the name",
    "lr_schedulers": "return (optimizer, schedule) from configure_optimizers, and forge steps it",
    "toggle_optimizer": "not needed: each optimizer trains its own parameters alone",
    "untoggle_optimizer": "not needed: each optimizer trains its own parameters alone",
    "clip_gradients": "use the plugin `clip`",
    "logger": 'publish what is no number with `self.trainer.publish({"name": forge.Image(...)})`',
    "global_rank": "ask `self.trainer.env.rank`",
    "local_rank": "ask `self.trainer.env.device`",
    "all_gather": "use `self.trainer.env.gather(value)` for plain data",
    "print": "use `print`; `self.trainer.env.is_main` is true on one rank",
    "freeze": "use the plugin `freeze`, or `requires_grad_(False)`",
    "unfreeze": "use the plugin `freeze` with `thaw`",
    "to_onnx": "use `forge export --format onnx`",
    "to_torchscript": "use `forge export --format torchscript`",
    "load_from_checkpoint": "use `from_checkpoint`",
    "hparams": "`self.init_args` has the arguments of `__init__`",
    "save_hyperparameters": "leave it out: `self.init_args` has the arguments of `__init__`, and they are saved",
}


def hint_for(error: BaseException, task_class: type) -> str:
    """Return the replacement for the attribute that a task lacks, by `error`; "" for any other error."""
    name = getattr(error, "name", None)
    if isinstance(error, AttributeError) and isinstance(getattr(error, "obj", None), task_class) and name in INSTEAD:
        return f"A TaskModule has no self.{name}: {INSTEAD[name]} (docs/from-lightning.md)."
    return ""
