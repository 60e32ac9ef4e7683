"""forge board: TensorBoard over runs, under the names that people know them by."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from forge import cli
from forge_plugins import Clip, Tensorboard
from forge_plugins.board import command as board
from forge_plugins.board.links import Links, base_of
from tests.support.patience import PATIENCE
from tests.support.tasks import Classifier, fit, make_batches


def make_run(folder: Path, *, log: str = "tensorboard") -> Path:
    """A run as far as the board looks at it."""
    (folder / log).mkdir(parents=True)
    (folder / log / "events.out.tfevents.1.x").touch()
    return folder


def names(folder: Path, *given: Path) -> set[str]:
    folder.mkdir(exist_ok=True)
    return Links(folder, given, base_of(given)).renew()


# ---------------------------------------------------------------------------------------------------------------------
# Groups


def make_group(home: Path, status: str = "finished") -> Path:
    for seed, value in enumerate((1.0, 2.0)):
        run = make_run(home / f"seed-{seed}")
        lines = [{"update": at, "val/loss": value * at} for at in (5, 10)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (run / "end.json").write_text(json.dumps({"status": status}))
    (home / "group.json").write_text(json.dumps({"runs": {"seed-0": {}, "seed-1": {}}}))
    return home


def test_a_group_that_is_finished_is_one_run_more(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_group(tmp_path / "runs/mine/base")
    make_group(tmp_path / "runs/mine/cut", "interrupted")
    links = Links(tmp_path, [tmp_path / "runs"], tmp_path / "runs")
    assert links.renew() == links.renew() == {f"mine/{group}/seed-{i}" for group in ("base", "cut") for i in (0, 1)}
    (file,) = (tmp_path / "mine" / "base mean of 2").iterdir()
    found = EventAccumulator(str(file))
    found.Reload()
    values = {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    assert values["val/loss"] == [(5, 7.5), (10, 15.0)]
    assert values["val/loss (deviation)"] == [
        (5, pytest.approx(3.5355, rel=1e-4)),
        (10, pytest.approx(7.0711, rel=1e-4)),
    ]
    assert not list(tmp_path.glob("mine/cut mean*"))


# ---------------------------------------------------------------------------------------------------------------------
# Names


def test_runs_below_a_folder_are_named_by_their_path_in_it(tmp_path: Path) -> None:
    for name in ("quickstart/a", "quickstart/b", "other/c"):
        make_run(tmp_path / "runs" / name)
    assert names(tmp_path / "links", tmp_path / "runs") == {"quickstart/a", "quickstart/b", "other/c"}
    link = tmp_path / "links" / "quickstart" / "a"
    assert link.resolve() == tmp_path / "runs" / "quickstart" / "a" / "tensorboard"


def test_event_files_of_other_programs_are_shown_too(tmp_path: Path) -> None:
    make_run(tmp_path / "logs/theirs", log=".")
    assert names(tmp_path / "links", tmp_path / "logs") == {"theirs"}


def test_nothing_is_ever_written_into_a_run(tmp_path: Path) -> None:
    outer = make_run(tmp_path / "runs/outer")
    inner = make_run(outer / "inner")
    assert names(tmp_path / "links", tmp_path / "runs", inner) == {"runs/outer"}
    assert not list((outer / "tensorboard").glob("inner"))


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["board", *words]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_without_any_run_it_says_what_to_do(capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    assert "No folder 'runs' here. Train first (forge fit quickstart)" in error(capsys)
    (empty_folder / "runs").mkdir()
    assert "No run in runs was written for TensorBoard" in error(capsys)
    assert "forge fit quickstart -p tensorboard" in error(capsys)
    assert "There is no run 'elsewhere'" in error(capsys, "elsewhere")


def test_without_tensorboard_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(empty_folder / "runs/x")
    monkeypatch.setitem(sys.modules, "tensorboard.program", None)
    assert "pip install tensorboard" in error(capsys)


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(capsys: pytest.CaptureFixture[str], empty_folder: Path) -> None:
    make_run(empty_folder / "runs/x")
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"Leave out --port {port} to use a free one" in error(capsys, "--port", str(port))


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_ends_it_cleanly(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    make_run(empty_folder / "runs/x")
    folders: list[Path] = []

    def serve(folder: str, *_: Any) -> str:
        folders.append(Path(folder))
        signal.raise_signal(kind)
        raise AssertionError("it went on")

    monkeypatch.setattr(board, "serve", serve)
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert cli.main(["board", "--no-open"]) == 0
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert not folders[0].exists()


# ---------------------------------------------------------------------------------------------------------------------
# A board that runs

CODE = """
import sys
from forge.cli import main
code = main(["board", "--no-open", *sys.argv[1:]])
print("torch" in sys.modules, code)
"""


class Board:
    """A board in a process of its own."""

    def __init__(self, folder: Path):
        words = [sys.executable, "-c", CODE]
        self.process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline()
        self.address = urlsplit(re.findall(r"http://\S+", self.said)[0])

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection(self.address.hostname or "", self.address.port or 0, timeout=PATIENCE)
        method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return json.loads(connection.getresponse().read())

    def wait_for_runs(self, expected: set[str]) -> None:
        deadline = time.monotonic() + PATIENCE  # TensorBoard tells nobody that it has loaded something
        while set(self.ask("/data/runs")) != expected:
            assert time.monotonic() < deadline, self.ask("/data/runs")
            time.sleep(0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs in runs/."""
    folder = tmp_path_factory.mktemp("board")
    for name, hidden, plugins in (("a", 4, []), ("b", 8, [Clip()])):
        fit(
            Classifier(hidden=hidden),
            val=make_batches(1),
            plugins=[*plugins, Tensorboard()],
            run_dir=folder / "runs" / "small" / name,
            log_every=1,
            device="cpu",
        )
    return folder


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[Board]:
    found = Board(runs)
    yield found
    found.process.kill()
    found.process.communicate()


@pytest.mark.slow
def test_the_address_is_printed_and_the_runs_have_their_names(served: Board) -> None:
    assert served.said.startswith("TensorBoard shows 2 runs at http://localhost:")
    served.wait_for_runs({"small/a", "small/b"})


def test_hyperparameters_begin_with_what_runs_differ_in(served: Board) -> None:
    served.wait_for_runs({"small/a", "small/b"})
    columns = served.ask("/data/plugin/hparams/experiment", {"experimentName": ""})
    metrics = [info["name"]["tag"] for info in columns["metricInfos"]]
    assert metrics[:4] == ["val/loss", "val/accuracy", "train/loss", "train/accuracy"]
    assert "grad_norm/before" in metrics
    assert columns["hparamInfos"][0]["name"] == "task.hidden"  # in which the two differ


@pytest.mark.slow
def test_ctrl_c_ends_it_cleanly_and_torch_was_never_needed(served: Board) -> None:
    links = Path(served.ask("/data/environment")["data_location"])
    assert links.is_dir()
    served.process.send_signal(signal.SIGINT)
    said, complaints = served.process.communicate(timeout=PATIENCE)
    assert said == "False 0\n"
    assert complaints == "Ctrl-C ends it.\n"
    assert not links.exists()
