"""The benchmarks run and say what they promise. How fast anything is, is never asserted here."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.overhead
from benchmarks import figures, fp8, gpu, scale, serving, startup, strangers_models
from benchmarks.command_line import some_of
from tests.conftest import PROFILE
from tests.support import forked

KEYS = {
    "case",
    "contender",
    "us_per_update",
    "us_over_bare",
    "us_spread",
    "ratio",
    "us_over_bare_quiet",
    "ratio_quiet",
    "weights_identical",
    "updates",
    "rounds",
    "note",
}


CASES = ("mlp",) if PROFILE == "quick" else ("mlp", "transformer", "stack")


@pytest.fixture(scope="module")
def overhead() -> list[dict[str, Any]]:
    words = ["--json", "--peers", "none", "--updates", "5", "--rounds", "1", "--case", ",".join(CASES)]
    done = forked.call(partial(benchmarks.overhead.main, words))  # which switches oneDNN off
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_overhead_begins_with_the_machine(overhead: list[dict[str, Any]]) -> None:
    assert {"cpu", "cores", "torch"} <= overhead[0]["machine"].keys()


@pytest.mark.slow
def test_overhead_gives_a_row_for_every_case_and_contender(overhead: list[dict[str, Any]]) -> None:
    rows = overhead[1:]
    assert all(row.keys() == KEYS for row in rows)
    contenders = ("bare", "bare again", "forge", "forge guard", "forge default")
    expected = {(case, contender) for case in CASES for contender in contenders}
    assert {(row["case"], row["contender"]) for row in rows} == expected


@pytest.mark.slow
def test_every_contender_trains_the_same_weights_bit_for_bit(overhead: list[dict[str, Any]]) -> None:
    assert [row["contender"] for row in overhead[1:] if not row["weights_identical"]] == []


def test_startup_times_fresh_processes_against_the_first() -> None:
    first, second = startup.measure({"nothing": "pass", "json": "import json"}, rounds=2)
    assert (first.name, first.ratio, first.rounds) == ("nothing", 1.0, 2)
    assert second.ratio > 0


def test_startup_stops_at_a_program_that_fails() -> None:
    with pytest.raises(RuntimeError, match="ModuleNotFoundError"):
        startup.cpu_seconds("import no_such_module")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="'lightening' is not one of lightning, hf, all"):
        some_of(["lightning", "hf"], all=["lightning", "hf"])("lightening")


def test_gpu_measures_the_same_training_by_hand_and_with_forge(tmp_path: Path) -> None:
    case = gpu.CASES["mlp"]
    rows = [gpu.measure(case, row, tiny=True) for row in ("bare", "forge off")]
    assert all(row.ms_per_update > 0 for row in rows if row.ms_per_update is not None)
    # forge logs the mean of the last interval, the loop its last loss: both are of the same few updates
    assert rows[0].loss == pytest.approx(rows[1].loss, rel=0.2)


@pytest.mark.slow
def test_a_gan_by_hand_and_with_forge_ends_in_the_same_bits(tmp_path: Path) -> None:
    made: list[Any] = []

    def build(tiny: bool, **options: Any) -> Any:
        made.append(strangers_models.dcgan(tiny))
        torch.manual_seed(0)  # the Trainer seeds too: from here on both draw the same noise
        return made[-1]

    case = dataclasses.replace(strangers_models.MODELS["dcgan"], build=build, bf16=False)
    for train in (gpu.bare(None), gpu.ours(logs=False)):
        train(case, gpu.Batches(case, tiny=True), True, tmp_path)
    ours, theirs = made[1].state_dict(), made[0].state_dict()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_gpu_names_every_row_and_refuses_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.ROWS.keys() == gpu.CONTENDERS.keys()
    assert {row for rows in gpu.OF_CASE.values() for row in rows} == gpu.ROWS.keys()
    if not torch.cuda.is_available():
        assert gpu.main(["--cases", "mlp"]) == 2
        assert "No CUDA device is available" in capsys.readouterr().err


def test_fp8_holds_differences_against_the_noise_of_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    losses = {("bf16", 0): [4.0, 2.0], ("all", 0): [4.1, 2.01], ("bf16", 1): [4.0, 2.2], ("all", 1): [4.0, 2.15]}
    found = [fp8.Curve(row, seed, [1, 2], values) for (row, seed), values in losses.items()]
    assert "all, seed 0: +0.0100; all, seed 1: -0.0500. Between bf16's own seeds: 0.2000." in fp8.verdict(found)
    if not torch.cuda.is_available():
        assert fp8.main([]) == 2
        assert "No CUDA device is available" in capsys.readouterr().err


@pytest.mark.slow
def test_fp8_measures_every_row_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8.main(["--tiny", "--json"]) == 0
    _, *rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["bf16", "all"]
    assert all(row["ms_per_update"] > 0 and row["speed"] is not None for row in rows)


def test_gpus_mfu_counts_what_gpt2_computes() -> None:
    assert gpu.flops_per_token() == pytest.approx(6 * 123.57e6 + 12 * 12 * 768 * 1024, rel=1e-3)


@pytest.mark.slow
def test_serving_measures_both_arms_without_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--json", "--requests", "24", "--rounds", "1", "--clients", "4"]) == 0
    first, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert "cpu" in first["machine"]
    expected = [(where, arm) for where in ("batcher", "http, JSON", "http, raw") for arm in serving.ARMS]
    assert [(row["where"], row["arm"]) for row in rows] == expected
    assert all(row["requests"] == 24 and row["errors"] == 0 for row in rows)
    assert all(row["mean_batch"] == 1 and row["factor"] == 1 for row in rows if row["arm"] == "one by one")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "pipeline_shard"])
def test_scale_compares_equal_work_in_pipelines(strategy: str) -> None:
    by_hand, again, ours = scale.run(strategy, updates=1, rounds=1)
    assert [row.contender for row in (by_hand, again, ours)] == ["by hand", "by hand again", "forge"]
    for row in (by_hand, again, ours):
        assert row.identical
        assert row.megabytes == pytest.approx(row.expected_megabytes)
    assert ours.collectives == by_hand.collectives + 1  # the window's metrics, from the last stage


def test_every_row_of_figures_is_measured_or_says_where_it_is_from() -> None:
    rows = list(map(figures.cells, re.findall(r"^\| [a-z].*$", figures.PAGE.read_text(), re.MULTILINE)))[1:]
    measures = figures.measures_of(figures.PAGE.read_text())
    assert figures.MEASURES.keys() <= measures.keys()
    for row, _, printed, found, command, where in rows:
        assert all((printed, found, command, where)), row
        if row in measures:
            assert f"--only {row}`" in command or command.startswith("`forge fit ")
            assert "torch" in where
        else:
            assert "](" in found, f"{row} has neither a measure nor a page that it is from"


def test_figures_writes_the_row_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "figures.md"
    page.write_text("| adamw | 7B | 112 GB | old | `x` | then |\n| a100 | kept | | | | |\n")
    monkeypatch.setattr(figures, "PAGE", page)
    assert figures.main(["--only", "adamw"]) == 0
    first, second = page.read_text().splitlines()
    assert figures.cells(first)[:5] == ["adamw", "7B", "112 GB", "16.0 bytes per parameter: 112 GB", "`x`"]
    assert second == "| a100 | kept | | | | |"


@pytest.mark.slow
def test_figures_says_why_a_command_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "figures.md"
    page.write_text("| lab | a | b | c | `forge fit quickstart trainer.seeed=1` | e |\n")
    monkeypatch.setattr(figures, "PAGE", page)
    figures.main(["--only", "lab"])
    assert figures.cells(page.read_text())[3].startswith("not measured here: ")
    assert "seeed" in page.read_text().partition("not measured here")[2]


@pytest.mark.slow
def test_figures_reads_the_epochs_that_a_command_logged() -> None:
    first, last = figures.epochs("forge fit quickstart trainer.max_epochs=2").split("; ")
    assert re.fullmatch(r"1: (0\.\d{4}|\d\.\d{4}) 0\.\d{4}, \d\.\d{4} 0\.\d{4}", first)
    assert last.startswith("2: ")


def test_a_pass_twice_as_long_is_twice_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(figures.time, "process_time", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    passes = {"once": partial(wait, 1), "twice": partial(wait, 2)}
    assert figures.in_turns(passes, 3) == {"once": "1.00", "twice": "2.00"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read where Linux tells it")
def test_no_grad_needs_less_memory() -> None:
    graph, without = map(float, re.findall(r"memory ([\d.]+) → ([\d.]+) MiB", figures.no_grad("mlp", 1))[0])
    assert without <= graph - 3  # two activations of 4 MiB are kept, and one is live in any case
