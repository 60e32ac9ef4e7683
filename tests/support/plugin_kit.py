"""How much of the conformance kit the quick profile runs."""

from __future__ import annotations

from tests.conftest import PROFILE

TWO = "a fit with two optimizers"
LEFT_OUT = ["cost", "a fit with accumulation", TWO] if PROFILE == "quick" else []
"""Left out of `check_plugin`: a fit with both accumulation and two optimizers stands for either; what a plugin costs is
measured, not judged."""
PLAINEST = [*LEFT_OUT, f"{TWO} and accumulation"] if PROFILE == "quick" else []
"""Left out where two optimizers make no difference to what is found."""
