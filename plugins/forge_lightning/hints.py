"""Hints for people who come from Lightning and Hugging Face's Trainer.

Each names what does the same here, and the page about it. forge asks only for names that it does not have.
"""

from __future__ import annotations

FLAGS = "docs/from-lightning.md"
_OPTIMIZER = ("set it in the task's configure_optimizers", "docs/task.md")
_LOADER = ("set it on the loader that you pass to fit", "docs/data.md")
_RANKS = ("ranks are started by --nproc, torchrun or srun, with the plugin ddp or fsdp", "docs/distributed.md")
_WARMUP = ("plugins={'schedule': {'warmup': 500}}, or a share of the run: 0.1", "docs/plugins/schedule.md")
_BEST = (
    "plugins={'checkpoint': {'best': {'monitor': 'val/loss', 'mode': 'min'}}}, then weights='best'",
    "docs/plugins/checkpoint.md",
)
_TRACKER = ("plugins=['tensorboard'] or ['jsonl'], or a plugin of your own", "docs/plugins/tensorboard.md")
_FOLDER = ("run_dir='runs/first'", "docs/runs.md")
_FIT = ("pass it to fit: trainer.fit(task, train, val)", "docs/task.md")

TRAINER: dict[str, tuple[str, str]] = {
    # Lightning's Trainer
    "accelerator": ("device='cuda'", FLAGS),
    "strategy": _RANKS,
    "devices": _RANKS,
    "num_nodes": _RANKS,
    "precision": ("plugins={'amp': {'dtype': 'bf16'}}, or 'fp16'", "docs/plugins/amp.md"),
    "logger": _TRACKER,
    "callbacks": ("plugins=[...]", "docs/writing-plugins.md"),
    "fast_dev_run": ("smoke=True", "docs/plugins/limit.md"),
    "max_steps": ("max_updates=...", FLAGS),
    "min_steps": ("min_updates=...", "docs/plugins/duration.md"),
    "limit_train_batches": ("plugins={'limit': {'train': ...}}", "docs/plugins/limit.md"),
    "limit_val_batches": ("plugins={'limit': {'val': ...}}", "docs/plugins/limit.md"),
    "limit_test_batches": ("plugins={'limit': {'test': ...}}", "docs/plugins/limit.md"),
    "limit_predict_batches": ("plugins={'limit': {'predict': ...}}", "docs/plugins/limit.md"),
    "overfit_batches": ("plugins={'limit': {'overfit': ...}}", "docs/plugins/limit.md"),
    "val_check_interval": ("validate_every='500 updates'", FLAGS),
    "check_val_every_n_epoch": ("validate_every='2 epochs'", FLAGS),
    "num_sanity_val_steps": (
        "validate_first=False for 0; by default one batch of each val loader runs before training",
        "docs/plugins/validate_first.md",
    ),
    "log_every_n_steps": ("log_every=...", FLAGS),
    "enable_checkpointing": ("plugins={'checkpoint': None} removes checkpoints", "docs/plugins/checkpoint.md"),
    "enable_progress_bar": ("plugins={'progress': None} removes the bar", "docs/plugins/progress.md"),
    "enable_model_summary": ("the run card and forge plan show the model", "docs/runs.md"),
    "accumulate_grad_batches": ("plugins={'accumulate': {'window': ...}}", "docs/plugins/accumulate.md"),
    "gradient_clip_val": ("plugins={'clip': {'max_norm': ...}}", "docs/plugins/clip.md"),
    "gradient_clip_algorithm": ("plugins={'clip': {'max_norm': ...}}, or 'max_value'", "docs/plugins/clip.md"),
    "benchmark": ("plugins={'backends': {'cudnn_benchmark': True}}", "docs/plugins/backends.md"),
    "inference_mode": ("evaluation = 'no_grad' on the task", "docs/task.md"),
    "use_distributed_sampler": ("not needed: every rank gets its part of each batch", "docs/distributed.md"),
    "profiler": ("plugins=['profiler']", "docs/plugins/profiler.md"),
    "detect_anomaly": ("plugins=['anomaly']", "docs/plugins/anomaly.md"),
    "barebones": ("plugins=[]", FLAGS),
    "sync_batchnorm": ("plugins={'ddp': {'sync_batchnorm': True}}", "docs/plugins/ddp.md"),
    "reload_dataloaders_every_n_epochs": ("set_epoch on your loader is called for every epoch", "docs/data.md"),
    "default_root_dir": _FOLDER,
    "enable_autolog_hparams": ("not needed: the run card has all options", "docs/runs.md"),
    "model_registry": ("not available; a run folder holds the weights", "docs/runs.md"),
    "weights_save_path": _FOLDER,
    "resume_from_checkpoint": ("resume='auto', or a run folder", "docs/surviving.md"),
    "gpus": _RANKS,
    "auto_lr_find": ("forge tune lr", "docs/recipes-and-cli.md"),
    "auto_scale_batch_size": ("forge tune batch", "docs/recipes-and-cli.md"),
    # Hugging Face's TrainingArguments and Trainer
    "output_dir": _FOLDER,
    "run_name": _FOLDER,
    "logging_dir": _FOLDER,
    "overwrite_output_dir": ("choose another run_dir, or remove the folder", "docs/runs.md"),
    "num_train_epochs": ("max_epochs=...", FLAGS),
    "per_device_train_batch_size": _LOADER,
    "per_device_eval_batch_size": _LOADER,
    "dataloader_num_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_drop_last": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "group_by_length": ("forge.data.Bucketed as the sampler of a Loader", "docs/data.md"),
    "gradient_accumulation_steps": ("plugins={'accumulate': {'window': ...}}", "docs/plugins/accumulate.md"),
    "learning_rate": _OPTIMIZER,
    "lr": _OPTIMIZER,
    "weight_decay": _OPTIMIZER,
    "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER,
    "adam_epsilon": _OPTIMIZER,
    "optim": _OPTIMIZER,
    "optimizers": _OPTIMIZER,
    "optimizer": _OPTIMIZER,
    "max_grad_norm": ("plugins={'clip': {'max_norm': ...}}", "docs/plugins/clip.md"),
    "lr_scheduler_type": ("plugins={'schedule': {'kind': 'cosine'}}", "docs/plugins/schedule.md"),
    "warmup_ratio": _WARMUP,
    "warmup_steps": _WARMUP,
    "logging_steps": ("log_every=...", FLAGS),
    "logging_strategy": ("log_every=...", FLAGS),
    "logging_first_step": ("log_every=1", FLAGS),
    "save_strategy": ("plugins={'checkpoint': {'every': '1 epoch'}}", "docs/plugins/checkpoint.md"),
    "save_steps": ("plugins={'checkpoint': {'every': '500 updates'}}", "docs/plugins/checkpoint.md"),
    "save_total_limit": ("plugins={'checkpoint': {'keep': ...}}", "docs/plugins/checkpoint.md"),
    "eval_strategy": ("validate_every='1 epoch'", FLAGS),
    "evaluation_strategy": ("validate_every='1 epoch'", FLAGS),
    "eval_steps": ("validate_every='500 updates'", FLAGS),
    "eval_on_start": ("validate_first=True", "docs/plugins/validate_first.md"),
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": _BEST,
    "greater_is_better": _BEST,
    "fp16": ("plugins={'amp': {'dtype': 'fp16'}}", "docs/plugins/amp.md"),
    "bf16": ("plugins={'amp': {'dtype': 'bf16'}}", "docs/plugins/amp.md"),
    "tf32": ("plugins=['backends']", "docs/plugins/backends.md"),
    "gradient_checkpointing": ("plugins=['remat']", "docs/plugins/remat.md"),
    "torch_compile": ("plugins=['compile']", "docs/plugins/compile.md"),
    "report_to": _TRACKER,
    "deepspeed": ("plugins=['fsdp']; DeepSpeed is not supported", "docs/plugins/fsdp.md"),
    "fsdp": ("plugins=['fsdp']", "docs/plugins/fsdp.md"),
    "use_cpu": ("device='cpu'", FLAGS),
    "no_cuda": ("device='cpu'", FLAGS),
    "full_determinism": ("deterministic=True and seed=...", "docs/concepts.md"),
    "data_seed": ("seed=... on the loader", "docs/data.md"),
    "label_smoothing_factor": ("label_smoothing= of the task's loss", "docs/task.md"),
    "push_to_hub": ("not available; forge export writes the model", "docs/deployment/index.md"),
    "args": ("the arguments themselves, by name", FLAGS),
    "model": _FIT,
    "train_dataset": _FIT,
    "eval_dataset": _FIT,
    "train_dataloaders": _FIT,
    "val_dataloaders": _FIT,
    "data_collator": ("collate_fn= of the loader", "docs/data.md"),
    "compute_metrics": ("return metrics from validation_step, or from evaluation_end", "docs/task.md"),
}
"""Arguments of a Trainer elsewhere."""

VERBS: dict[str, tuple[str, str]] = {
    "model": ("the task comes first: {verb}(task, ...)", "docs/task.md"),
    "train_dataloaders": ("fit(task, train, val)", "docs/task.md"),
    "train_dataloader": ("fit(task, train, val)", "docs/task.md"),
    "train_dataset": ("fit(task, train, val) with loaders: forge.data.Loader(dataset, batch_size=...)", "docs/data.md"),
    "eval_dataset": ("fit(task, train, val) with loaders: forge.data.Loader(dataset, batch_size=...)", "docs/data.md"),
    "val_dataloaders": ("fit(task, train, val)", "docs/task.md"),
    "val_dataloader": ("fit(task, train, val)", "docs/task.md"),
    "dataloaders": ("{verb}(task, loader)", "docs/task.md"),
    "datamodule": ("pass loaders; forge.LightningAdapter(module, datamodule) makes them", FLAGS),
    "ckpt_path": ("weights='best' or a path; to continue a run, Trainer(resume='auto')", "docs/surviving.md"),
    "resume_from_checkpoint": ("Trainer(resume='auto'), or a run folder", "docs/surviving.md"),
    "weights_only": ("not needed: forge's files hold no code", "docs/surviving.md"),
    "verbose": ("not needed: metrics are returned, and `progress` prints them", "docs/plugins/progress.md"),
    "return_predictions": ("not needed: predict returns the outputs", "docs/task.md"),
    "max_epochs": ("Trainer(max_epochs=...)", FLAGS),
    "epochs": ("Trainer(max_epochs=...)", FLAGS),
}
"""Arguments of fit, validate, test and predict elsewhere."""


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
"""Attributes that only a LightningModule has."""


def hint(about: str, name: str) -> str:
    """Answer forge's question about a name: an argument of the Trainer or of a verb, or an attribute of a task."""
    if about == "task":
        return f"{INSTEAD[name]} (docs/from-lightning.md)." if name in INSTEAD else ""
    answer, page = (TRAINER if about == "Trainer" else VERBS).get(name, ("", ""))
    return f" Use {answer.replace('{verb}', about)} ({page})." if answer else ""
