"""What the README and the documentation say is true: their code runs, their tables match, their links lead on."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import forge
from forge import cli, hooks
from forge.stack import ACTIONS, SPECS
from forge.testing import fit_tiny, tiny_batches
from forge_plugins import Accumulate, Checkpoint, Clip, Guard
from tests.conftest import REPO

PAGES = [
    "README.md",
    "docs/data.md",
    "docs/distributed.md",
    "docs/gpu-speed.md",
    "docs/index.md",
    "docs/levers.md",
    "docs/recipes-and-cli.md",
    "docs/surviving.md",
    "docs/writing-kernels.md",
    "docs/writing-plugins.md",
]


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its text and the line it begins on."""

    language: str
    text: str
    line: int


def blocks(page: str, language: str) -> list[Block]:
    text = (REPO / page).read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    all_of_them = [Block(m[1], m[2], text.count("\n", 0, m.start()) + 2) for m in found]
    return [block for block in all_of_them if block.language == language]


# ---------------------------------------------------------------------------------------------------------------------
# Code


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_on_a_page_runs_from_top_to_bottom(
    page: str, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = page_as_module(page, empty_folder)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    for name, value in list(vars(module).items()):
        if name.startswith("test_"):
            value()


def page_as_module(page: str, folder: Path) -> ModuleType:
    """The Python of a page as one module, each line where it stands on the page, so that tracebacks point there."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    path = folder / f"{Path(page).stem.replace('-', '_').lower()}.py"
    path.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")])
def test_the_commands_on_a_page_work(page: str, empty_folder: Path) -> None:
    write_recipes(page, empty_folder)
    for words in commands(page):
        assert cli.main(cheap(words)) == 0, shlex.join(words)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")])
def test_the_recipes_on_a_page_load(page: str, empty_folder: Path) -> None:
    for path in write_recipes(page, empty_folder):
        recipe = forge.load_recipe(path)
        assert recipe.make_task() is not None


def write_recipes(page: str, folder: Path) -> list[Path]:
    """Every YAML block, under the name that its first line gives."""
    paths = []
    for block in blocks(page, "yaml"):
        name = re.match(r"# (\S+\.yaml)\n", block.text)
        assert name, f"{page}:{block.line}: say in the first line what the file is called"
        path = folder / name[1]
        path.write_text(block.text)
        paths.append(path)
    return paths


def commands(page: str) -> Iterator[list[str]]:
    """Every `forge ...` of a page, as words."""
    for block in blocks(page, "bash"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] == "forge":
                yield words[1:]


def cheap(words: list[str]) -> list[str]:
    return [*words, "trainer.max_updates=3"] if words[0] == "fit" else words


# ---------------------------------------------------------------------------------------------------------------------
# Tables and links


def hooks_table() -> str:
    """Every hook, its arguments, its kind and the first sentence of what it is for."""
    rows = ["| hook | kind | what |", "|---|---|---|"]
    for hook, arguments in SPECS.items():
        paragraph = (inspect.getdoc(getattr(hooks, hook)) or "").partition("\n\n")[0]
        kind, _, text = " ".join(paragraph.split()).partition(" ")
        sentences = re.split(r"(?<=\.)\s+(?=[A-Z`])", text)
        # "Action, only in fit. Return ...": a condition comes before what it does
        shown = " ".join(sentences[: 1 if kind.endswith(".") else 2])
        assert kind.rstrip(".,") == ("Action" if hook in ACTIONS else "Event")
        rows.append(
            f"| `{hook}({', '.join(arguments)})` | {kind.rstrip('.,').lower()} | {shown[0].upper()}{shown[1:]} |"
        )
    return "\n".join(rows)


def test_the_table_of_hooks_is_the_contract() -> None:
    page = (REPO / "docs" / "writing-plugins.md").read_text()
    shown = page.partition("tests/test_docs.py -->\n")[2].partition("\n<!-- end of hooks -->")[0]
    assert shown == hooks_table(), f"put this into docs/writing-plugins.md:\n\n{hooks_table()}"


@pytest.mark.parametrize("page", [*PAGES, "plugins/example-lookahead/README.md", "CHANGELOG.md"])
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (REPO / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (REPO / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_that_is_named_exists(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", (REPO / page).read_text(), flags=re.MULTILINE)) <= targets


# ---------------------------------------------------------------------------------------------------------------------
# The README's table of what forge refuses: each mistake is made, and the message compared


class Classifier(forge.TaskModule):
    """Does everything right; each mistake below changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: Any) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def classifier(**changed: Any) -> forge.TaskModule:
    """A Classifier with some methods replaced."""
    return type("Classifier", (Classifier,), changed)()


def fit(task: forge.TaskModule | None = None, train: Any = None, *plugins: forge.Plugin) -> None:
    fit_tiny(plugins, task=task or Classifier(), train=tiny_batches([4] * 3) if train is None else train)


def fit_step(step: Callable[[Any, Any], Any]) -> None:
    fit(classifier(training_step=step))


def plugin(name: str, **members: Any) -> forge.Plugin:
    return type(name, (forge.Plugin,), members)()


def forget_super() -> None:
    classifier(__init__=lambda self: setattr(self, "net", nn.Linear(6, 3)))


def hide_layers() -> None:
    task = Classifier()
    task.layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    fit(task)


def train_nothing() -> None:
    task = Classifier()
    task.requires_grad_(False)
    fit(task)


def train_another_model() -> None:
    fit(classifier(configure_optimizers=lambda self: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)))


def raise_stop_iteration() -> None:
    def training_step(self: Any, batch: Any) -> Any:
        return next(iter(()))

    fit_step(training_step)


class ShortLoader:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_batches([4, 4]))


class Stream:
    def __iter__(self) -> Iterator[Any]:
        return iter(tiny_batches([4, 4]))


def save(seed: int, train: Any = None, **options: Any) -> None:
    """A saved fit in the folder "run"."""
    train = tiny_batches([4] * 3) if train is None else train
    fit_tiny([Checkpoint()], task=Classifier(), train=train, seed=seed, run_dir="run", **options)


def become_nan() -> None:
    step = classifier(training_step=lambda s, b: F.cross_entropy(s.net(b[0]), b[1]) * float("nan"))
    fit(step, None, Guard())


def both_behind_each_other() -> None:
    fit(None, None, plugin("First", after=("second",)), plugin("Second", after=("first",)))


def own_the_window_twice() -> None:
    bigger = plugin("Bigger", forge_plan_step=forge.hookimpl(lambda self: 8))
    fit(None, None, Accumulate(2), bigger)


@forge.hookimpl
def on_step(self: Any, step: forge.Step) -> None: ...


MISTAKES: dict[str, Callable[[], Any]] = {
    "a misspelt hook": lambda: fit(None, None, plugin("Watcher", forge_step_ended=on_step)),
    "a hook without its mark": lambda: fit(None, None, plugin("Watcher", forge_step_end=lambda self: None)),
    "an unknown option": lambda: Clip(max_nrom=1.0),
    "an option of the wrong type": lambda: Accumulate(window="4"),  # pyright: ignore[reportArgumentType]
    "an unknown recipe": lambda: forge.load_recipe("quikstart"),
    "two owners of one action": own_the_window_twice,
    "a missing requirement": lambda: fit(None, None, plugin("Needy", requires=("grad_scaler",))),
    "plugins that wait for each other": both_behind_each_other,
    "a forgotten `super().__init__()`": forget_super,
    "layers in a plain list": hide_layers,
    "nothing to train": train_nothing,
    "an optimizer over another model": train_another_model,
    "a loss that is no scalar": lambda: fit_step(lambda self, batch: self.net(batch[0]).sum(1)),
    "a loss without gradient": lambda: fit_step(lambda self, batch: self.net(batch[0]).sum().detach()),
    "softmax before cross-entropy": lambda: fit_step(lambda s, b: F.cross_entropy(s.net(b[0]).softmax(1), b[1])),
    "labels out of range": lambda: fit_step(lambda s, b: F.cross_entropy(s.net(b[0]), torch.full((4,), 3))),
    "float labels": lambda: fit_step(lambda s, b: F.cross_entropy(s.net(b[0]), b[1].float())),
    "shapes that broadcast": lambda: fit_step(lambda s, b: F.mse_loss(s.net(b[0])[:, :1], b[1].float())),
    "a dataset instead of a loader": lambda: fit(None, torch.utils.data.TensorDataset(torch.zeros(4, 6))),
    "a loader shorter than its length": lambda: fit(None, ShortLoader()),
    "`StopIteration` out of a step": raise_stop_iteration,
    "another seed, batch, data or model on resume": lambda: [save(3), save(4, resume="auto")],
    "a loader that cannot be continued": lambda: save(3, Stream()),
    "training over another run": lambda: [save(3), save(3)],
    "a loss that becomes NaN": become_nan,
    "no end": lambda: forge.Trainer(plugins=[]).fit(Classifier(), tiny_batches()),
}


def refusals() -> dict[str, str]:
    """The README's table: mistake -> message."""
    table = (
        (REPO / "README.md").read_text().partition("| mistake | what forge says |\n|---|---|\n")[2].partition("\n\n")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {mistake: message.strip("`") for mistake, message in rows}


def test_every_mistake_in_the_readme_is_made_here() -> None:
    assert list(refusals()) == list(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_forge_refuses_a_mistake_as_the_readme_says(mistake: str) -> None:
    with pytest.raises(forge.ForgeError) as refused:
        MISTAKES[mistake]()
    assert refusals()[mistake] in str(refused.value)
