"""forge.Embedding: points for TensorBoard's PROJECTOR page, read back through TensorBoard's own server."""

from __future__ import annotations

import io
import json
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
from forge_plugins import JSONL, Progress, Tensorboard
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
