"""collie."""

from __future__ import annotations

from typing import Any

from benchmarks.lightning_modules.places import Package

PACKAGE = Package("collie==1.3.1", needs=("docstring-parser", "fire", "tables"), alone=True)


def collie_matrix() -> Any:
    """MatrixFactorizationModel with its own loaders."""
    from collie.interactions import Interactions
    from collie.model import MatrixFactorizationModel

    users, items = [i % 8 for i in range(48)], [(i * 5 + i // 8) % 20 for i in range(48)]
    train = Interactions(users=users, items=items, num_negative_samples=3, allow_missing_ids=True, seed=0)
    return MatrixFactorizationModel(train=train, bias_optimizer=None, lr_scheduler_func=None), None, None
