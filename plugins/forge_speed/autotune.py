"""The fastest stack, found at the start of a run."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from forge.config.build import make_plugin
from forge.config.recipe import Recipe
from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin, plugin_options
from forge.contract.run import Run
from forge.data.protocols import is_seekable
from forge.distributed.rank_env import DistributedEnv
from forge.distributed.rank_info import RankInfo
from forge.env import pick_device
from forge.errors import RecipeError
from forge.options import plain
from forge.rng import RNGState
from forge.torch_internals import pytree
from forge.tuning.step_reading import in_ms
from forge.util.generators import find_generators, generator_state, set_generator_state
from forge_speed.answers import FILE, Answer, answer_key, as_answer, resumed_answer
from forge_speed.json_cache import JsonCache, cache_folder
from forge_speed.levers import Numbers
from forge_speed.speed import reason, speed_range
from forge_speed.speed_report import SpeedReport

logger = logging.getLogger("forge")

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_ID")
"""Variables that make a process one of many: a trial is one alone."""


class Autotune(Plugin):
    """Measure at the start of a run which plugins make its step faster, and add them to the stack.

    It tries what `forge tune speed` tries (`compile`, `cuda_graph`, `kernels`, `fused_optimizer`, `channels_last` and
    more), as real updates of copies of the task with the run's own data, and adds what makes the whole step at least
    2 % faster. The run itself starts from the same weights and random numbers as without a search. Plugins of your
    stack stay as they are: your choice wins. Batch size and data workers stay too; `forge tune speed` tries them.

    When to use it: for runs of an hour or more, if you do not want to choose by hand. `numbers` says what may change:
    `bitwise` nothing, `rounding` the last bits, `precision` the types of the computation too (bf16, TF32).

    What you see: the answer in the log. It is part of the run's config.yaml and of its checkpoints, so a resumed run
    uses the same plugins without measuring. The user's cache keeps it for the next run of the same task, stack, shapes,
    device and version of torch.

    Together with: on several ranks (`ddp`) the first one measures its share of the batch alone, without the exchange of
    gradients, and decides for all. With `fsdp` and `tensor_parallel` nothing is measured.

    ::

        forge fit quickstart -p autotune autotune.budget=1
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        numbers: Literal["bitwise", "rounding", "precision"] = "rounding"
        "What may change in the results: nothing, the last bits, or the precision."
        limit: float | None = None
        "Memory that the run may take, in GB; null: what the device has."
        budget: float = 5.0
        "Minutes of the search."
        leave_out: str | list[str] | None = None
        "Plugins and levers that are not tried."
        cache: bool | str = True
        "Where to keep answers for the next run: true is the user's cache, a path is a folder, false is nowhere."
        answer: dict[str, Any] | None = None
        "The plugins to add, with their options, as an earlier run found them; null: search."

    config: Config
    provides = ("autotune", "trials")

    def __init__(self, *first: str, **values: Any):
        super().__init__(*first, **values)
        for name in ("limit", "budget"):
            value = getattr(self.config, name)
            if value is not None and value <= 0:
                raise RecipeError(f"autotune.{name} is {value:g}; it must be above 0.")
        if self.config.answer is not None and as_answer(self.config.answer) is None:
            raise RecipeError("autotune.answer names plugins with their options, as in {compile: {dynamic: null}}.")
        self.answer: Answer = {}
        "The plugins that were added, with their options."
        self._recipe: Any = None

    # -- a run --------------------------------------------------------------------------------------------------------

    @hookimpl
    def forge_configure(self, trainer: Run) -> None:
        """Find the answer, before anything is built, and change the stack."""
        self.answer, self._recipe = {}, None
        if trainer.verb != "fit":
            return
        given = as_answer(self.config.answer)
        found = given if given is not None else self._agree(trainer)
        there = {plugin.name.partition("@")[0] for plugin in trainer.stack}
        added = {name: options for name, options in found.items() if name not in there}
        for name, options in added.items():
            trainer.stack.add(make_plugin(name, options))
        self.answer = found
        if isinstance(trainer.recipe, Recipe):
            self._recipe, trainer.recipe = trainer.recipe, with_answer(trainer.recipe, self.name, found, added)

    @hookimpl
    def forge_state_dict(self) -> dict[str, Any]:
        return {"answer": self.answer}

    @hookimpl
    def forge_load_state_dict(self, state: dict[str, Any]) -> None:
        if state["answer"] != self.answer:
            logger.warning(
                "autotune: the resumed run used %s, and this one uses %s: the last bits may differ.",
                _listed(state["answer"]),
                _listed(self.answer),
            )

    @hookimpl
    def forge_end(self, trainer: Run) -> None:
        if self._recipe is not None:
            trainer.recipe, self._recipe = self._recipe, None

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _agree(self, trainer: Run) -> Answer:
        """Return the answer of the first rank."""
        strategy = next((plugin for plugin in trainer.stack if "strategy" in plugin.provides), None)
        joined = dist.is_available() and dist.is_initialized()  # by the user's own script
        if strategy is None or (RankInfo.read().world == 1 and not joined):
            return self._find(trainer, pick_device(trainer.device), 1)
        backend = getattr(strategy.config, "backend", None)
        env = DistributedEnv(trainer.device, trainer=trainer, backend=backend)
        failed = True
        try:
            with env.no_timeout():
                found = env.from_first(lambda: self._find(trainer, env.device, env.world))
            failed = False
        finally:
            env.close(failed)
        return found

    def _find(self, trainer: Run, device: torch.device, world: int) -> Answer:
        """Return the answer of the run to be resumed, of the cache, or of a search."""
        resumed = resumed_answer(trainer, self.name)
        if resumed is not None:
            logger.info("autotune: %s, as in the run that is resumed.", _listed(resumed))
            return resumed
        why_not = not_measurable(trainer)
        if why_not:
            logger.warning("autotune: nothing was measured: %s. The stack stays as it is.", why_not)
            return {}
        try:
            with untouched(trainer, device), alone():
                return self._cached(trainer, device, world)
        except Exception as error:  # the run meets it too, and explains it
            logger.warning("autotune: nothing was measured: %s. The stack stays as it is.", reason(error))
            return {}

    def _cached(self, trainer: Run, device: torch.device, world: int) -> Answer:
        config = self.config
        cache = JsonCache(cache_folder(config.cache), FILE)
        asked = {name: plain(getattr(config, name)) for name in ("numbers", "limit", "budget", "leave_out")}
        key = answer_key(trainer, asked, device, world, shapes(trainer.given_loaders["train"]))
        known = as_answer(cache.get(key))
        if known is not None:
            logger.info("autotune: %s, as found before (%s).", _listed(known), cache.path)
            return known
        report = self._search(trainer, device, world)
        answer = {name: dict(options) for name, options in report.change.plugins.items() if options is not None}
        logger.info("autotune: %s", sentence(report))
        cache.put(key, answer)
        return answer

    def _search(self, trainer: Run, device: torch.device, world: int) -> SpeedReport:
        config = self.config
        logger.info("autotune: searching for up to %g minutes on %s ...", config.budget, device)
        numbers: Numbers = config.numbers
        return speed_range(
            lambda: copy.deepcopy(trainer.task),
            lambda: trainer.given_loaders["train"],
            numbers=numbers,
            limit=config.limit,
            budget=config.budget,
            leave_out=_as_list(config.leave_out),
            only_adds=True,
            plugins=[plugin for plugin in map(fresh, trainer.stack) if plugin.name != self.name],
            share=world,
            without=["strategy"],
            seed=trainer.seed or 0,
            device=str(device),
            deterministic=trainer.deterministic,
            allow_inexact=True,
        )


def with_answer(recipe: Recipe, name: str, answer: Answer, added: Mapping[str, Any]) -> Recipe:
    """Return the recipe with the plugins that were added, and the answer where this plugin is named."""
    plugins = {**recipe.plugins, **{key: dict(options) for key, options in added.items()}}
    if name in plugins:
        plugins[name] = {**plugins[name], "answer": answer}
    return dataclasses.replace(recipe, config={**recipe.config, "plugins": plugins})


def fresh(plugin: Plugin) -> Plugin:
    """Return another plugin with the same options: trials must not use the objects of the run."""
    with suppress(Exception):
        made = make_plugin(plugin.name, plugin_options(plugin))
        if type(made) is type(plugin):
            return made
    with suppress(Exception):
        return copy.deepcopy(plugin)
    return plugin


def not_measurable(trainer: Run) -> str:
    """Return why this run cannot be tried on copies; empty if it can."""
    for plugin in trainer.stack:
        if {"sharding", "tensor_parallel"} & set(plugin.provides):
            return f"{plugin.name} divides the model among ranks"
    if any(parameter.is_meta for parameter in trainer.task.parameters()):
        return "the weights have no memory yet"
    train = trainer.given_loaders["train"]
    if train is None:
        return "the task makes its loaders in the run"
    if not hasattr(train, "__iter__") or hasattr(train, "__next__"):
        return "the training data can be read only once"
    return ""


def shapes(train: Any) -> str:
    """Return shapes and types of the tensors of the first batch."""
    batch = next(iter(train), None)
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in leaves)


@contextmanager
def untouched(trainer: Run, device: torch.device) -> Iterator[None]:
    """Restore the generators, global ones and those that the task and its data keep, and the loader's position."""
    train = trainer.given_loaders["train"]
    rng = RNGState.capture(device)
    own = [(g, generator_state(g)) for g in find_generators({"task": trainer.task, "train": train}).values()]
    keeps = not is_seekable(train) and hasattr(train, "state_dict") and hasattr(train, "load_state_dict")
    position = copy.deepcopy(train.state_dict()) if keeps else None
    try:
        yield
    finally:
        if keeps:
            train.load_state_dict(position)
        for generator, state in own:
            set_generator_state(generator, state)
        rng.restore(device)


@contextmanager
def alone() -> Iterator[None]:
    """Hide that this process is one of several: a trial runs by itself."""
    hidden = {name: os.environ.pop(name) for name in RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def sentence(report: SpeedReport) -> str:
    """Summarise a search in one sentence."""
    took = f"{report.seconds:.0f} s"
    if report.best is None:
        return f"nothing that was tried is faster than your stack ({in_ms(report.start.ms)} ms per update, {took})."
    names = " + ".join(lever.name for lever in report.chosen)
    return (
        f"{names}: {in_ms(report.start.ms)} -> {in_ms(report.best.ms)} ms per update, {report.speedup:.2f} times as "
        f"fast; found in {took}."
    )


def _listed(answer: Mapping[str, Any]) -> str:
    return " + ".join(answer) or "nothing added"


def _as_list(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else names or []
