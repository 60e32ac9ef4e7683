"""The planted bugs: each change still fits its base."""

from __future__ import annotations

from benchmarks.doctor.cases import names
from benchmarks.doctor.changes import HERE, changes
from forge_doctor.findings import FINDINGS


def test_every_change_makes_a_program_of_its_base() -> None:
    for name, change in changes("bugs").items():
        healthy = (HERE / "bases" / f"{change.base}.py").read_text()
        compile(change.program(), f"{name}.py", "exec")
        assert change.sentence, name
        assert change.recipe or change.program() != healthy, f"{name} changes nothing"


def test_a_right_finding_is_one_that_the_doctor_knows() -> None:
    for name, change in changes("bugs").items():
        assert change.findings, name
        assert {finding.removeprefix("note:") for finding in change.findings} <= FINDINGS.keys(), name


def test_every_base_is_examined_as_a_healthy_program() -> None:
    assert {change.base for change in changes("bugs").values()} == set(names("bases"))
