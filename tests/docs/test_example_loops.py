"""Examples of the gallery train what a plain loop trains, bit for bit, and a killed run ends in the same bits."""

from __future__ import annotations

import importlib.util
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import forge
from forge import cli
from forge.data import epoch_order
from forge.runs.folder import RunFolder
from forge.testing import assert_same_weights
from forge_plugins import Checkpoint
from forge_recipes.digits import DigitsMLP, digits
from tests.support import forked
from tests.support.docs_pages import blocks
from tests.support.profiles import some

UPDATES, SEED = 30, 3
PAGES = {
    "retrieval": ("two-tower-retrieval", 0),
    "mixup": ("mixup", 1),
    "restarts": ("warm-restarts", 0),
    "autoclip": ("own-plugin", 0),
}
"""The page of an example, and which of its blocks is the file."""


def module_of(name: str, folder: Path) -> ModuleType:
    """The file that the page of an example shows."""
    page, place = PAGES[name]
    file = folder / f"{name}.py"
    file.write_text(blocks(f"docs/examples/{page}.md", "python")[place].text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def parts_of(name: str, folder: Path) -> tuple[Any, Any, list[Any]]:
    """The task, its training data and the plugins of an example."""
    made: Any = module_of(name, folder)
    torch.manual_seed(6)
    if name == "retrieval":
        return made.Retrieval(), made.data().train, []
    if name == "mixup":
        return made.Stripes(), made.data(str(folder / "stripes")).train, []
    if name == "restarts":
        return made.Restarts(first=8), digits().train, []
    return DigitsMLP(), digits().train, [made.AutoClip(0.3)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that the page on mixup draws."""
    folder, here = tmp_path_factory.mktemp("pictures"), Path.cwd()
    os.chdir(folder)
    try:
        exec(blocks("docs/examples/mixup.md", "python")[0].text, {"__name__": "make_stripes"})
    finally:
        os.chdir(here)
    return folder


@pytest.fixture
def folder(pictures: Path, tmp_path: Path) -> Path:
    (tmp_path / "stripes").symlink_to(pictures / "stripes")
    return tmp_path


def fitted(name: str, folder: str, run: str | None = None, kill: int | None = None) -> int:
    """Fit an example in this process, from where its run is; `kill` ends the process without a word."""
    task, train, plugins = parts_of(name, Path(folder))

    @forge.on("step_end")
    def killer(step: forge.Step) -> None:
        if step.index + 1 == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    plugins += [Checkpoint(every="1 update"), killer] if run else []
    options: dict[str, Any] = {"run_dir": run, "resume": "auto"} if run else {"run_dir": False}
    trainer = forge.Trainer(plugins=plugins, max_updates=UPDATES, seed=SEED, device="cpu", log_every=10, **options)
    trainer.fit(task, train)
    if run:
        torch.save(task.state_dict(), Path(run) / "ended.pt")
    fitted.task = task  # pyright: ignore[reportFunctionMemberAccess]
    return 0


# -- the loops by hand ------------------------------------------------------------------------------------------------


def batches(loader: Any) -> Iterator[Any]:
    """The batches of the fit, in its order."""
    loader.set_default_seed(SEED)
    left = UPDATES
    for epoch in range(UPDATES):
        loader.set_epoch(epoch)
        for batch in loader:
            if left == 0:
                return
            yield batch
            left -= 1


def retrieve(task: Any, given: list[Any]) -> None:
    optimizer = torch.optim.AdamW([*task.query.parameters(), *task.document.parameters()], lr=1e-2)
    for words, wanted in given:
        assert len(set(wanted.tolist())) == len(wanted)
        scores = task.query(words) @ task.document(task.catalogue[wanted]).T / 0.1
        own = torch.arange(len(words))
        ((F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def blend(task: Any, given: list[Any]) -> None:
    optimizer = torch.optim.AdamW(task.net.parameters(), lr=3e-3)
    assert any(bool(((shares > 0) & (shares < 1)).any()) for _, shares in given)
    for images, shares in given:
        assert torch.allclose(shares.sum(1), torch.ones(len(shares)))
        F.cross_entropy(task.net(images), shares).backward()
        optimizer.step()
        optimizer.zero_grad()


def restart(task: Any, given: list[Any]) -> None:
    optimizer = torch.optim.SGD(task.net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=8, T_mult=2)
    rates = []
    for images, labels in given:
        rates.append(optimizer.param_groups[0]["lr"])
        F.cross_entropy(task.net(images), labels).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert [update for update, rate in enumerate(rates) if rate == 0.1] == [0, 8, 24]


def clip_by_history(task: Any, given: list[Any]) -> None:
    optimizer, norms = task.configure_optimizers(), []
    for batch in given:
        made = task.training_step(batch)
        (made["loss"] if isinstance(made, dict) else made).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in task.parameters()])
        norms.append(norm)
        factor = (torch.stack(norms).quantile(0.3) / (norm + 1e-6)).clamp(max=1.0)
        for parameter in task.parameters():
            parameter.grad *= factor
        optimizer.step()
        optimizer.zero_grad()
    assert not math.isclose(float(min(norms)), float(max(norms)))


LOOPS: dict[str, Callable[[Any, list[Any]], None]] = {
    "retrieval": retrieve,
    "mixup": blend,
    "restarts": restart,
    "autoclip": clip_by_history,
}


@pytest.mark.parametrize("name", some(sorted(LOOPS)))
def test_an_example_trains_what_a_plain_loop_trains(name: str, folder: Path) -> None:
    by_hand, loader, _ = parts_of(name, folder)
    given = list(batches(loader))
    torch.manual_seed(SEED)
    LOOPS[name](by_hand, given)
    fitted(name, str(folder))
    assert_same_weights(fitted.task, by_hand)  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.slow
@pytest.mark.parametrize("place", range(10))
@pytest.mark.parametrize("name", LOOPS)
def test_an_example_that_is_killed_ends_in_the_same_bits(name: str, place: int, folder: Path) -> None:
    done = forked.call(partial(fitted, name, str(folder), str(folder / "straight")))
    assert done.returncode == 0, done.stderr
    update = random.Random(f"{name} {place}").randint(1, UPDATES - 1)
    run = str(folder / "killed")
    done = forked.call(partial(fitted, name, str(folder), run, update))
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = forked.call(partial(fitted, name, str(folder), run))
    assert done.returncode == 0, done.stderr
    ended = [torch.load(folder / which / "ended.pt", weights_only=True) for which in ("straight", "killed")]
    assert_same_weights(*ended)


def test_folds_are_a_plain_loop_over_parts_of_the_data(empty_folder: Path) -> None:
    made: dict[str, Any] = {"__name__": "kfold"}
    exec(code := blocks("docs/groups.md", "python")[0].text, made)
    (empty_folder / "kfold.py").write_text(code)
    folds, fixed = 3, ["trainer.max_epochs=2", f"trainer.seed={SEED}", "trainer.device=cpu"]
    without = [word for name in ("progress", "tensorboard", "first_look") for word in ("-p", f"no:{name}")]
    for fold in range(folds):
        own = [f"data.fold={fold}", f"data.folds={folds}", "--run-dir", str(empty_folder / f"fold-{fold}")]
        assert cli.main(["fit", str(empty_folder / "kfold.py:Digits"), *fixed, *without, *own]) == 0
    arrays = np.load(files("forge_recipes").joinpath("digits.npz").open("rb"))
    images, labels = torch.from_numpy(arrays["images"]).float() / 16, torch.from_numpy(arrays["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    held_out: list[int] = []
    for fold in range(folds):
        val = [sample for place, sample in enumerate(order) if place % folds == fold]
        train = [sample for sample in order if sample not in set(val)]
        held_out += val
        torch.manual_seed(SEED)
        task = made["Digits"]()
        optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3, weight_decay=0.01)
        torch.manual_seed(SEED)
        for epoch in range(2):
            for at in epoch_order(len(train), SEED, epoch).split(64):
                F.cross_entropy(task(images[train][at]), labels[train][at]).backward()
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            right = task.eval()(images[val]).argmax(1) == labels[val]
        run = forge.load(empty_folder / f"fold-{fold}", made["Digits"])
        assert_same_weights(run, task)
        assert RunFolder(empty_folder / f"fold-{fold}").final["val/accuracy"] == pytest.approx(
            float(right.float().mean())
        )
    assert sorted(held_out) == list(range(len(labels)))  # each sample once


@pytest.mark.slow
def test_ppo_on_its_page_is_the_recipes() -> None:
    """tests/recipes/test_reinforcement.py holds the recipe's beside a loop by hand, and cuts it."""
    pytest.importorskip("gymnasium")
    from forge_plugins import Clip
    from forge_recipes.ppo import PPO, rollouts

    made: dict[str, Any] = {"__name__": "cart_pole"}
    exec(blocks("docs/examples/ppo.md", "py")[0].text, made)
    ended = []
    recipes = partial(PPO, steps=32, gamma=0.98, trace=0.8), rollouts(epochs=20).train
    for make, train in ((made["CartPole"], made["data"]().train), recipes):
        torch.manual_seed(1)
        task = make()
        trainer = forge.Trainer(plugins=[Clip(0.5)], max_epochs=4, seed=1, device="cpu", run_dir=False)
        ended.append((task, trainer.fit(task, train)))
    (page, result), (recipe, same) = ended
    assert_same_weights(page, recipe)
    assert result.metrics["train/return"] == same.metrics["train/return"] > 5


@pytest.mark.slow
def test_ppo_on_its_page_learns(empty_folder: Path) -> None:
    pytest.importorskip("gymnasium")
    made: dict[str, Any] = {"__name__": "cart_pole"}
    for block in blocks("docs/examples/ppo.md", "py"):
        exec(block.text, made)
    assert made["result"].metrics["train/return"] > 60  # 178 where it was tried
