"""Run one module under both Trainers and compare: `python -m benchmarks.lightning_modules.compare NAME`, in its place.

Prints one line of JSON: how many tensors of the state differ, and by how much at most.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lightning_modules.modules import cases

SEED = 7


Case = Callable[[], Any]


def made(case: Case) -> Any:
    """Return (module, train loader or datamodule, val loader or None), drawn from one seed."""
    import lightning

    lightning.seed_everything(1, verbose=False)
    return case()


def trainer_of(module: Any) -> Any:
    """Return the Trainer of the package that the module's class comes from."""
    roots = {cls.__module__.partition(".")[0] for cls in type(module).__mro__}
    if "pytorch_lightning" in roots and "lightning" not in roots:
        import pytorch_lightning as package
    else:
        import lightning.pytorch as package
    return package


def by_lightning(case: Case) -> Any:
    module, train, val = made(case)
    package = trainer_of(module)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options = {"max_epochs": 3, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, **quiet}
    trainer = package.Trainer(**options)
    package.seed_everything(SEED, verbose=False)
    trainer.fit(module, train, val)  # it takes a datamodule for a train loader
    return module, trainer.global_step


def by_forge(case: Case) -> Any:
    import forge

    module, train, val = made(case)
    options = {"max_epochs": 3, "device": "cpu", "seed": SEED, "plugins": [], "run_dir": False}
    is_data = hasattr(train, "train_dataloader")
    task = forge.LightningAdapter(module, train if is_data else None)
    result = forge.Trainer(**options).fit(task, None if is_data else train, val)
    return module, result.updates


def compare(name: str) -> dict[str, Any]:
    """Return the outcome of one module."""
    warnings.simplefilter("ignore")
    for noisy in ("lightning.pytorch", "pytorch_lightning", "lightning", "forge"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    case = cases()[name]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # some packages write where they run
        start = {key: value.clone() for key, value in tensors(made(case)[0]).items()}
        theirs, steps = by_lightning(case)
        again, _ = by_lightning(case)
        ours, updates = by_forge(case)
        os.chdir("/")
    expected, twice, found = tensors(theirs), tensors(again), tensors(ours)
    return {
        "name": name,
        "class": f"{type(theirs).__module__.partition('.')[0]}.{type(theirs).__name__}",
        "steps": steps,
        "updates": updates,
        "tensors": len(expected),
        "trained": sum(key not in start or differs(value, start[key]) for key, value in expected.items()),
        "lightning_again": len(unequal(expected, twice)),
        "unequal": len(unequal(expected, found)),
        "largest": largest(expected, found),
    }


def tensors(module: Any) -> dict[str, Any]:
    return {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}


def differs(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    return not (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))


def unequal(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the names that one state lacks, or whose values differ in a bit."""
    return [
        name
        for name in {*expected, *found}
        if name not in expected or name not in found or differs(expected[name], found[name])
    ]


def largest(expected: dict[str, Any], found: dict[str, Any]) -> float:
    gaps = [
        float((expected[name].double() - found[name].double()).abs().max())
        for name in unequal(expected, found)
        if name in expected and name in found and expected[name].shape == found[name].shape and expected[name].numel()
    ]
    return max(gaps, default=0.0)


if __name__ == "__main__":
    print("OUTCOME " + json.dumps(compare(sys.argv[1])))
