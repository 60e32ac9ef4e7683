"""What the tests of checks share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import forge
from tests.support.tasks import fit


def assert_refused(task: Any, message: str, train: Any = None, error: type[Exception] = forge.TaskError) -> None:
    with pytest.raises(error, match=message):
        fit(task, train)


def said_by(*args: Any, **options: Any) -> list[str]:
    """What a fit warns of, with the name of the file that each warning is about."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(*args, **options)
    return [f"{Path(each.filename).name}: {each.message}" for each in said]
