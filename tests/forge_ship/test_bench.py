"""`forge bench`: engines take turns, and what cannot be made is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.cli import main
from forge.runs.trained_task import Source
from forge_ship.bench import bench
from forge_ship.engine import ExportError
from tests.support.ships import Classifier, batches, trained_run


def test_engines_are_timed_at_every_size() -> None:
    source = Source(Classifier().eval())
    found = bench(source, batches(), engines=["eager", "torchscript"], batches=[1, 4], seconds=0.01)
    assert [(timing.engine, timing.batch) for timing in found.timings] == [
        ("eager", 1),
        ("torchscript", 1),
        ("eager", 4),
        ("torchscript", 4),
    ]
    assert all(0 < timing.p50 <= timing.p95 <= timing.p99 for timing in found.timings)


def test_an_engine_that_cannot_be_made_is_left_out_with_its_reason() -> None:
    found = bench(Source(Classifier().eval()), batches(), engines=["eager", "safetensors"], batches=[1], seconds=0.01)
    assert [timing.engine for timing in found.timings] == ["eager"]
    assert "weights alone" in found.missing["safetensors"]


@pytest.mark.parametrize(("options", "said"), [({"engines": ["magic"]}, "magic"), ({"batches": [0]}, "at least 1")])
def test_what_cannot_be_timed_is_refused(options: dict, said: str) -> None:
    with pytest.raises(ExportError, match=said):
        bench(Source(Classifier().eval()), batches(), **options)


def test_the_command_line_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained_run(tmp_path / "run")
    (tmp_path / "mine.py").write_text(
        "from tests.support.ships import Classifier as Base, data\nclass Mine(Base): pass\n"
    )
    mine = str(tmp_path / "mine.py")
    words = ["bench", str(tmp_path / "run"), "--task", f"{mine}:Mine", "--data", f"{mine}:data", "--engines", "eager"]
    assert main([*words, "--batch", "1,2", "--seconds", "0.01"]) == 0
    assert "p99 ms" in capsys.readouterr().out
    assert main([*words, "--batch", "1", "--seconds", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["timings"][0]["engine"] == "eager"
