"""Recipes, small, and models of others: each export is verified, or refused with a reason, and never wrong."""

from __future__ import annotations

import pytest

from benchmarks.shipping import one
from benchmarks.shipping_models import SMALL, STRANGERS

PACKAGES = {"torchvision": "torchvision", "transformers": "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["pt2", "onnx", "aoti", "torchscript"])
@pytest.mark.parametrize("name", [*SMALL, *STRANGERS])
def test_a_model_is_exported_and_verified(name: str, format: str, small_data: object) -> None:
    if name in STRANGERS and name.partition(" ")[0] in PACKAGES:
        pytest.importorskip(PACKAGES[name.partition(" ")[0]])
    row = one(name, format, full=False)
    assert row["result"] == "verified", row
