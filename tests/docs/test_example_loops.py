"""Examples train what a plain loop trains, bit for bit, and a killed run ends in the same bits."""

from __future__ import annotations

import copy
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
from torch import Tensor

import forge
from forge import cli
from forge.data import epoch_order
from forge.runs.folder import RunFolder
from forge.testing import assert_same
from forge_plugins import EMA, Checkpoint
from forge_recipes.digits import DigitsMLP, digits
from tests.support import forked
from tests.support.docs_pages import blocks
from tests.support.profiles import some

UPDATES, SEED, DECAY = 30, 3, 0.99
PAGES = {
    "retrieval": "two-tower-retrieval",
    "restarts": "warm-restarts",
    "autoclip": "own-plugin",
    "lora": "dpo",
    "cached distillation": "distillation",
}
"""The page of an example, where it is not the name of the example."""


def module_of(name: str, folder: Path) -> ModuleType:
    """The file that the page of an example shows."""
    page, module = f"docs/examples/{PAGES.get(name, name)}.md", name.removeprefix("cached ")
    text = blocks(page, "python")[1 if name == "mixup" else 0].text
    if name == "lora":
        pytest.importorskip("peft")
        text += blocks(page, "py")[0].text
    file = folder / f"{module}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[module] = made
    spec.loader.exec_module(made)
    return made


def parts_of(name: str, folder: Path) -> tuple[Any, Any, list[Any]]:
    """The task, its training data and the plugins of an example. Those that start from the weights of a teacher or of
    a writer read them from a file."""
    made: Any = module_of(name, folder)
    start = folder / "start.pt"
    if name.endswith("distillation") or name in ("dpo", "lora"):
        torch.manual_seed(5)
        torch.save((made.Writer if name in ("dpo", "lora") else DigitsMLP)().state_dict(), start)
    torch.manual_seed(6)
    match name:
        case "retrieval":
            return made.Retrieval(), made.data().train, []
        case "mixup":
            return made.Stripes(), made.data(str(folder / "stripes")).train, []
        case "restarts":
            return made.Restarts(first=8), digits().train, []
        case "autoclip":
            return DigitsMLP(), digits().train, [made.AutoClip(0.3)]
        case "byol":
            return made.BYOL(), made.data().train, [EMA(DECAY)]
        case "gan":
            return made.GAN(), made.data().train, []
        case "dpo" | "lora":
            return (made.DPO if name == "dpo" else made.LoRA)(str(start)), made.data().train, []
    data = made.data(cached=name.startswith("cached "), teacher=str(start))
    return made.Distillation(str(start)), data.train, []


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


def distil(task: Any, given: list[Any]) -> None:
    teacher, net = task.teacher.module, task.net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for images, labels, *more in given:
        logits = net(images)
        with torch.no_grad():
            told = teacher(images)
        assert all(torch.equal(told, each) for each in more)
        mine, theirs = F.log_softmax(logits / 3.0, 1), F.log_softmax(told / 3.0, 1)
        copied = F.kl_div(mine, theirs, reduction="batchmean", log_target=True) * 3.0**2
        ((F.cross_entropy(logits, labels) + copied) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def bootstrap(task: Any, given: list[Any]) -> None:
    target = copy.deepcopy(task.online).requires_grad_(False)
    optimizer = torch.optim.AdamW([*task.online.parameters(), *task.predictor.parameters()], lr=3e-3)
    for images, _ in given:
        views = [(images + 0.1 * torch.randn_like(images)) * (torch.rand_like(images) > 0.3) for _ in range(2)]
        loss: Any = 0
        for a, b in (views, reversed(views)):
            loss = loss + (1 - F.cosine_similarity(task.predictor(task.online(a)), target(b)).mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, own in zip(target.parameters(), task.online.parameters(), strict=True):
                mine.lerp_(own, 1 - DECAY)


def prefer(task: Any, given: list[Any]) -> None:
    reference = copy.deepcopy(task.policy).requires_grad_(False)  # both start from one file
    optimizer = torch.optim.AdamW(task.policy.parameters(), lr=2e-3)

    def likelihood(model: Any, letters: Tensor) -> Tensor:
        chosen = model(letters[:, :-1]).log_softmax(2).gather(2, letters[:, 1:, None]).squeeze(2)
        return chosen[:, 3:].sum(1)

    for liked, disliked in given:
        gains = [likelihood(task.policy, letters) - likelihood(reference, letters) for letters in (liked, disliked)]
        (-F.logsigmoid(0.2 * (gains[0] - gains[1])).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def prefer_by_adapter(task: Any, given: list[Any]) -> None:
    """The reference is a model of its own, that never had an adapter."""
    made: Any = sys.modules["lora"]
    reference = made.Writer()
    named = {name.replace("base_layer.", ""): value for name, value in task.policy.base_model.model.named_parameters()}
    reference.load_state_dict({name: value.detach() for name, value in named.items() if "lora" not in name})
    adapter = [parameter for name, parameter in task.policy.named_parameters() if "lora" in name]
    optimizer = torch.optim.AdamW(adapter, lr=2e-2)
    torch.manual_seed(3)
    for liked, disliked in given:
        with torch.no_grad():
            known = [made.log_likelihood(reference, letters) for letters in (liked, disliked)]
        gains = [made.log_likelihood(task.policy, x) - y for x, y in zip((liked, disliked), known, strict=True)]
        (-F.logsigmoid(0.2 * (gains[0] - gains[1])).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def compete(task: Any, given: list[Any]) -> None:
    generator, critic = task.generator, task.critic
    slow = torch.optim.Adam(generator.parameters(), lr=2.5e-4, betas=(0.5, 0.999))
    fast = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for images, _ in given:
        real = images.flatten(1)
        fake = generator(torch.randn(len(real), 16)).detach()
        (F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()).backward()
        fast.step()
        fast.zero_grad()
        F.softplus(-critic(generator(torch.randn(len(real), 16)))).mean().backward()
        slow.step()
        slow.zero_grad()
        fast.zero_grad()


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
    "lora": prefer_by_adapter,
    "distillation": distil,
    "cached distillation": distil,
    "byol": bootstrap,
    "dpo": prefer,
    "gan": compete,
    "retrieval": retrieve,
    "mixup": blend,
    "restarts": restart,
    "autoclip": clip_by_history,
}


@pytest.mark.parametrize("name", some(LOOPS, quick=4))
def test_an_example_trains_what_a_plain_loop_trains(name: str, folder: Path) -> None:
    by_hand, loader, _ = parts_of(name, folder)
    given = list(batches(loader))
    torch.manual_seed(SEED)
    LOOPS[name](by_hand, given)
    fitted(name, str(folder))
    assert_same(fitted.task, by_hand)  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.parametrize("place", some(range(10), quick=1))
@pytest.mark.parametrize("name", some(LOOPS))
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
    assert_same(*ended)


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
        assert_same(run, task)
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
    assert_same(page, recipe)
    assert result.metrics["train/return"] == same.metrics["train/return"] > 5


@pytest.mark.slow
def test_ppo_on_its_page_learns(empty_folder: Path) -> None:
    pytest.importorskip("gymnasium")
    made: dict[str, Any] = {"__name__": "cart_pole"}
    for block in blocks("docs/examples/ppo.md", "py"):
        exec(block.text, made)
    assert made["result"].metrics["train/return"] > 60  # 178 where it was tried
