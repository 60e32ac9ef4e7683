"""Fits that are compared: their weights, metrics and counters, and what a rank holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

import forge
from forge.optim.sharded import local


def fitted(
    task: forge.TaskModule, plugins: Sequence[Any], data: Any, val: Any = None, **options: Any
) -> dict[str, Any]:
    """Fit in this process, which may be one of several ranks; bytes of parameters and of moments that it held."""
    held: dict[str, int] = {}

    @forge.on("boundary")
    def watch_sizes(trainer: forge.Trainer) -> None:
        own = [local(p) for p in trainer.task.parameters() if not p.is_meta]
        state = [v for o in trainer.optimizers.values() for s in o.state.values() for v in s.values()]
        moments = [local(v) for v in state if isinstance(v, Tensor) and v.ndim]
        held.update(parameters=sum(p.nbytes for p in own), state=sum(v.nbytes for v in moments))

    options = {"max_epochs": 2, "seed": 0, "device": "cpu", "run_dir": False, "log_every": 2, **options}
    result = forge.Trainer(plugins=[*plugins, watch_sizes], **options).fit(task, data, val)
    weights = {name: value.detach().clone() for name, value in task.state_dict().items()}
    return {"weights": weights, "metrics": result.metrics, "updates": result.updates, "held": held}


def apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of two sets of weights."""
    assert ours.keys() == theirs.keys()
    assert all(type(value) is Tensor for value in ours.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def assert_rounded(plain: Any, alone: Any, ranks: Sequence[Any]) -> None:
    """Ranks in half precision are as far from one process as that is from full precision, and no further."""
    for weights in ranks:
        rounding = max(float((plain[name] - alone[name]).abs().max()) for name in alone)
        assert 0 < apart(weights, alone) < 3 * rounding
