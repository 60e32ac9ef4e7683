"""No test fails because a machine is slow: limits of time are PATIENCE, or say why they cannot."""

from __future__ import annotations

import ast

import pytest

from tests.limits import BEGIN, README, found, table, unexplained


def test_every_limit_of_time_is_patience_or_says_why_it_cannot_fail() -> None:
    assert unexplained() == [], "Wait PATIENCE (tests/support/patience.py), or write `# limit: why` on the line."


def test_the_table_of_limits_is_current() -> None:
    assert README.read_text().partition(BEGIN)[2].strip() == table().strip(), "python -m tests.limits"


@pytest.mark.parametrize(
    "code",
    [
        "process.wait(60)",
        "run(words, timeout=30)",
        "thread.join(3 + GRACE)",
        "end = time.monotonic() + 5",
        "assert time.perf_counter() - began < 2",
        "time.sleep(1)",
        "for _ in range(100):\n    time.sleep(0.1)",
        "@settings(deadline=200)\ndef test(): ...",
        "def call(timeout: float = 60): ...",
        "signal.alarm(20)",
    ],
)
def test_a_limit_is_seen(code: str) -> None:
    assert list(found(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    ["process.wait(PATIENCE)", "', '.join(['a'] * 3)", "while not done():\n    time.sleep(0.1)", "run(timeout=None)"],
)
def test_what_limits_nothing_is_none(code: str) -> None:
    assert not list(found(ast.parse(code)))
