"""The benchmark of the FashionMNIST lab: the plain script does the lab, and the rows say what the runs took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_forges_script_ends_with_the_same_words(
    small_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import fashion_forge

    words = ["fashion_forge", "--data", str(small_data), "--epochs", "2", "--run-dir", "run", "--fused"]
    monkeypatch.setattr(sys, "argv", words)
    fashion_forge.main()
    told = capsys.readouterr().out.split()
    assert told[-5:-4] == ["seconds"]
    last = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    assert float(told[-1]) == pytest.approx(last["val/accuracy"], abs=1e-4)
