"""The planted bugs and the healthy variants: each change still fits its base."""

from __future__ import annotations

import json

import pytest

from benchmarks.doctor.cases import names
from benchmarks.doctor.changes import HERE, changes
from forge_doctor.findings import FINDINGS
from tests.support.profiles import some

TABLES = ("bugs", "healthy")


@pytest.mark.parametrize("kind", some(TABLES))
def test_every_change_makes_a_program_of_its_base(kind: str) -> None:
    for name, change in changes(kind).items():
        healthy = (HERE / "bases" / f"{change.base}.py").read_text()
        compile(change.program(), f"{name}.py", "exec")
        assert change.sentence, name
        assert change.recipe or not change.places or change.program() != healthy, f"{name} changes nothing"


@pytest.mark.parametrize("kind", TABLES)
def test_a_right_finding_is_one_that_the_doctor_knows(kind: str) -> None:
    given = {finding.removeprefix("note:") for change in changes(kind).values() for finding in change.findings}
    assert given <= FINDINGS.keys()
    assert bool(given) == (kind == "bugs")


def test_every_base_is_examined_as_a_healthy_program() -> None:
    used = {change.base for kind in TABLES for change in changes(kind).values()}
    assert used == set(names("bases"))


def test_every_bug_was_examined() -> None:
    """Otherwise the page of its finding has no example: `python -m benchmarks.doctor bugs --only NAME --record`."""
    assert set(json.loads((HERE / "FOUND.json").read_text())) == set(changes("bugs"))
