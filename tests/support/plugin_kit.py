"""Built-in plugins as the conformance kit gets them, and how much of it the quick profile runs."""

from __future__ import annotations

from typing import Any

from tests.conftest import PROFILE

TWO = "a fit with two optimizers"
LEFT_OUT = ["a fit with accumulation", TWO] if PROFILE == "quick" else []
"""Left out of `check_plugin`: a fit with both accumulation and two optimizers stands for either."""
PLAINEST = [*LEFT_OUT, f"{TWO} and accumulation"] if PROFILE == "quick" else []
"""Left out where two optimizers make no difference to what is found."""

ACTING: dict[str, dict[str, Any]] = {
    "accumulate": {"window": 2},
    "amp": {"dtype": "fp16", "init_scale": 2.0**20, "growth_interval": 2},
    "checkpoint": {"every": "2 updates", "best": {"monitor": "val/loss", "mode": "min"}},
    "clip": {"max_norm": 0.1, "max_value": 0.05},
    "compile": {"backend": "eager"},
    "early_stop": {"target": 100.0, "after": "4 updates"},
    "duration": {"max_time": "1 h", "min_updates": 3},
    "ema": {"decay": 0.9, "start": 1},
    "kernels": {"use": ["cross_entropy"]},
    "limit": {"train": 4, "val": 1},
    "freeze": {"modules": "*.[01]", "thaw": {"*.0.weight": "2 updates", "*": "5 updates"}},
    "monitor": {"every": "2 updates", "histograms": True},
    "profiler": {"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "memory": True},
    "progress": {"every": "2 updates"},
    "remat": {"modules": "Sequential"},
    "schedule": {"warmup": 2},
    "swa": {"start": 2, "every": "2 updates", "lr": 0.05, "anneal": 2},
}
"""Options with which a built-in plugin acts within the few updates of the kit, where its defaults would not."""
PACKAGES = {"mlflow": "mlflow", "wandb": "wandb"}
"""Plugins that need a package of others."""
