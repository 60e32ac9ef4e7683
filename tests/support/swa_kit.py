"""What the tests of swa share."""

from __future__ import annotations
