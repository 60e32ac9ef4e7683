"""forge.Embedding: points for TensorBoard's PROJECTOR page, read back through TensorBoard's own server."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.projector.projector_plugin import ProjectorPlugin
from werkzeug.test import Client

import forge
from forge.errors import TaskError
from forge_plugins import JSONL, Checkpoint, Progress, Tensorboard
from forge_plugins.board.pages import Projector
from forge_plugins.tensorboard import projector
from tests.support.tasks import Classifier, fit, make_batches


class Page:
    """The PROJECTOR page's server over the runs below a folder."""

    def __init__(self, folder: Path, kind: type[ProjectorPlugin] = ProjectorPlugin):
        self._runs = EventMultiplexer().AddRunsFromDirectory(str(folder))
        self._runs.Reload()
        provider = MultiplexerDataProvider(self._runs, str(folder))
        self._apps = kind(TBContext(data_provider=provider, logdir=str(folder))).get_plugin_apps()

    def ask(self, route: str, run: str = "tensorboard", **words: str) -> bytes:
        answer = Client(self._apps[route]).get("/", query_string={"run": run, **words})
        assert answer.status_code == 200, answer.get_data(as_text=True)
        return answer.data

    def names(self) -> list[str]:
        if "tensorboard" not in json.loads(self.ask("/runs")):
            return []
        return [entry["tensorName"] for entry in json.loads(self.ask("/info"))["embeddings"]]

    def vectors(self, name: str) -> torch.Tensor:
        (entry,) = (e for e in json.loads(self.ask("/info"))["embeddings"] if e["tensorName"] == name)
        flat = np.frombuffer(self.ask("/tensor", name=name), dtype=np.float32).copy()
        return torch.from_numpy(flat).view(entry["tensorShape"])

    def labels(self, name: str) -> list[str]:
        return self.ask("/metadata", name=name).decode().splitlines()

    def sheet(self, name: str) -> torch.Tensor:
        picture = Image.open(io.BytesIO(self.ask("/sprite_image", name=name)))
        return torch.from_numpy(np.asarray(picture).copy())


def points(seed: int = 0, count: int = 5, width: int = 4) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


class Embeds(Classifier):
    """Logs what the hidden layer makes of a fixed batch."""

    def evaluation_end(self, stage: str) -> dict[str, Any]:
        hidden = self.net[:-1](points(7, 6, 8))
        return {"hidden": forge.Embedding(hidden, [f"point {i}" for i in range(6)], torch.rand(6, 3, 2, 3))}


def test_points_of_an_evaluation_arrive_on_the_page(tmp_path: Path) -> None:
    task = Embeds()
    fit(task, val=make_batches(1), plugins=[Tensorboard()], run_dir=tmp_path)
    page = Page(tmp_path)
    assert page.names() == ["val/hidden"]
    torch.testing.assert_close(page.vectors("val/hidden"), task.net[:-1](points(7, 6, 8)).detach(), atol=0, rtol=1e-5)
    assert page.labels("val/hidden") == [f"point {i}" for i in range(6)]


def test_other_sinks_pass_over_it_and_the_text_page_links_it(tmp_path: Path) -> None:
    fit(Embeds(), val=make_batches(1), plugins=[Tensorboard(), JSONL(), Progress()], run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert any("val/loss" in line for line in lines)
    assert not any("val/hidden" in line for line in lines)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("val/hidden")
    assert b"6 points of 8 dimensions" in event.tensor_proto.string_val[0]


@pytest.mark.slow
def test_the_latest_of_each_name_is_kept_and_nothing_else(tmp_path: Path) -> None:
    for seed in range(4):
        projector.write(tmp_path, "val/a", forge.Embedding(points(seed), images=torch.rand(5, 1, 2, 2)))
        projector.write(tmp_path, "val/b", forge.Embedding(points(seed + 10, 3)))
    projector.write(tmp_path, "val/a", forge.Embedding(points(9, 2), ["x", "y"]))
    (tmp_path / "events.out.tfevents.1.x").touch()
    files = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "projector").rglob("*") if path.is_file())
    assert files == ["projector/val%2Fa/labels.tsv", "projector/val%2Fa/vectors.tsv", "projector/val%2Fb/vectors.tsv"]
    page = Page(tmp_path.parent)
    answer = json.loads(page.ask("/info", run=tmp_path.name))["embeddings"]
    assert [(entry["tensorName"], entry["tensorShape"]) for entry in answer] == [("val/b", [3, 4]), ("val/a", [2, 4])]
    assert "sprite" not in answer[1]


def test_pictures_are_laid_out_row_by_row_on_a_square(tmp_path: Path) -> None:
    images = torch.arange(5.0).view(5, 1, 1, 1).expand(5, 1, 3, 2) / 10
    fit(Publishes(forge.Embedding(points(), images=images)), plugins=[Tensorboard()], run_dir=tmp_path)
    page = Page(tmp_path)
    (entry,) = json.loads(page.ask("/info"))["embeddings"]
    assert entry["sprite"]["singleImageDim"] == [2, 3]
    sheet = page.sheet("drawn")
    assert sheet.shape == (9, 6)  # three columns for five pictures, as many rows
    tiles = sheet.view(3, 3, 3, 2).permute(0, 2, 1, 3).reshape(9, -1)
    assert [tile.unique().tolist() for tile in tiles] == [[0], [26], [51], [76], [102], [0], [0], [0], [0]]


def test_pictures_that_would_not_fit_on_a_sheet_are_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(projector, "WIDEST", 30)
    images = torch.full((9, 3, 16, 8), 255, dtype=torch.uint8)
    fit(Publishes(forge.Embedding(points(0, 9), images=images)), plugins=[Tensorboard()], run_dir=tmp_path)
    page = Page(tmp_path)
    (entry,) = json.loads(page.ask("/info"))["embeddings"]
    assert entry["sprite"]["singleImageDim"] == [8, 10]
    assert page.sheet("drawn").unique().tolist() == [255]


def test_odd_numbers_and_labels_do_not_break_the_page(tmp_path: Path) -> None:
    vectors = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    labels = ["two\nlines\tand a tab", "", "plain"]
    fit(Publishes(forge.Embedding(vectors, labels)), plugins=[Tensorboard()], run_dir=tmp_path)
    page = Page(tmp_path)
    assert page.labels("drawn") == ["two lines and a tab", "–", "plain"]
    assert torch.isfinite(page.vectors("drawn")).all()


def test_a_resumed_run_keeps_points_and_a_fresh_one_does_not(tmp_path: Path) -> None:
    saves = Checkpoint(every="2 updates", background=False)
    options: dict[str, Any] = {"run_dir": tmp_path, "max_epochs": None}
    fit(Publishes(forge.Embedding(points())), plugins=[Tensorboard(), saves], max_updates=2, **options)
    fit(plugins=[Tensorboard(), saves], max_updates=4, resume="auto", allow_inexact=True, **options)
    assert Page(tmp_path).names() == ["drawn"]
    shutil.rmtree(tmp_path / "checkpoints")
    fit(plugins=[Tensorboard()], max_updates=2, **options)
    assert Page(tmp_path).names() == []
    assert not (tmp_path / "tensorboard" / "projector").exists()


@pytest.mark.parametrize("damage", [b"embeddings { \xff }", b"embeddings { tensor_name: "])
def test_a_damaged_list_of_points_is_set_aside(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / projector.CONFIG).write_bytes(damage)
    projector.write(tmp_path, "points", forge.Embedding(points()))
    assert 'tensor_name: "points"' in (tmp_path / projector.CONFIG).read_text()
    assert (tmp_path / f"{projector.CONFIG}.damaged").read_bytes() == damage


def test_forge_board_shows_points_that_came_after_it_was_started(tmp_path: Path) -> None:
    log = tmp_path / "tensorboard"
    log.mkdir()
    (log / "events.out.tfevents.1.x").touch()
    once, live = Page(tmp_path), Page(tmp_path, Projector)
    assert once.names() == live.names() == []
    projector.write(log, "late", forge.Embedding(points(1)))
    assert once.names() == []  # TensorBoard's own, for which forge board has another
    torch.testing.assert_close(live.vectors("late"), points(1), atol=0, rtol=1e-5)
    projector.write(log, "late", forge.Embedding(points(2)))
    torch.testing.assert_close(live.vectors("late"), points(2), atol=0, rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"vectors": torch.zeros(3)}, r"shape \(3,\); it takes \(N, D\)"),
        ({"vectors": torch.zeros(0, 3)}, r"shape \(0, 3\)"),
        ({"vectors": torch.zeros(3, 2), "labels": ["a"]}, "3 vectors but 1 labels"),
        ({"vectors": torch.zeros(3, 2), "images": torch.zeros(3, 8, 8)}, r"it takes \(3, 3 or 1, H, W\)"),
        ({"vectors": torch.zeros(3, 2), "images": torch.zeros(2, 1, 8, 8)}, r"it takes \(3, 3 or 1, H, W\)"),
    ],
)
def test_what_is_no_set_of_points_is_refused_where_it_is_made(values: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        forge.Embedding(**values)


class Publishes(Classifier):
    """Hands something to the sinks in its first step."""

    def __init__(self, value: Any):
        super().__init__()
        self._value = value

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        if self.trainer.progress.update == 0:
            self.trainer.publish({"drawn": self._value})
        return super().training_step(batch)
