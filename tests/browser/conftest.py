"""Tests in a real browser: only where they are asked for."""

from __future__ import annotations

import os

import pytest

ASKED = os.environ.get("FORGE_BROWSER") == "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: needs Chromium and playwright; runs in `make test-browser` only")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("browser") is not None and not ASKED:
            item.add_marker(pytest.mark.skip(reason="needs a browser: run `make test-browser`"))
