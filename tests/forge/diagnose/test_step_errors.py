"""Errors that stop a fit: the type stays, the traceback is short, and notes name module, tensors, line and cure."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType
from typing import Any

import pytest
import torch

import forge
from forge.util import tracebacks
from forge_plugins import Anomaly

HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F

import forge
from forge.data import Splits


def batches():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 4, 8, generator=generator), torch.randint(0, 3, (3, 4), generator=generator)
    return [*zip(x, y, strict=True)]


def data():
    return Splits(train=batches())


class Task(forge.TaskModule):
    check_first_batch = {checked}

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
{layers}

    def training_step(self, batch):
        x, y = batch
{step}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
NUMBERS = itertools.count()
MOST = 15
"""Lines of a traceback, with its notes."""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a task file; the line to blame ends in `# here`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(tracebacks.FULL, raising=False)

    def write(step: str, layers: str = "", more: str = "", checked: bool = True) -> Path:
        step, layers = (indent(dedent(text).strip("\n"), " " * 8) for text in (step, layers))
        path = tmp_path / f"users_task_{next(NUMBERS)}.py"
        path.write_text(HEAD.format(step=step, layers=layers, checked=checked) + dedent(more))
        return path

    return write


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # workers find classes by it
    spec.loader.exec_module(module)
    return module


def place(path: Path) -> str:
    """The line to blame, as file:line."""
    lines = path.read_text().splitlines()
    return f"{path.name}:{next(i for i, line in enumerate(lines, 1) if line.endswith('# here'))}"


def raised(path: Path, train: str = "batches", **options: Any) -> BaseException:
    own = imported(path)
    options = {"max_epochs": 1, "plugins": [], "run_dir": False, "device": "cpu", **options}
    with pytest.raises(Exception) as caught:  # noqa: PT011
        forge.Trainer(**options).fit(own.Task(), getattr(own, train)())
    return caught.value


def shown(error: BaseException) -> str:
    """What a person sees, without the frames of this file."""
    text = "".join(traceback.format_exception(error))
    return re.sub(rf'  File "{re.escape(__file__)}".*\n(?:    .*\n)*', "", text)


def check(path: Path, kind: type[BaseException], *said: str, **options: Any) -> str:
    """Fit, and check what every error has: its type, the line, a short traceback without inner frames."""
    error = raised(path, **options)
    text = shown(error)
    assert type(error) is kind
    assert len(text.splitlines()) <= MOST, text
    name, line = place(path).split(":")
    assert f"{name}:{line}" in text or f'{name}", line {line}' in text
    assert "site-packages/torch" not in text or "loss.backward()" in text
    assert "pluggy" not in text
    for part in said:
        assert part in text, text
    return text


# ---------------------------------------------------------------------------------------------------------------------
# Shapes, values, types, devices


CONV = "self.conv = nn.Conv2d(3, 4, 3)"
MASKED = """
mask = torch.ones(4, 9)
return self.body(x * mask).mean()  # here
"""
ELSEWHERE = """
scale = torch.ones(8, device="meta")
return self.body(x * scale).mean()  # here
"""


def over(shape: str) -> str:
    return f"return self.conv(torch.ones({shape})).mean()  # here"


@pytest.mark.parametrize(
    ("step", "layers", "kind", "said"),
    [
        (
            over("4, 1, 6, 6"),
            CONV,
            RuntimeError,
            ["in conv (Conv2d(3, 4,", "input is float32 (4, 1, 6, 6) on cpu", "has 1. Set in_channels=1"],
        ),
        (over("4, 6, 6, 3"), CONV, RuntimeError, ["last dimension of the input: write x.movedim(-1, 1) before conv."]),
        (over("4, 64"), CONV, RuntimeError, ["conv takes an input (N, C, H, W), but got (4, 64)."]),
        (
            "return self.norm(x[:1]).mean()  # here",
            "self.norm = nn.BatchNorm1d(8)",
            ValueError,
            ["in norm (BatchNorm1d(8,", "input is float32 (1, 8)", "BatchNorm needs two samples or more"],
        ),
        (
            MASKED,
            "",
            RuntimeError,
            ["x is float32 (4, 8) on cpu, mask is float32 (4, 9) on cpu", "meet in dimension 1"],
        ),
        (
            "return F.binary_cross_entropy_with_logits(self.body(x)[:, :1], y.float())  # here",
            "",
            ValueError,
            ["input is float32 (4, 1)", "target is float32 (4,)", "output.squeeze(-1)"],
        ),
        (
            "return F.cross_entropy(self.body(x), y + 3)  # here",
            "",
            IndexError,
            ["target is int64 (4,)", "but the model has 3 outputs (labels 0 to 2)"],
        ),
        (
            "return self.body(x.double()).mean()  # here",
            "",
            RuntimeError,
            [
                "in body.0 (Linear",
                "input is float64 (4, 8) on cpu, weight is float32 (16, 8) on cpu",
                "input is float64, which is what numpy makes. Write .float() in the dataset",
            ],
        ),
        (
            ELSEWHERE,
            "",
            RuntimeError,
            ["scale is float32 (8,) on meta", "scale is on meta, but this run is on cpu", "x.device"],
        ),
    ],
)
def test_an_error_says_where_with_what_and_the_cure(
    write: Write, step: str, layers: str, kind: type[Exception], said: list[str]
) -> None:
    check(write(step, layers, checked=False), kind, *said)


def test_a_linear_of_another_width_is_named(write: Write) -> None:
    path = write("return F.cross_entropy(self.body(x), y)  # here", "self.body[2] = nn.Linear(12, 3)")
    text = check(
        path,
        RuntimeError,
        "in body.2 (Linear(in_features=12, out_features=3, bias=True)): input is float32 (4, 16) on cpu",
        "body.2 takes 12 features, but its input has 16. Set in_features=16",
        "raised in Task.training_step, at update 0",
    )
    assert text.count('File "') == 1


def test_ids_that_an_embedding_has_no_row_for(write: Write) -> None:
    path = write("return self.words(y + 20).mean()  # here", "self.words = nn.Embedding(10, 8)")
    text = check(path, IndexError, "in words (Embedding(10, 8))", "words has 10 rows (ids 0 to 9), but the ids of")
    assert re.search(r"are 2\d to 22\. Set num_embeddings=23", text)


def test_out_of_memory_names_what_this_run_has_not(write: Write) -> None:
    step = 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")  # here'
    text = check(
        write(step),
        torch.OutOfMemoryError,
        "The memory of cpu is full with 4 samples in a micro-batch.",
        "`forge tune batch`",
        "accumulate.window=2",
        "-p amp",
        "-p remat",
    )
    assert "accumulate.window=4" not in text
    more = check(
        write(step), torch.OutOfMemoryError, "accumulate.window=4", plugins={"accumulate": {"window": 2}, "remat": {}}
    )
    assert "-p remat" not in more


# ---------------------------------------------------------------------------------------------------------------------
# Backward


def test_a_backward_inside_of_the_step_is_named(write: Write) -> None:
    path = write(
        """
        loss = F.cross_entropy(self.body(x), y)
        loss.backward()  # here
        return loss
        """
    )
    said = f"forge: {place(path)} calls backward() inside of the step. Leave it out and return the loss"
    check(path, RuntimeError, said, "raised in the backward pass of Task.training_step, at update 0")


def test_a_state_that_is_kept_with_its_graph(write: Write) -> None:
    path = write(
        """
        self.state = torch.tanh(self.body(x)) + getattr(self, "state", 0)
        return self.state.pow(2).mean()
        """
    )
    error = raised(path)
    assert "Detach what is kept from one step to the next" in shown(error)
    assert len(shown(error).splitlines()) <= MOST


@pytest.mark.parametrize("anomaly", [False, True], ids=["plain", "anomaly"])
def test_an_in_place_operation_names_the_forward_line(write: Write, anomaly: bool) -> None:
    path = write(
        """
        hidden = torch.sigmoid(self.body[0](x))  # here
        hidden += 1
        return F.cross_entropy(self.body[2](hidden), y)
        """
    )
    said = f"The value that was overwritten belongs to the operation at {place(path)}."
    check(path, RuntimeError, said, "x = x.clone()", plugins=[Anomaly()] if anomaly else [])


# ---------------------------------------------------------------------------------------------------------------------
# Data


ROWS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise KeyError("no such file")  # here
        return torch.zeros(8 + i * {grows}), 0


def loader():
    return torch.utils.data.DataLoader(Rows(), 4, num_workers={workers})
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_raises_shows_the_users_frame(write: Write, workers: int) -> None:
    path = write("return self.body(x).mean()", more=ROWS.format(grows=0, workers=workers))
    error = raised(path, "loader")
    name, line = place(path).split(":")
    text = shown(error)
    assert isinstance(error, forge.DataError)
    assert "Rows raised KeyError: 'no such file' at sample 5" in text
    if workers:
        assert f'{name}", line {line}, in __getitem__' in text
    else:
        assert f"It was raised at {name}:{line}." in text
    assert text.count("sample_seeding.py") == 1  # where the DataError is raised
    assert "fetch.py" not in text
    assert len(text.splitlines()) <= MOST


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_unequal_size_are_named(write: Write, workers: int) -> None:
    error = raised(write("return self.body(x).mean()", more=ROWS.format(grows=1, workers=workers)), "loader")
    assert isinstance(error, forge.DataError)
    assert "The samples differ: sample[0] is (8,) and (9,) and (10,)." in str(error)
    assert "collate_fn=forge.data.pad_collate" in str(error)


def test_the_wall_of_a_torch_worker_is_shortened(write: Write) -> None:
    path = write("return self.body(x).mean()", more=ROWS.format(grows=0, workers=1))
    with pytest.raises(KeyError) as caught:
        list(imported(path).loader())
    tracebacks.shorten(caught.value)
    name, line = place(path).split(":")
    assert f'{name}", line {line}, in __getitem__' in str(caught.value)
    assert "_worker_loop" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Tracebacks


def test_the_run_folder_keeps_all_frames(write: Write, tmp_path: Path) -> None:
    error = raised(write("return self.body(x.double()).mean()  # here"), run_dir=tmp_path / "run")
    kept = (tmp_path / "run" / "traceback.txt").read_text()
    assert "linear.py" in kept
    assert "linear.py" not in shown(error)


def test_an_error_of_the_users_own_gets_no_cure(write: Write) -> None:
    error = raised(write('raise ValueError(f"bad {x.shape}")  # here'))
    (where,) = error.__notes__
    assert where.startswith("forge: raised in Task.training_step")


def test_a_task_without_forward_is_told_what_predict_needs() -> None:
    class Mute(forge.TaskModule): ...

    with pytest.raises(NotImplementedError) as error:
        forge.Trainer(plugins=[], run_dir=False).predict(Mute(), [torch.zeros(2, 3)])
    cure = "define forward(self, x), or predict_step(self, batch), which calls it by default, in Mute."
    assert any(cure in note for note in error.value.__notes__)
