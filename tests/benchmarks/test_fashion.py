"""The benchmark of the FashionMNIST lab: the plain script does the lab, and the rows say what the runs took."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import fashion


@pytest.mark.slow
def test_the_plain_script_trains_and_ends_with_time_and_accuracy(
    small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchvision")
    from benchmarks import fashion_plain

    data = fashion.unpacked(small_data / "FashionMNIST" / "raw", tmp_path)
    assert sum(parameter.numel() for parameter in fashion_plain.MLP().parameters()) == 269_322
    monkeypatch.setattr(sys, "argv", ["fashion_plain", "--data", str(data), "--epochs", "2"])
    fashion_plain.main()
    told = capsys.readouterr().out.split()
    assert told[-5:-4] == ["seconds"]
    assert float(told[-1]) > 0.5


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
