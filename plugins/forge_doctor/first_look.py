"""The plugin `first_look`: watch the first updates of a fit as they run, and warn of what the probes find in them."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, SequentialSampler, Subset, TensorDataset

from forge.contract.hooks import hookimpl
from forge.contract.plugin import Plugin
from forge.contract.task import TaskModule
from forge.data.accumulation_windows import batch_size
from forge.diagnose.checks.first_batch import is_compiled
from forge.diagnose.checks.user_line import saying, warn_of
from forge.torch_internals import profiler_enabled, pytree
from forge_doctor import in_fit
from forge_doctor.experiments import motion, values
from forge_doctor.findings import Finding
from forge_doctor.memory import Growth, KeptGraphs
from forge_doctor.patient import Patient, copied, loss_of, rows, tensors
from forge_doctor.probes import aliases, class_labels, data, graph, losses, measures, serving, start
from forge_doctor.watch import ActivationWatch, StepWatch, first_input, gradient_sizes

if TYPE_CHECKING:
    from forge.contract.run import Run
    from forge.contract.step import Step

logger = logging.getLogger("forge")

LOOKS = 4
"""Micro-batches of each optimizer that are looked at."""
SMALL = 3_000_000
"""Numbers in a task's weights, and in a batch, up to which they are kept, and their values read."""
FEWEST = 12
"""Samples of a batch by which modules and data are judged."""
LAZY = "layers get their sizes from this batch"
SAMPLES = 2000
"""Samples of a dataset in memory that are looked at."""
ENOUGH, FALLEN = 100, 0.02
"""Updates after which a loss should have fallen, and by which share."""

FIRST_STEP = (
    *(losses.inputs, losses.weights, start.layers, start.optimizer),
    *(start.schedules, start.methods, data.dropped),
    *(aliases.attributes, aliases.shared_storage),
    *(losses.options, aliases.repeated, measures.modes, measures.validation),
    in_fit.class_targets,
)
"""Probes of the first step and of the plan."""
FIRST_UPDATES = (
    *(start.equal_rows, start.activations, motion.rates, motion.losses),
    *(data.copies, data.scales, data.targets, data.splits),
    *(class_labels.labels, serving.noise, motion.gradients),
    *(values.unseen, values.layout),
)
"""Probes after a few updates, and of the samples up to there."""


class Unseen(Exception):
    """A probe asks for a step that the fit has not made."""


class Observed(Patient):
    """A patient whose steps are those of its fit: none runs for it, and no sample is read."""

    reads = False
    in_memory: bool
    "Whether the samples are those of tensors in memory, rather than of the first batches."
    epoch: int = 0
    "The epoch of the first step, of which the samples are."

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise Unseen

    def clone(self) -> TaskModule:
        raise Unseen

    fresh = clone

    def note(self, **facts: Any) -> None:
        """Take what the fit's own steps showed for what an examination would run steps for."""
        vars(self).update(facts)


@dataclass
class MicroBatchLook:
    """What was noted while a micro-batch ran forward."""

    name: str | None
    batch: Any
    loss: Tensor
    watch: StepWatch
    traces: graph.Traces | None
    activity: list[tuple[str, str, Tensor]]
    first_input: tuple[str, Tensor] | None


class FirstLook(Plugin):
    """Look at the first updates of a fit, and warn of mistakes that raise no error.

    What the fit's own steps compute is looked at: the calls of torch's functions, the graph of the loss, the batch, the
    gradients and the weights. No step runs for it, nothing of yours is called or copied, and no process, thread or file
    is made. After the first updates and the first validation it is called at logs alone, to find memory that grows: a
    mark in the graph of one step of each interval tells whether graphs are kept, and the sizes of what the task, its
    optimizers and its data hold are compared. Where the loss of a run has not fallen at its end, one line says so.
    `forge doctor` makes experiments as well, and names more::

        forge fit quickstart -p first_look
    """

    observer = True

    def __init__(self) -> None:
        super().__init__()
        self._begin()

    def _begin(self) -> None:
        self.done: set[str | None] = set()
        "Optimizers whose micro-batches need no more looks."
        self.waiting: list[MicroBatchLook] = []
        self._counts: dict[str | None, int] = {}
        self._patient: Observed | None = None
        self._weights: tuple[int, dict[str, Tensor]] = (-1, {})
        self._gradients: list[tuple[str, float]] = []
        self._reads = False
        self._served: list[Tensor] = []
        "The first tensor of each batch whose samples were kept; they are small, and on the host."
        self._graphs: graph.Graphs | None = None
        self._looks = self._evaluates = False
        self._finite: in_fit.FiniteWatch | None = None
        self._kept, self._growth, self._marked_at = KeptGraphs(), Growth(), 0
        self._began: float | None = None
        "The mean loss of the first steps."

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        self._begin()
        self._looks = self._evaluates = trainer.verb == "fit"
        if not self._looks:
            off = ("forge_forward", "forge_optimizer_step", "forge_step_end", "forge_evaluate")
            trainer.switch_hooks(self, *off, on=False)
        elif not is_on_host(trainer):
            trainer.switch_hooks(self, "forge_optimizer_step", on=False)

    @hookimpl
    def forge_end(self, trainer: Run) -> None:
        """Say where a loss has not fallen, and what looks for causes."""
        ended = trainer.metrics.get("train/loss")
        began, self._began = self._began, None
        if began is None or not isinstance(ended, float) or trainer.progress.update < ENOUGH:
            return
        if not ended < began - FALLEN * abs(began):
            logger.warning(
                "The training loss was %.4g in the first updates, and is %.4g after %d. If it should have fallen, "
                "`forge doctor` looks for the cause by experiments.",
                *(began, ended, trainer.progress.update),
            )

    def due(self, step: Step) -> bool:
        return self._looks

    @hookimpl(wrapper=True)
    def forge_forward(self, step: Step, batch: Any) -> Generator[None, Any, Any]:
        """Note what a forward does; in one function, to add one frame to it."""
        if step.stage != "train":
            return (yield from self._evaluated(step, batch))
        if step.name in self.done or not step.recording or self._is_left_out(step):
            output = yield
            self._mark(step, output)
            return output
        trainer, task = step.trainer, step.trainer.task
        is_first = self._patient is None and not self.waiting
        with saying(trainer.said):
            graphs = self._graphs = self._graphs or graph.Graphs(task)
            small = is_small(trainer, batch)
            traces = graph.Traces(task, batch, cheaply=True) if is_first else None
            watch, activity = StepWatch(batch_size(batch)), ActivationWatch()
            with ExitStack() as looks:
                looks.enter_context(graphs.watching())
                if is_first:
                    looks.enter_context(watch)
                given = looks.enter_context(first_input(task)) if small and is_first else []
                looks.enter_context(activity)
                output = yield
            loss = loss_of(output) if has_loss(output) else None
            if isinstance(loss, Tensor) and loss.requires_grad:  # otherwise the check of the output says so
                attempt(lambda: graphs.add(loss, batch))
                if is_first:
                    attempt(lambda: self._kept.put(loss))
                if traces is not None and not attempt(traces.look_again):
                    traces = None
                first = next(iter(given), None)
                self.waiting.append(MicroBatchLook(step.name, batch, loss, watch, traces, activity.found, first))
                if not small:  # its scores may be the largest tensors of the step
                    self.judge(step)
            return output

    def _mark(self, step: Step, output: Any) -> None:
        """Mark the graph of the first step after a log, and look at no other."""
        if self._looks or not step.recording:
            return
        if self._patient is not None and has_loss(output) and not is_captured(step.trainer):
            attempt(lambda: self._kept.put(loss_of(output)))
            self._marked_at = step.index
        step.trainer.switch_hooks(self, "forge_forward", on=False)

    @hookimpl
    def forge_log(self, trainer: Run) -> None:
        """See whether graphs of past intervals live, and have the next step marked."""
        if self._patient is None or self._looks:
            return
        if trainer.progress.update - self._marked_at < trainer.log_every:  # of a validation, or of the user's
            return
        attempt(lambda: self._growth.look(trainer))
        with saying(trainer.said):
            self._tell(trainer, [self._kept.found, self._growth.found])
        if trainer.progress.update < (trainer.planned_updates or math.inf):
            trainer.switch_hooks(self, "forge_forward", on=True)

    def _is_left_out(self, step: Step) -> bool:
        """Count a micro-batch, and return whether it is not looked at."""
        count = self._counts[step.name] = self._counts.get(step.name, 0) + 1
        reason = why_not(step)
        if count == LOOKS or (reason and reason != LAZY):
            self.done.add(step.name)
        if reason:
            logger.debug("The first look at the steps is left out: %s.", reason)
        return bool(reason)

    @hookimpl(wrapper=True)
    def forge_optimizer_step(self, step: Step) -> Generator[None, Any, Any]:
        """Note the gradients of the first update."""
        if self.waiting and is_small(step.trainer, self.waiting[0].batch):
            attempt(lambda: self._gradients.extend(gradient_sizes(step.trainer.task)))
            step.trainer.switch_hooks(self, "forge_optimizer_step", on=False)
        return (yield)

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        if self.waiting:
            self.judge(step)
        if self._looks and not self.waiting and self.done >= set(step.trainer.optimizers):
            self._looks = False
            step.trainer.switch_hooks(self, "forge_forward", "forge_optimizer_step", on=False)
        if not self._looks:
            step.trainer.switch_hooks(self, "forge_step_end", on=False)

    @hookimpl(wrapper=True)
    def forge_evaluate(self, trainer: Run, stage: str) -> Generator[None, Any, Any]:
        """Look at the first evaluation of a fit, and then no more."""
        if not self._looks:
            trainer.switch_hooks(self, "forge_forward", on=True)
        self._finite = in_fit.FiniteWatch() if trainer.task.check_first_batch and trainer.env.is_main else None
        try:
            result = yield
            if self._finite is not None and self._finite.flags:
                with saying(trainer.said):
                    self._tell(trainer, [functools.partial(self._finite.found, stage)])
            return result
        finally:
            self._evaluates, self._finite = False, None
            off = ("forge_evaluate",) if self._looks else ("forge_evaluate", "forge_forward")
            trainer.switch_hooks(self, *off, on=False)

    def judge(self, step: Step) -> None:
        """Look at what the steps of an update did, and warn of what is found; later, if torch's profiler records it."""
        if profiler_enabled():
            return
        on_host = is_on_host(step.trainer)
        with saying(step.trainer.said):
            while self.waiting:
                look = self.waiting.pop(0)
                small = is_small(step.trainer, look.batch)
                if self._patient is None:
                    self._patient = self._judged(step, look, small)
                elif small and on_host:  # nothing after the first update waits for an accelerator
                    self._patient.losses.append(float(look.loss.detach()))
                if look.name == self._patient.names[0]:
                    self._patient.activity.append(look.activity)
                self._keep(look, self._patient, small and on_host and is_telling(look.batch), step.epoch)
            self._weigh(step, on_host)
            if self._patient is not None and len(self.done) == len(self._patient.names):
                self._tell(step.trainer, self._at_last(self._patient, on_host and self._reads))
                self._began = mean(self._patient.losses) if self._patient.names == [None] else None

    def _judged(self, step: Step, look: MicroBatchLook, small: bool) -> Observed:
        """Judge the first step, and return what the next looks add to."""
        patient = observed(step.trainer, look)
        patient.epoch = step.epoch
        own: list[Any] = [look.traces.found] if look.traces is not None else []
        self._tell(step.trainer, [*own, *(functools.partial(probe, patient) for probe in FIRST_STEP)])
        look.watch.settle()
        if not small:
            patient.batches.clear()
            look.watch.losses.clear()
        return patient

    def _keep(self, look: MicroBatchLook, patient: Observed, reads: bool, epoch: int) -> None:
        """Keep of a look what the last judgement needs."""
        if reads:
            self._reads = True
            # the next epoch serves the same samples again: they are no copies
            if not patient.in_memory and look.name == patient.names[0] and epoch == patient.epoch:
                if all(x is not y for x in tensors(look.batch)[:1] for y in self._served):  # a list may hold one often
                    patient.samples.extend(rows(look.batch))
                self._served += tensors(look.batch)[:1]

    def _evaluated(self, step: Step, batch: Any) -> Generator[None, Any, Any]:
        """Look at the first batch of the first evaluation."""
        trainer, task = step.trainer, step.trainer.task
        if not self._evaluates or why_not(step):
            output = yield
            self._add_finite(batch, output)
            return output
        self._evaluates = False
        traces, watch = graph.Traces(task, batch, "val", cheaply=True), StepWatch(batch_size(batch))
        with saying(trainer.said):
            with watch, graph.awake_layers(task) as awake:
                output = yield
            self._add_finite(batch, output)
            seen = [traces.found] if attempt(traces.look_again) else []
            modes = functools.partial(graph.on_in_validation, awake)
            self._tell(step.trainer, [*seen, modes, lambda: losses.mixed_up(watch), lambda: self._compared(batch)])
        return output

    def _add_finite(self, batch: Any, output: Any) -> None:
        watch = self._finite
        if watch is not None:
            attempt(lambda: watch.add(batch, output))

    def _compared(self, batch: Any) -> Iterator[Finding]:
        """Compare the first batch of val with the samples that the fit has seen."""
        patient = self._patient
        if patient is not None and patient.samples and not patient.val_samples and is_small(patient.trainer, batch):
            patient.val_samples = rows(batch)
            yield from data.splits(patient)

    def _weigh(self, step: Step, on_host: bool) -> None:
        """Note by how much this update changed the weights since the last."""
        index, before = self._weights
        patient = self._patient
        if patient is None or not on_host or not patient.batches or index == step.index:
            return
        now = copied(step.trainer.task)
        if step.index == index + 1:
            patient.note_motion(before, now)
            patient.updates = step.index + 1
        self._weights = (step.index, now)

    def _at_last(self, patient: Observed, reads: bool) -> Iterator[Any]:
        graphs = self._graphs
        if graphs is not None:
            yield graphs.unregistered
            yield lambda: graphs.unreached(graph.trained(patient))
        if reads:
            patient.note(gradient_sizes=self._gradients)
            for probe in FIRST_UPDATES:
                yield functools.partial(probe, patient)
            self._weights = (-1, {})

    def _tell(self, trainer: Run, probes: Any) -> None:
        """Run probes, and warn of what they find. A probe must not fail."""
        found = list[Finding]()
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            for probe in probes:
                try:
                    found.extend(probe())
                except Unseen:
                    continue
                except Exception as error:
                    logger.debug("A probe of the first steps failed: %s: %s", type(error).__name__, error)
        for finding in found:
            if finding.level != "note":
                warn_of(type(trainer.task).training_step, as_warning(finding), finding.name)


def has_loss(output: Any) -> bool:
    """Whether a step returned a loss; the check of what it returned says so where it did not."""
    return not isinstance(output, Mapping) or "loss" in output


def attempt(look: Callable[[], Any]) -> bool:
    """Look at something of the user's that may be of any kind; return whether that was possible. A look must not fail
    the run."""
    try:
        look()
    except Exception as error:
        logger.debug("A look at the first steps failed: %s: %s", type(error).__name__, error)
        return False
    return True


def as_warning(finding: Finding) -> str:
    place = f" ({finding.where})" if ":" in finding.where else ""
    return f"{finding.message}{place} {finding.cure} [{finding.name}]"


def why_not(step: Step) -> str:
    """Why the steps cannot be looked at; "" if they can."""
    trainer = step.trainer
    if not trainer.task.check_first_batch:
        return "check_first_batch is False"
    if is_compiled(trainer.model):
        return "the model is compiled"
    if is_captured(trainer):
        return "the step is captured as a CUDA graph"
    if any(isinstance(p, UninitializedParameter) for p in trainer.task.parameters()):
        return LAZY
    if any(type(p.data) is not Tensor for p in trainer.task.parameters()):
        return "the weights are sharded"
    if trainer.resumed_from:
        return "the run goes on from a checkpoint"
    return "" if trainer.env.is_main else "another rank looks"


def is_captured(trainer: Run) -> bool:
    return trainer.env.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_small(trainer: Run, batch: Any) -> bool:
    """Whether copies cost nothing to speak of; on an accelerator memory is short."""
    limit = SMALL if is_on_host(trainer) else SMALL // 10
    weights = sum(p.numel() for p in trainer.task.parameters())
    return weights <= limit and sum(x.numel() for x in tensors(batch)) <= limit


def is_on_host(trainer: Run) -> bool:
    """Whether values can be read at any time, without waiting for a device."""
    return trainer.env.device.type == "cpu"


def is_telling(batch: Any) -> bool:
    """Whether a batch has enough samples to judge modules and data by."""
    return (batch_size(batch) or 0) >= FEWEST


def observed(trainer: Run, look: MicroBatchLook) -> Observed:
    """The patient whose first step this was."""
    train = trainer.given_loaders.get("train")
    kept = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, look.batch)
    patient = Observed(trainer.task, trainer, train, trainer.given_loaders.get("val"), [kept], [])
    patient.plugins = list(trainer.stack)
    patient.headroom = start.headroom(trainer, reads=False)
    patient.losses.append(float(look.loss.detach()))
    patient.note(watched=look.watch, first_input=look.first_input, activity=[])
    patient.samples = samples(train)
    patient.in_memory = bool(patient.samples)
    patient.val_samples = samples(patient.val) if patient.in_memory else []
    return patient


def samples(loader: Any) -> list[tuple[Tensor, ...]]:
    """The samples of tensors in memory, as the sampler orders them; of other datasets none: reading may change them."""
    loader = next(iter(loader.values()), None) if isinstance(loader, dict) else loader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return []
    dataset, places = loader.dataset, None
    while type(dataset) is Subset:
        places = list(dataset.indices) if places is None else [dataset.indices[i] for i in places]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return []
    order = torch.arange(len(dataset)) if places is None else torch.as_tensor(places)
    if type(loader.sampler) is not SequentialSampler:
        order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
    order = order[:SAMPLES]
    return list(zip(*(x[order.to(x.device)].cpu().unbind() for x in dataset.tensors), strict=True))
