"""The examples with several models train what a plain loop trains, and a killed run ends in the same bits."""

from __future__ import annotations

import copy
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import forge
from forge.testing import assert_same_weights
from forge_plugins import EMA, Checkpoint
from forge_recipes.digits import DigitsMLP
from tests.support import forked
from tests.support.docs_pages import blocks
from tests.support.profiles import some

UPDATES = 24
EXAMPLES = {"distillation": "Distillation", "byol": "BYOL", "dpo": "DPO", "gan": "GAN", "lora": "LoRA"}
PAGES = {"lora": "dpo"}
"""Where it is not the name of the example."""
KILLED = [*EXAMPLES, "cached distillation"]
DECAY = 0.99


def module_of(name: str, folder: Path) -> ModuleType:
    """The file that the page of an example shows."""
    file, page = folder / f"{name}.py", f"docs/examples/{PAGES.get(name, name)}.md"
    text = blocks(page, "python")[0].text
    if name == "lora":
        pytest.importorskip("peft")
        text += blocks(page, "py")[0].text
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def started(name: str, folder: Path) -> Any:
    """What an example starts from: the weights of a teacher or of a writer, as a file."""
    made = module_of(name, folder)
    torch.manual_seed(5)
    sources: dict[str, Any] = {"distillation": DigitsMLP, "dpo": getattr(made, "Writer", None)}
    source = sources.get(PAGES.get(name, name))
    if source is not None:
        torch.save(source().state_dict(), folder / "start.pt")
    return made


def task_of(made: Any, name: str, folder: Path) -> Any:
    torch.manual_seed(6)
    kind, start = getattr(made, EXAMPLES[name]), str(folder / "start.pt")
    return kind(start) if (folder / "start.pt").exists() else kind()


def data_of(made: Any, name: str, folder: Path, cached: bool = False) -> Any:
    options = {"cached": cached, "teacher": str(folder / "start.pt")} if name == "distillation" else {}
    return made.data(**options).train


def fitted(name: str, folder: str, run: str | None = None, kill: int | None = None) -> int:
    """Fit an example in this process, from where its run is; `kill` ends the process without a word."""
    cached, name = name.startswith("cached "), name.removeprefix("cached ")
    made = module_of(name, Path(folder))
    task = task_of(made, name, Path(folder))

    @forge.on("step_end")
    def killer(step: forge.Step) -> None:
        if step.index + 1 == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    plugins: list[Any] = [EMA(DECAY)] if name == "byol" else []
    plugins += [Checkpoint(every="1 update"), killer] if run else []
    options: dict[str, Any] = {"run_dir": run, "resume": "auto"} if run else {"run_dir": False}
    trainer = forge.Trainer(plugins=plugins, max_updates=UPDATES, seed=3, device="cpu", log_every=10, **options)
    trainer.fit(task, data_of(made, name, Path(folder), cached))
    if run:
        torch.save(task.state_dict(), Path(run) / "ended.pt")
    fitted.task = task  # pyright: ignore[reportFunctionMemberAccess]
    return 0


# -- the loops by hand ------------------------------------------------------------------------------------------------


def batches(loader: Any) -> list[Any]:
    """The batches of the fit, in its order."""
    found: list[Any] = []
    epoch = 0
    while len(found) < UPDATES:
        loader.set_epoch(epoch)
        found += list(loader)
        epoch += 1
    return found[:UPDATES]


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


LOOPS: dict[str, Callable[[Any, list[Any]], None]] = {
    "distillation": distil,
    "byol": bootstrap,
    "dpo": prefer,
    "gan": compete,
    "lora": prefer_by_adapter,
}


@pytest.mark.parametrize("name", some(["lora", *(name for name in KILLED if name != "lora")], quick=2))
def test_an_example_trains_what_a_plain_loop_trains(name: str, tmp_path: Path) -> None:
    cached, page = name.startswith("cached "), name.removeprefix("cached ")
    made = started(page, tmp_path)
    by_hand = task_of(made, page, tmp_path)
    loader = data_of(made, page, tmp_path, cached)
    loader.set_default_seed(3)
    given = batches(loader)
    torch.manual_seed(3)
    LOOPS[page](by_hand, given)
    fitted(name, str(tmp_path))
    task = fitted.task  # pyright: ignore[reportFunctionMemberAccess]
    assert_same_weights(task, by_hand)


@pytest.mark.parametrize("place", some(range(10), quick=1))
@pytest.mark.parametrize("name", some(KILLED))
def test_an_example_that_is_killed_ends_in_the_same_bits(name: str, place: int, tmp_path: Path) -> None:
    started(name.removeprefix("cached "), tmp_path)
    done = forked.call(partial(fitted, name, str(tmp_path), str(tmp_path / "straight")))
    assert done.returncode == 0, done.stderr
    update = random.Random(f"{name} {place}").randint(1, UPDATES - 1)
    run = str(tmp_path / "killed")
    done = forked.call(partial(fitted, name, str(tmp_path), run, update))
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = forked.call(partial(fitted, name, str(tmp_path), run))
    assert done.returncode == 0, done.stderr
    ended = [torch.load(tmp_path / which / "ended.pt", weights_only=True) for which in ("straight", "killed")]
    assert_same_weights(*ended)
