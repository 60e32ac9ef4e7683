"""RUN/spans.jsonl: every span of an update, all ranks in one trace, never too large; and what the verb tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.cli import main
from forge.spans import file
from forge.spans.record import Total
from forge_plugins import JSONL, Accumulate, Spans
from tests.support import spans_kit
from tests.support.spans_kit import Clock
from tests.support.tasks import Classifier, fit, make_batches

clock = spans_kit.clock


def test_a_run_is_a_trace_with_updates_and_what_ran_inside_them(tmp_path: Path) -> None:
    fit(plugins=[Spans(file=True), Accumulate(2)], train=make_batches(8), run_dir=tmp_path)
    events = [event for event in file.trace(tmp_path)["traceEvents"] if event["ph"] == "X"]
    (update,) = (event for event in events if event["name"] == "update 2")
    inside = [e for e in events if e["args"]["update"] == 2 and e["name"] in ("core.forward", "core.backward")]
    assert [(e["name"], e["args"]["micro-batch"]) for e in sorted(inside, key=lambda e: e["ts"])] == [
        ("core.forward", 0),
        ("core.backward", 0),
        ("core.forward", 1),
        ("core.backward", 1),
    ]
    assert all(update["ts"] <= e["ts"] and e["ts"] + e["dur"] <= update["ts"] + update["dur"] for e in inside)


def recorded(updates: int, spans: int = 50) -> list[Any]:
    total = Total("forge_forward", "core", "work", False)
    found: list[Any] = []
    for update in range(updates):
        found += [(total, 1000 * update + i, 1000 * update + i + 5) for i in range(spans)]
        found.append((None, update, 1000 * update + 900))
    return found


def test_several_ranks_are_in_one_picture(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        written = file.SpanFile(tmp_path, rank)
        written.take(recorded(2))
        written.close()
    events = file.trace(tmp_path)["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1", "rank 10"]
    assert len({e["pid"] for e in events}) == 3


def test_a_file_is_sampled_before_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "MOST", 400_000)
    written = file.SpanFile(tmp_path, 0)
    written.take(recorded(2000))
    written.close()
    assert (tmp_path / "spans.jsonl").stat().st_size <= 400_000
    events = file.trace(tmp_path)["traceEvents"]
    assert "from here on every 4th update" in [event["name"] for event in events]
    assert max(e["args"]["update"] for e in events if e["ph"] == "X") > 1000  # the end of the run is in it too


@pytest.mark.parametrize("text", ["", "[", '{"a": 1}\n[1, 2]\n["x", 0, "a", "b", 1.0, 2.0]', "[" * 10_000])
def test_a_torn_or_strange_file_has_no_events(text: str, tmp_path: Path) -> None:
    (tmp_path / "spans.jsonl").write_text(text)
    assert file.trace(tmp_path)["traceEvents"] == []


# -- what is told -----------------------------------------------------------------------------------------------------


class Timed(Classifier):
    """An update takes so many seconds, and a validation's batch too."""

    def __init__(self, clock: Clock, trains: float, validates: float = 0.0):
        super().__init__()
        self.clock, self.trains, self.validates = clock, trains, validates

    def training_step(self, batch: Any) -> Any:
        self.clock.now += self.trains
        return super().training_step(batch)

    def validation_step(self, batch: Any) -> Any:
        self.clock.now += self.validates
        return super().training_step(batch)


class Loads(list[Any]):
    def __init__(self, clock: Clock, seconds: float):
        super().__init__(make_batches(8))
        self.clock, self.seconds = clock, seconds

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.clock.now += self.seconds
            yield batch


@pytest.mark.parametrize(
    ("loads", "validates", "kind"),
    [(3.0, 0.0, "data-bound: 75%"), (0.0, 4.0, "slow validation"), (0.0, 0.0, "compute-bound")],
)
def test_the_verb_tells_where_the_time_went_and_what_limits_the_run(
    loads: float, validates: float, kind: str, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(
        Timed(clock, 1.0, validates),
        Loads(clock, loads),
        make_batches(1),
        plugins=[Spans(hooks=True, rates=True), JSONL()],
        validate_every="1 updates",
        run_dir=tmp_path,
        allow_inexact=True,
    )
    assert main(["runs", "spans", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "updates that count" in out
    assert "per step at the median" in out
    assert kind in out
    assert "jsonl" in out
    assert json.loads((tmp_path / "spans.json").read_text())["verdict"].startswith(kind.partition(":")[0])


def test_what_is_not_there_is_said_with_what_records_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(plugins=[Spans()], run_dir=tmp_path)
    assert main(["runs", "spans", str(tmp_path), "--perfetto", str(tmp_path / "t.json")]) == 2
    assert "file=true" in capsys.readouterr().err


class Samples(torch.utils.data.Dataset[Any]):
    """Samples that take their time; so does joining them."""

    def __init__(self, clock: Clock, reads: float, joins: float):
        self.clock, self.reads, self.joins = clock, reads, joins
        self.batches = make_batches(8, size=4)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        self.clock.now += self.reads
        return tuple(part[index % 4] for part in self.batches[index // 4])

    def join(self, samples: list[Any]) -> Any:
        self.clock.now += self.joins
        return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize(
    ("reads", "joins", "words"), [(1.0, 0.5, "the samples of the dataset"), (0.1, 4.0, "collate_fn")]
)
def test_a_slow_collate_is_told_from_a_slow_dataset(
    reads: float, joins: float, words: str, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge.data.sample_seeding.clock", clock)
    data = Samples(clock, reads, joins)
    loader = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=data.join)
    fit(Timed(clock, 1.0), loader, plugins=[Spans(hooks=True)], run_dir=tmp_path)
    assert f"waiting for data, most of it for {words}" in json.loads((tmp_path / "spans.json").read_text())["verdict"]
