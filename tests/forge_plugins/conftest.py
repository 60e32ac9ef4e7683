"""What tests of plugins need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def guards_are_not_timed() -> Iterator[None]:
    """torch times the guards of every graph, for its own log, by touching 32 MB: longer than a small graph takes."""
    import torch._dynamo.guards as guards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "profile_guard_manager", lambda *arguments: 0.0, raising=False)
        yield
