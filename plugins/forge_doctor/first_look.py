"""The plugin `first_look`: watch the first updates of a fit as they run, and warn of what the probes find in them."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
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
from forge.snapshot.copies import without_hooks
from forge.torch_internals import profiler_enabled, pytree
from forge_doctor import beside, in_fit
from forge_doctor.experiments import equivariance, influence, lossy, motion, reachable, reading, stages, values
from forge_doctor.findings import Finding
from forge_doctor.outside import step_reaches_outside
from forge_doctor.patient import Patient, copied, like, loss_of, no_trace, rows, tensors
from forge_doctor.probes import aliases, class_labels, data, graph, losses, measures, serving, start
from forge_doctor.stalled import StallWatch
from forge_doctor.watch import StepWatch

if TYPE_CHECKING:
    from forge.contract.run import Run
    from forge.contract.step import Step

logger = logging.getLogger("forge")

LOOKS = 4
"""Micro-batches of each optimizer that are looked at."""
SMALL = 3_000_000
"""Numbers in a task's weights, and in a batch, up to which modules run again on a copy."""
FEWEST = 12
"""Samples of a batch by which modules and data are judged."""
LAZY = "layers get their sizes from this batch"
SAMPLES = 2000
"""Samples of a dataset in memory that are looked at."""
MOST_NOTES = 3
"""Notes that a run in a script shows at its end."""


FIRST_STEP = (
    *(losses.inputs, losses.weights, start.layers, start.optimizer),
    *(start.schedules, start.methods, data.dropped),
    *(aliases.attributes, aliases.shared_storage),
    *(losses.options, aliases.repeated, measures.modes, measures.validation),
    in_fit.class_targets,
)
"""Probes of the first step and of the plan."""
STEP_AGAIN = (
    *(
        lossy.steps,
        equivariance.samples,
        equivariance.cropped,
        influence.weights,
        influence.unread,
        influence.inputs,
        reading.leads,
        reading.errors,
    ),
    *(reading.endless, reachable.bounds, equivariance.answers_seen, influence.slices, values.in_step, values.layout),
)
"""Experiments that run the step again, on a copy."""
VALIDATION_AGAIN = (*(stages.drawn, lossy.steps, reachable.metrics, equivariance.samples, stages.best_at_first),)
"""Experiments that run the validation step again, on a copy."""
SECONDS = 1.0
"""Of the processor, that experiments of the first update, and of the first validation, may take."""
FIRST_UPDATES = (
    *(start.equal_rows, start.activations, losses.reduction, motion.rates, motion.losses),
    *(data.copies, data.scales, data.targets, data.splits),
    *(class_labels.labels, serving.noise, motion.gradients),
    *(values.unseen, values.giveaway),
)
"""Probes after a few updates, and of the samples up to there."""


class Unseen(Exception):
    """A probe asks for a step that the fit has not made."""


class Observed(Patient):
    """A patient whose first step is that of its fit. `twin`: a copy of a small task, on which steps may run."""

    reads = False
    twin: TaskModule | None = None
    in_memory: bool
    "Whether the samples are those of tensors in memory, rather than of the first batches."
    epoch: int = 0
    "The epoch of the first step, of which the samples are."

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self.twin is None:
            raise Unseen
        return super().run(*args, **kwargs)

    def clone(self) -> TaskModule:
        """Return a copy without the hooks of others: they would count its runs."""
        if self.twin is None:
            raise Unseen
        twin = copy.deepcopy(self.twin)
        twin.trainer = self.trainer
        return twin

    def take_twin(self) -> None:
        """Copy the task as it is now, where its step reaches nothing outside."""
        if not step_reaches_outside(self.task, "training_step", "validation_step", "evaluation_end"):
            with suppress(Exception):  # it holds a graph, or what cannot be copied
                self.twin = like(without_hooks(self.task), self.task)

    def drop_twin(self) -> None:
        self.twin = None
        self.held.clear()


@dataclass
class Look:
    """What was noted while a micro-batch ran forward."""

    name: str | None
    batch: Any
    loss: Tensor
    watch: StepWatch
    traces: graph.Traces | None


class FirstLook(Plugin):
    """Look at the first updates of a fit, and warn of mistakes that raise no error.

    The calls, the graph, the batch and the weights of the fit's own steps are looked at, and judged once an update is
    over. The steps of a small task run a few more times, on a copy without anybody's hooks, with every generator
    restored. After the first updates, and the first batch of the first validation, nothing is
    left of it but a thread: it says once where a single process is that has long made no progress, in a step or in its
    data. `forge doctor` looks at more, and takes longer::

        forge fit quickstart -p first_look
        forge fit quickstart -p first_look first_look.stalled=600
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        stalled: float = 60.0
        "Seconds without an update, far more than any took, after which the main thread's stack is shown. 0: never."
        beside: bool = True
        "Whether the doctor examines a copy of this process while the run goes on, and the run tells what it finds."

    config: Config
    observer = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._stall: StallWatch | None = None
        self._beside: beside.Beside | None = None
        self._notes: list[Finding] = []
        self._begin()

    def _begin(self) -> None:
        self.done: set[str | None] = set()
        "Optimizers whose micro-batches need no more looks."
        self.waiting: list[Look] = []
        self._counts: dict[str | None, int] = {}
        self._patient: Observed | None = None
        self._weights: tuple[int, dict[str, Tensor]] = (-1, {})
        self._reads = False
        self._served: list[Tensor] = []
        "The first tensor of each batch whose samples were kept; they are small, and on the host."
        self._graphs: graph.Graphs | None = None
        self._looks = self._evaluates = False
        self._finite: in_fit.FiniteWatch | None = None
        self._holdings, self._updates = in_fit.Holdings(), 0

    @hookimpl
    def forge_configure(self, trainer: Run) -> None:
        """Have the doctor examine a copy of this process, before anything of this run is made."""
        self._end_examination()
        if trainer.verb == "fit" and self.config.beside:
            reason = beside.why_not(trainer)
            if not reason:
                self._beside = beside.Beside(trainer, functools.partial(self._told, trainer))
            logger.debug("The doctor does not look on: %s.", reason)

    def _told(self, trainer: Run, finding: Finding) -> None:
        """Log what was found beside the run; in a thread, where a filter of the main one could swallow a warning."""
        if finding.level == "note":
            logger.info("Worth a look: %s", as_warning(finding))
            self._notes += [] if logger.isEnabledFor(logging.INFO) else [finding]
        elif finding.name not in trainer.said:
            trainer.said.add(finding.name)
            logger.warning("%s", as_warning(finding), extra={"finding": finding.name})

    def _end_examination(self) -> None:
        if self._beside is not None:
            self._beside.end()
            self._beside = None
        for note in self._notes[:MOST_NOTES]:  # in a script nobody has asked for the log
            print(f"Worth a look: {as_warning(note)}", file=sys.stderr)
        self._notes.clear()

    @hookimpl
    def forge_start(self, trainer: Run) -> None:
        self._begin()
        self._looks = self._evaluates = trainer.verb == "fit"
        if not self._looks:
            trainer.switch_hooks(self, "forge_forward", "forge_step_end", "forge_evaluate", on=False)
        elif self.config.stalled > 0 and trainer.env.world == 1:
            self._stall = StallWatch(trainer, self.config.stalled)

    @hookimpl
    def forge_end(self) -> None:
        self._end_examination()
        if self._stall is not None:
            self._stall.stop()
            self._stall = None

    def due(self, step: Step) -> bool:
        return self._looks

    @hookimpl(wrapper=True)
    def forge_forward(self, step: Step, batch: Any) -> Generator[None, Any, Any]:
        """Note what a forward does; in one function, to add one frame to it."""
        if step.stage != "train":
            return (yield from self._evaluated(step, batch))
        if step.name in self.done or not step.recording or self._is_left_out(step):
            return (yield)
        trainer, task = step.trainer, step.trainer.task
        is_first = self._patient is None and not self.waiting
        with saying(trainer.said):
            graphs = self._graphs = self._graphs or graph.Graphs(task)
            small = is_small(trainer, batch)
            traces = graph.Traces(task, batch, cheaply=True) if is_first else None
            watch = StepWatch(batch_size(batch))
            with ExitStack() as looks:
                looks.enter_context(graphs.watching())
                if is_first:
                    looks.enter_context(watch)
                output = yield
            loss = loss_of(output)
            if isinstance(loss, Tensor) and loss.requires_grad:  # otherwise the check of the output says so
                attempt(lambda: graphs.add(loss, batch))
                if traces is not None and not attempt(traces.look_again):
                    traces = None
                self.waiting.append(Look(step.name, batch, loss, watch, traces))
                if not small:  # its scores may be the largest tensors of the step
                    self.judge(step)
            return output

    def _is_left_out(self, step: Step) -> bool:
        """Count a micro-batch, and return whether it is not looked at."""
        count = self._counts[step.name] = self._counts.get(step.name, 0) + 1
        reason = why_not(step)
        if count == LOOKS or (reason and reason != LAZY):
            self.done.add(step.name)
        if reason:
            logger.debug("The first look at the steps is left out: %s.", reason)
        return bool(reason)

    @hookimpl
    def forge_step_end(self, step: Step) -> None:
        if self.waiting:
            self.judge(step)
        if self._looks and not self.waiting and self.done >= set(step.trainer.optimizers):
            self._looks = False
            step.trainer.switch_hooks(self, "forge_forward", on=False)
        self._count(step)

    def _count(self, step: Step) -> None:
        """Look at what the task holds after some updates, and then no more."""
        task = step.trainer.task
        self._updates += 1
        if self._updates in in_fit.LOOKS and task.check_first_batch and step.trainer.env.is_main:
            attempt(lambda: self._holdings.look(task))
            if self._updates == in_fit.LOOKS[-1]:
                with saying(step.trainer.said):
                    self._tell(step.trainer, [lambda: self._holdings.found(task)], draws=False)
        if self._updates >= in_fit.LOOKS[-1] and not self._looks:
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
                    self._tell(trainer, [functools.partial(self._finite.found, stage)], draws=False)
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
                self._keep(look, self._patient, small and on_host and is_telling(look.batch), step.epoch)
            self._weigh(step, on_host)
            if self._patient is not None and len(self.done) == len(self._patient.names):
                self._tell(step.trainer, self._at_last(self._patient, on_host and self._reads), draws=on_host)

    def _judged(self, step: Step, look: Look, small: bool) -> Observed:
        """Judge the first step, and return what the next looks add to."""
        with no_trace(step.trainer.env.device):
            patient = observed(step.trainer, look)
            patient.epoch = step.epoch
        own: list[Any] = [look.traces.found] if look.traces is not None else []
        self._tell(step.trainer, [*own, *(functools.partial(probe, patient) for probe in FIRST_STEP)])
        if small and is_on_host(step.trainer) and is_telling(look.batch):
            self._tell(step.trainer, self._experiments(patient, STEP_AGAIN))
        look.watch.settle()
        if not small:
            patient.batches.clear()
            look.watch.losses.clear()
        return patient

    def _experiments(self, patient: Observed, experiments: Any) -> Iterator[Any]:
        """Experiments on a copy of the task, one after another while there is time."""
        patient.take_twin()
        began = time.process_time()
        for experiment in experiments:
            if patient.twin is not None and time.process_time() - began < SECONDS:
                yield functools.partial(experiment, patient)
        patient.drop_twin()

    def _keep(self, look: Look, patient: Observed, reads: bool, epoch: int) -> None:
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
            if is_small(trainer, batch) and is_on_host(trainer) and is_telling(batch):
                kept = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, batch)
                patient = Observed(task, trainer, None, None, [kept], [kept])
                self._tell(step.trainer, self._experiments(patient, VALIDATION_AGAIN))
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
            patient.take_twin()
            for probe in FIRST_UPDATES:
                yield functools.partial(probe, patient)
            self._weights = (-1, {})
            patient.drop_twin()

    def _tell(self, trainer: Run, probes: Any, draws: bool = True) -> None:
        """Run probes, and warn of what they find. A probe must not fail. `draws`: they may draw random numbers."""
        found = list[Finding]()
        with no_trace(trainer.env.device) if draws else nullcontext():
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
    if trainer.env.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the step is captured as a CUDA graph"
    if any(isinstance(p, UninitializedParameter) for p in trainer.task.parameters()):
        return LAZY
    if any(type(p.data) is not Tensor for p in trainer.task.parameters()):
        return "the weights are sharded"
    if trainer.resumed_from:
        return "the run goes on from a checkpoint"
    return "" if trainer.env.is_main else "another rank looks"


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


def observed(trainer: Run, look: Look) -> Observed:
    """The patient whose first step this was."""
    train = trainer.given_loaders.get("train")
    kept = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, look.batch)
    patient = Observed(trainer.task, trainer, train, trainer.given_loaders.get("val"), [kept], [])
    patient.plugins = list(trainer.stack)
    patient.headroom = start.headroom(trainer)
    patient.losses.append(float(look.loss.detach()))
    vars(patient)["watched"] = look.watch
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
