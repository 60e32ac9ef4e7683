"""The page of a sweep shows its trials, escapes what it is given, and loads nothing."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from forge_sweep.sweep_page import SweepSummary, TrialLine, sweep_page

RATES = [0.1, 0.01, 0.001, 0.0001, 0.05, 0.002]


def line(number: int, **changed: Any) -> TrialLine:
    values: dict[str, Any] = {
        "state": "complete",
        "params": {"task.lr": RATES[number], "task.act": ["relu", "gelu"][number % 2]},
        "value": 0.5 + number / 10,
        "reason": "",
        "seconds": 2.0,
        "folder": f"trial-{number:04d}",
    }
    return TrialLine(number, **{**values, **changed})


def summary(trials: list[TrialLine], mode: str = "max", best: int | None = None) -> SweepSummary:
    options = {"task.lr": "log(0.0001,0.1)", "task.act": "choice(relu,gelu)"}
    return SweepSummary("quickstart", "val/a", mode, "tpe", options, frozenset({"task.lr"}), trials, best, {}, "")


def drawn(page: str) -> ElementTree.Element:
    """The parallel coordinates, by a parser of XML."""
    found = re.search(r'<svg[^>]*aria-label="parallel coordinates".*?</svg>', page, flags=re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def lines_of(page: str) -> dict[int, ElementTree.Element]:
    return {int(path.attrib["data-trial"]): path for path in drawn(page).iter() if "data-trial" in path.attrib}


def test_a_line_for_each_trial_with_a_value_the_best_on_top() -> None:
    trials = [line(n) for n in range(4)] + [line(4, state="failed", value=None, reason="no memory")]
    page = sweep_page(summary(trials, best=1))
    assert list(lines_of(page)) == [0, 2, 3, 1]
    assert "var(--c1)" in lines_of(page)[1].attrib["stroke"]
    assert "no memory" in page
    rows = re.findall(r"class='k'>(trial-\d+)<", page)
    assert rows == ["trial-0003", "trial-0002", "trial-0001", "trial-0000", "trial-0004"]


def test_everything_is_escaped_and_nothing_is_loaded() -> None:
    odd = "<script>alert(1)</script>"
    trials = [line(0, state="failed", value=None, reason=odd), line(1, params={"task.lr": 0.1, "task.act": odd})]
    page = sweep_page(
        SweepSummary(odd, odd, "max", odd, {"task.lr": odd, "task.act": odd}, frozenset(), trials, 1, {odd: 1.0}, odd)
    )
    assert "<script" not in page
    assert not re.search(r"(src|href)=['\"]?http", page)


def test_a_sweep_without_a_trial_has_a_page() -> None:
    assert "nothing to draw yet" in sweep_page(summary([]))
