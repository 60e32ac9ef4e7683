"""The update as one CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch.backends import cudnn

import forge
from forge.diagnose.syncs import reads_of_the_device
from forge.errors import RecipeError, StackError
from forge.metrics.means import Means
from forge.optim.optimizers import Optimizers
from forge_plugins.cuda_graph import fitness
from forge_plugins.cuda_graph.captured import Captured, CaptureFailed
from forge_plugins.cuda_graph.extent import Extent, step_optimizer
from forge_plugins.cuda_graph.graph_cache import GraphCache
from forge_plugins.cuda_graph.rates import Rates
from forge_plugins.cuda_graph.window import GraphWindow, Unsuitable

logger = logging.getLogger("forge")

FEW, MANY = 3, 20
"""Capturing is given up after FEW changes for the same reason, each after fewer than MANY replays."""
CHANGED = ("capturable", "fused", "foreach")
"""The options of an optimizer that a run with this plugin changes, and restores."""
MOST = 64
"""Kinds of windows after which capturing is given up, if none has occurred three times."""


class CudaGraph(forge.Plugin):
    """Run the whole update as one CUDA graph: one launch from the host instead of a thousand.

    The first `warmup` updates run normally. Then one update is captured: forward, backward, the gradient hooks, the
    optimizer step and the metric means, over all micro-batches of a window. From then on every update copies its batch
    into the graph's memory (from pinned memory, on a separate stream, while the previous replay runs) and replays the
    graph. Everything else stays outside the graph: learning rates, averages, logs, evaluation, checkpoints.

    When to use it: for small models, which wait for the host. A model that keeps the device busy gains nothing.

    A replay computes the same update, with the same kernels on the same numbers, and a resumed run ends with the same
    bits. The plugin changes two things of the optimizer, from the first update on: torch's Adam, AdamW and SGD become
    `fused` and `capturable`, and the learning rate becomes a float32 number on the device, as torch requires in a
    graph. So the weights equal those of a run without this plugin, bit for bit, if the optimizer is already fused and
    float32 can represent its rates; otherwise the last bits differ.

    What you see: the log names what stays outside of the graph. With a schedule that moves momentum or betas
    (`one_cycle`), and with an optimizer that has no option `capturable`, the optimizer's step runs after each replay.
    With fp16, whose scaler reads the device once per update, and with `guard.policy=skip`, the gradient hooks run there
    too. Learning rates then stay plain numbers. Each graph keeps memory for the gradients.

    If nothing can be captured, the log names the reason and the run continues without a graph; with `strict` this is an
    error. Reasons are a training step that reads the device (`.item()`, `print`, `if loss > 3`), plugins that do so
    before the backward pass ends, several ranks. With several optimizers (a GAN) each has its own graph for its turn. A
    batch of another shape, such as the last of an epoch, runs uncaptured and gets its own graph when the shape occurs
    again, up to `graphs` of them per optimizer; one that is no longer used makes room for a shape that comes often. All
    share their memory. A plugin that acts at an interval acts in an uncaptured update. After a rewind or an unfreeze
    the step is captured again.

    Python code in `training_step` that does not work on tensors, such as a counter or an annealed weight, runs only
    once, at the capture. Detectable cases are refused: metrics that are not tensors, buffers that are replaced, random
    numbers drawn on the host.

    Together with: `compile` with `mode=default`, for the fastest steps. `remat` is captured with its second forwards.
    `ddp`, `fsdp`, `sam` and `compile.mode=reduce-overhead` are refused.

    ::

        forge fit quickstart -p cuda_graph trainer.max_epochs=3
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        warmup: int = 3
        "Updates that run normally before one is captured."
        graphs: int = 4
        "Window shapes of an optimizer that have a graph at a time; others run uncaptured."
        benchmark: bool = False
        "Let cuDNN measure its fastest convolutions. Another run may choose others, so bits may differ."
        strict: bool = False
        "Stop with an error if nothing of a step can be captured, instead of continuing without graphs."

    config: Config
    provides = ("step_capture",)
    cures = {"idle": "-p {name}, which launches all kernels of an update at once"}
    capturable = True
    conflicts = {
        "second_pass": "A graph runs the window once. Remove one of them.",
        "compiled_graphs": "Both capture graphs. Set compile.mode=default (or max-autotune-no-cudagraphs): the whole "
        "step is captured then, compiled.",
        "strategy": "Steps of several ranks are not captured. Remove one of them.",
    }

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        if self.config.warmup < 2:
            raise RecipeError(
                f"cuda_graph.warmup is {self.config.warmup}; it must be at least 2: the first update creates the "
                "optimizer's state, and the last is checked for reads of the device."
            )
        if self.config.graphs < 1:
            raise RecipeError(f"cuda_graph.graphs is {self.config.graphs}; it must be at least 1.")
        self._forget()

    def _forget(self, replayed: int = 0) -> None:
        """Reset the state of one run."""
        self.replayed = replayed
        "Updates that were replayed in the last run."
        self._off: str | None = None
        self._extent: Extent | None = None
        "How much of an update a graph holds; None before the first update."
        self._rates: dict[str | None, Rates] = {}
        "By optimizer; none where the optimizers' steps stay outside of the graph."
        self._measured_before: bool | None = None
        self._options_before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._means: Means | None = None
        self._number, self._last_replayed = 0, -1
        self._drop()
        self._warned_of_many = False
        self._changes: list[str] = []
        "Reasons for which graphs were dropped."

    def _drop(self) -> None:
        """Drop every graph and its memory; the next update is a warm-up again."""
        self._caches: dict[str | None, GraphCache] = {}
        "By optimizer: each takes its own turn in an update."
        self._pool: Any = None
        self._fitness: fitness.Fitness | None = None
        self._look_again = False
        self._replays = 0

    @property
    def _graphs(self) -> list[Captured]:
        return [graph for cache in self._caches.values() for graph in cache.graphs.values()]

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl(wrapper=True)
    def forge_build_optimizers(self, trainer: forge.Run) -> Generator[None, Optimizers, Optimizers]:
        built = yield
        self._forget()
        self._off = fitness.of_the_run(trainer, built)
        if self._off is None:
            groups = [group for optimizer in built.values() for group in optimizer.param_groups]
            self._options_before = [(g, {k: g[k] for k in CHANGED if k in g}) for g in groups]
            for optimizer in built.values():
                fitness.make_capturable(optimizer)
        return built

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        if trainer.verb != "fit":
            return
        if self._off is None and trainer.keep_rng:
            self._off = "the window is run more than once"
        if self._off is not None:
            self._give_up(self._off)
            return
        if self.config.benchmark and not trainer.deterministic:
            self._measured_before, cudnn.benchmark = cudnn.benchmark, True

    @forge.hookimpl
    def forge_train_step(self, step: forge.Step) -> bool | None:
        if self._off is not None:
            return None
        trainer = step.trainer
        if self._fitness is None:
            reason = fitness.of_the_stack(trainer)
            if reason is not None:
                return self._give_up(reason)
            self._fitness = self._prepare(trainer)
        elif self._has_changed(self._fitness, step):
            self._drop()
            return None
        if self._fitness.any_plugin_due(step):
            return None
        try:
            window = GraphWindow(step, trainer.env.device)
        except Unsuitable as reason:
            return self._give_up(str(reason))
        cache = self._caches.setdefault(step.name, GraphCache(self.config.graphs))
        graph = cache.find(window.key)
        if graph is not None:
            self._replay(graph, window, step)
            return True
        return self._capture_or_not(step, window, cache)

    def _prepare(self, trainer: forge.Run) -> fitness.Fitness:
        """Before the first update, and after graphs were dropped: look how much of an update can be captured."""
        for optimizer in trainer.optimizers.values():
            fitness.make_capturable(optimizer)  # a restored state may come from an uncaptured run
        if self._extent is None:
            self._extent = Extent.UPDATE
            self._narrow(*fitness.extent(trainer))
            if self._extent is Extent.UPDATE:
                self._rates = {name: Rates(o, trainer.env.device) for name, o in trainer.optimizers.items()}
        return fitness.Fitness(trainer, holds_optimizers=self._extent is Extent.UPDATE)

    def _narrow(self, extent: Extent, reason: str) -> None:
        """Capture no more of an update than this, and name the reason."""
        assert self._extent is not None
        if extent < self._extent:
            self._flush()
            self._drop()
            self._extent = extent
            logger.info("cuda_graph: %s outside of the graph, because %s.", extent.rest, reason)

    @forge.hookimpl(wrapper=True)
    def forge_optimizer_step(self, step: forge.Step) -> Generator[None, Any, Any]:
        """Give the optimizer its rates on the device, captured or not, so that all updates are equal."""
        rates = self._rates.get(step.name)
        if rates is None:
            return (yield)
        with rates.in_place():
            return (yield)

    @forge.hookimpl(wrapper=True)
    def forge_evaluate(self) -> Generator[None, Any, Any]:
        self._look_again = True
        return (yield)

    @forge.hookimpl
    def forge_end(self, trainer: forge.Run) -> None:
        if self._extent is not None:
            done = trainer.progress.update - (trainer.resumed_from or 0)
            logger.info("cuda_graph: %d of %d updates were replayed.", self.replayed, max(done, self.replayed))
            trainer.means.flush_with(None)
        if self._measured_before is not None:
            cudnn.benchmark = self._measured_before
        for group, options in self._options_before:
            group.update(options)
        self._forget(self.replayed)

    # -- one update ---------------------------------------------------------------------------------------------------

    def _capture_or_not(self, step: forge.Step, window: GraphWindow, cache: GraphCache) -> bool | None:
        """Capture a window if one of its kind has run uncaptured before: by then everything is compiled, measured and
        allocated. The last warm-up is checked for reads of the device, which would break a capture."""
        seen = cache.count(window.key)
        if cache.warmed < self.config.warmup:
            cache.warmed += 1
            return None if cache.warmed < self.config.warmup else self._look_for_reads(step)
        if not seen or not cache.has_room(window.key):
            self._look_at_many(window, cache)
            return None
        try:
            graph = self._capture(step, window, cache)
        except CaptureFailed as failure:
            if not self._graphs:
                return self._give_up(str(failure), failure.__cause__)
            logger.warning("cuda_graph: windows of %s run uncaptured, because %s.", window, failure)
            cache.refused.add(window.key)
            return None
        self._replay(graph, window, step)
        return True

    def _look_for_reads(self, step: forge.Step) -> bool:
        """Run an update uncaptured, and look where it reads the device."""
        with reads_of_the_device() as in_window:
            step.run_window()
        with reads_of_the_device() as in_hooks:
            step.gradient_phases(step.trainer.hooks)
        with reads_of_the_device() as in_optimizer:
            step_optimizer(step)
        reason = fitness.of_the_metrics(step.trainer)
        if in_window or reason is not None:
            self._give_up(reason or f"the step reads the device at {in_window[0]}")
        elif in_hooks:
            self._narrow(Extent.WINDOW, f"they read the device at {in_hooks[0]}")
        elif in_optimizer:
            self._narrow(Extent.GRADIENTS, f"it reads the device at {in_optimizer[0]}")
        return True

    def _capture(self, step: forge.Step, window: GraphWindow, cache: GraphCache) -> Captured:
        assert self._fitness is not None
        assert self._extent is not None
        if step.name in self._rates:
            self._rates[step.name].write()
        self._means = step.trainer.means
        self._flush()
        is_first = not self._graphs
        cache.make_room(window.key)
        graph = Captured(step, window, self._extent, self._pool if self._graphs else None)
        self._fitness.remember(step.name)
        if is_first:
            logger.info("cuda_graph: the step is replayed from update %d on.", step.index)
            self._means.flush_with(self._flush)
        self._pool = graph.pool
        cache.put(window.key, graph)
        return graph

    def _replay(self, graph: Captured, window: GraphWindow, step: forge.Step) -> None:
        if step.name in self._rates:
            self._rates[step.name].write()
        if graph.is_full:
            self._flush()
        self._number += 1
        is_first = step.index != self._last_replayed  # of several optimizers' graphs in an update
        self.replayed, self._replays, self._last_replayed = (
            self.replayed + is_first,
            self._replays + is_first,
            step.index,
        )
        graph.replay(window, step, self._number)

    def _flush(self) -> None:
        """Deliver the metrics of all replays so far, in their order, as if each had been counted in its update."""
        means = self._means
        rows = [row for graph in self._graphs for row in graph.take_rows()] if means is not None else []
        for _, values in sorted(rows, key=lambda row: row[0]):
            for name, value, weight in values:
                means.append(name, value, weight)  # pyright: ignore[reportOptionalMemberAccess]

    # -- obstacles ----------------------------------------------------------------------------------------------------

    def _has_changed(self, known: fitness.Fitness, step: forge.Step) -> bool:
        """Whether graphs refer to something outdated: the model, the set of trained parameters, the optimizer's state
        after a rewind. Addresses are compared after every evaluation, which may have moved tensors."""
        look, self._look_again = self._look_again, False
        change = known.change(step.name, closely=look) if self._graphs else None
        if change is None:
            return False
        self._flush()
        self._changes.append(change if self._replays < MANY else "")
        if change.startswith(fitness.OPTION) and self._changes[-FEW:] == FEW * [change]:
            self._narrow(Extent.GRADIENTS, f"{change} repeatedly, and a graph holds it as a constant")
        else:
            logger.info("cuda_graph: %s; the step will be captured again.", change)
        return True

    def _give_up(self, reason: str, cause: BaseException | None = None) -> None:
        """Run every later update uncaptured, or raise if strict."""
        self._flush()
        self._off = reason
        self._caches, self._pool = {}, None
        text = f"cuda_graph: updates run uncaptured, because {reason}."
        if self.config.strict:
            raise StackError(f"{text} Fix that, remove cuda_graph, or set cuda_graph.strict=false.") from cause
        logger.log(logging.INFO if "on CUDA only" in reason else logging.WARNING, text)

    def _look_at_many(self, window: GraphWindow, cache: GraphCache) -> None:
        """Warn once if windows have too many kinds for graphs; give up if no two are equal."""
        if len(cache.seen) <= 2 * self.config.graphs:
            return
        if len(cache.seen) > MOST and max(cache.seen.values()) < 3:
            self._give_up("no two windows are equal: a plain number or string in a batch changes every time")
        elif not self._warned_of_many:
            self._warned_of_many = True
            text = "cuda_graph: windows come in %d kinds so far (the last: %s); %d of them get a graph, others run"
            text += " uncaptured. Pad batches to few lengths, and keep changing numbers and strings out of them."
            logger.warning(text, len(cache.seen), window, self.config.graphs)
