"""Examining a training before it runs for long: `forge doctor`, and `forge.doctor` in Python."""

from __future__ import annotations

from forge_doctor.doctor import doctor
from forge_doctor.report import DoctorReport

__all__ = ["DoctorReport", "doctor"]
