"""Checks at the start and on the first batch, for common mistakes of PyTorch training.

Certain mistakes are refused, likely ones cause a warning. Every check runs once per fit, outside the hot path.
"""

from __future__ import annotations

from forge.diagnose.checks.first_batch import check_metrics, check_training_output, first_forward, gives_metrics_later
from forge.diagnose.checks.loaders import (
    refuse_endless,
    refuse_inexact_data,
    refuse_plateau_without_val,
    refuse_unusable_loaders,
    tell_of_inexact_data,
)
from forge.diagnose.checks.losses import LossWatch
from forge.diagnose.checks.non_finite_metrics import warn_of_non_finite
from forge.diagnose.checks.optimizers import check_optimizers, configured
from forge.diagnose.checks.task import check_task, is_lightning, warn_of_near_misses
from forge.diagnose.checks.weights import look_at_weights

OWNER_RETURNED_NONE = (
    "forge_train_step reached core although the step was finished already: its owner returned None. "
    "Return True from the owner of an action."
)

__all__ = [
    "OWNER_RETURNED_NONE",
    "LossWatch",
    "check_metrics",
    "check_optimizers",
    "check_task",
    "check_training_output",
    "configured",
    "first_forward",
    "gives_metrics_later",
    "is_lightning",
    "look_at_weights",
    "refuse_endless",
    "refuse_inexact_data",
    "refuse_plateau_without_val",
    "refuse_unusable_loaders",
    "tell_of_inexact_data",
    "warn_of_near_misses",
    "warn_of_non_finite",
]
