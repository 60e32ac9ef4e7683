"""Examining a training before it runs for long: `forge doctor`, and `forge.doctor` in Python."""

from __future__ import annotations

from forge.examine.doctor import doctor
from forge.examine.report import DoctorReport

__all__ = ["DoctorReport", "doctor"]
