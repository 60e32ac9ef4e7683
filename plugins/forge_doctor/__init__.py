"""Examining a training before it runs for long: `forge doctor`, `forge.doctor` in Python, and the plugin `first_look`.

Names load on first use, so that the verbs' `--help` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_doctor.deadline import Deadline
    from forge_doctor.findings import Finding
    from forge_doctor.patient import Patient
    from forge_doctor.report import DoctorReport

_HOME = {"Deadline": "deadline", "DoctorReport": "report", "Finding": "findings", "Patient": "patient"}

__all__ = ["Deadline", "DoctorReport", "Finding", "Patient"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'forge_doctor' has no attribute {name!r}")
    return getattr(import_module(f"forge_doctor.{_HOME[name]}"), name)
