"""Expert parallelism."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import forge
from forge.contract.task import Build
from forge.distributed.shards import Place, places_of
from forge.errors import RecipeError, TaskError
from forge.optim.optimizers import Optimizers
from forge.optim.sharded import is_distributed, local, sum_gradients, whole
from forge.util.patterns import MANY, as_list, chosen, listed
from forge_cluster.expert_parallel.calls import ExpertCalls
from forge_cluster.expert_parallel.routing import Ranks

logger = logging.getLogger("forge")

AXIS = "expert"


class ExpertParallel(forge.Plugin):
    """Divide the experts of a mixture among ranks: for experts that do not fit, with their optimizer state, on one.

    Each rank holds 1/n of the experts of every layer, with their gradients and optimizer state, and has samples of its
    own. A token travels to the ranks of the experts that it chose, and back, by all-to-all. All else is as without the
    plugin: `ddp` copies and averages it over all ranks, `fsdp` divides it among the ranks that divide experts too. With
    more ranks than `size`, groups of `size` neighbours have all experts each, and average the gradients of equal ones.

    `modules` names the modules that hold experts, by class or by pattern of names. Such a module is called as
    `experts(tokens, chosen, weights)`: a row for each token, the numbers of the experts that it chose, and as many
    weights. It returns the sum of what they make of the token. Each of its parameters has one row for each expert. A
    module that writes down how many there are reads `self.num_experts`, which is the number on this rank meanwhile. The
    models of transformers 5 are written so (`*.experts`, as in Mixtral): nothing of them is changed. Experts that are
    modules in a list become one module with stacked parameters.

    The first call of each such module is computed twice, divided and with all experts, on up to 64 tokens. A module
    that mixes tokens, or knows other numbers, is refused there. `check=false` leaves it out, for layers of experts that
    do not fit on one rank.

    What you see: `experts/most` and `experts/least`, the tokens of the busiest and the idlest expert of any layer, in
    parts of the mean: 1 is even. No token is dropped. Checkpoints are complete, and continue with any other strategy,
    number of ranks, or one process.

    Together with: `accumulate`, `clip`, `ema`, `amp` in bf16, `remat`, `guard`, `sam` and `schedule` work as with the
    strategy; with `fsdp` also `tensor_parallel`, for layers outside of experts. `compile` leaves compiled code at each
    layer of experts. Refused: `zero`, `pipeline`, `context_parallel`, a loss scaler (fp16) and `cuda_graph`.

    ::

        forge fit shakespeare_char_cpu --nproc 2 -p ddp -p expert_parallel task.experts=4 trainer.max_updates=50
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        modules: str | list[str] = "*.experts"
        "Modules that hold experts: classes or patterns of names."
        size: int | None = None
        "Ranks that divide the experts of a layer; null: `expert` of trainer.mesh, else all."
        check: bool = True
        "Compare the first call of each module with all experts on one rank."
        gather: bool = True
        "Gather all experts into the task at the end, on every rank; false: keep each rank's part."

    config: Config
    provides = ("expert_parallel",)
    axes = {"expert": "samples experts"}
    before = ("strategy",)
    charts = {"experts/tokens of an expert, in parts of the mean": r"experts/(most|least)"}
    conflicts = {
        "context_parallel": "The nearest meshes are data x expert: use -p ddp -p expert_parallel; or data x context: "
        "use -p ddp -p context_parallel.",
        "grad_scaler": "Use amp.dtype=bf16, which needs none.",
        "step_capture": "Remove cuda_graph: the number of tokens that each rank gets is read on the host.",
    }

    def __init__(self, *first: str | list[str], **values: Any):
        super().__init__(*first, **values)
        config = self.config
        if config.size is not None and config.size < 2:
            raise RecipeError(f"expert_parallel.size is {config.size}; it must be at least 2, or null for all ranks.")
        if not as_list(config.modules):
            raise RecipeError('expert_parallel.modules is empty. Name the modules with experts, as in "*.experts".')
        self._begin()

    def _begin(self) -> None:
        """Reset the state of one run."""
        self._calls: dict[str, ExpertCalls] = {}
        self._own: list[tuple[nn.Parameter, list[Place]]] = []
        "The task's parameters, emptied, with all places of each."
        self._failed = False

    # -- build --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        from forge.distributed.rank_info import RankInfo

        self._begin()
        trainer.mesh_axes[AXIS] = (self.config.size or 0) if RankInfo.read().world > 1 else 1

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        if phase != "shard":
            return
        env: Any = trainer.env
        mesh = env.mesh[AXIS]
        ranks = Ranks(mesh.get_group() if mesh.size() > 1 else None, mesh.size(), mesh.get_local_rank())
        compiled = any("compiled_code" in plugin.provides for plugin in trainer.stack)
        found = chosen(build.task, as_list(self.config.modules), "expert_parallel.modules")
        for name, module in found.items():
            count = _number_of_experts(name, module, ranks.size)
            check = trainer if self.config.check and ranks.size > 1 else None
            self._calls[name] = call = ExpertCalls(name, module, count, ranks, check)
            call.install(compiled)
            if ranks.size > 1:
                self._divide(trainer, module, mesh)
        counts = sorted({call.count for call in self._calls.values()})
        text = "expert_parallel: %s with %s experts; each rank holds 1/%d of them."
        logger.info(text, listed(found, MANY), " or ".join(map(str, counts)), ranks.size)

    def _divide(self, trainer: forge.Run, module: nn.Module, mesh: Any) -> None:
        """Replace parameters by this rank's part of them."""
        if not any(parameter.is_meta for parameter in module.parameters()):
            trainer.env.copy_from_first(module)
        for parameter, places in places_of(module).values():
            held = len(parameter) // mesh.size()
            part = parameter.detach()[held * mesh.get_local_rank() :][:held].clone()
            divided = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]), requires_grad=parameter.requires_grad)
            vars(divided).update(vars(parameter))  # keep custom attributes of a parameter
            parameter.data = parameter.data.new_empty(0)
            for owner, name in places:
                owner[name] = divided
            self._own.append((parameter, places))

    @forge.hookimpl(wrapper=True)
    def forge_build_optimizers(self) -> Generator[None, Optimizers, Optimizers]:
        """Step parameters one by one, where one kernel would get parts of some and others whole: torch refuses that."""
        built = yield
        for group in [group for optimizer in built.values() for group in optimizer.param_groups]:
            kinds = {p.device_mesh if is_distributed(p) else None for p in group["params"]}
            for option in [each for each in ("fused", "foreach") if len(kinds) > 1 and group.get(each)]:
                logger.info("expert_parallel: the optimizer runs with %s=false, as some parameters are parts.", option)
                group[option] = False
        return built

    # -- a step -------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_finalize_grads(self, step: forge.Step) -> None:
        """Average the gradients of experts: each is the sum over the ranks that divide them."""
        env: Any = step.trainer.env
        others = [axis for axis in env.mean_axes if axis != AXIS]
        copies = env.along(others) if others else None
        used = [call for call in self._calls.values() if call.loads]
        for parameter in [p for call in used for p in call.module.parameters() if call.ranks.size > 1]:
            if parameter.requires_grad and copies is not None and copies.size() > 1:
                sum_gradients([parameter], copies.get_group(), 1 / env.mean_world)
            elif parameter.requires_grad and parameter.grad is not None:
                local(parameter.grad).mul_(1 / env.mean_world)
        if used:
            self._record(step, used)

    def _record(self, step: forge.Step, used: list[ExpertCalls]) -> None:
        """Log how evenly tokens were divided, over all ranks."""
        chosen = [torch.stack(call.loads).sum(0) for call in used]
        for call in used:
            call.loads.clear()
        if not step.recording:
            return
        by_layer = step.trainer.env.sum(torch.cat(chosen)).split([*map(len, chosen)])
        parts = [(each.max() / each.float().mean(), each.min() / each.float().mean()) for each in by_layer]
        most, least = (torch.stack(column) for column in zip(*parts, strict=True))
        step.record("experts/most", most.max())
        step.record("experts/least", least.min())

    # -- the end ------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self) -> None:
        """Give back all experts on every rank, if asked to; after an error other ranks may not answer."""
        for call in self._calls.values():
            call.remove()
        for parameter, places in self._own if self.config.gather and not self._failed else ():
            owner, name = places[0]
            part: Any = owner[name]
            values = whole(part)
            own = nn.Parameter(values) if parameter.is_meta else parameter
            own.data = values
            own.requires_grad_(part.requires_grad)
            for owner, name in places:
                owner[name] = own
        self._begin()


def _number_of_experts(name: str, module: nn.Module, ranks: int) -> int:
    """Return the number of experts in a module; refuse parameters that do not have a row for each."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    shapes = {key: tuple(parameter.shape) for key, parameter in named.items()}
    counts = {shape[:1] for shape in shapes.values()}
    if len(counts) != 1 or () in counts:
        shown = ", ".join(f"{key} {shape}" for key, shape in shapes.items()) or "none"
        raise TaskError(
            f"expert_parallel.modules: every parameter of {name} ({type(module).__name__}) must have one row for each "
            f"expert; its parameters are {shown}. Name the module that holds only experts, as one tensor for each "
            "layer of theirs; experts in a list become one module with stacked parameters."
        )
    ((count,),) = counts
    if count % ranks:
        raise RecipeError(
            f"expert_parallel: {name} has {count} experts, which {ranks} ranks cannot divide evenly. Choose "
            f"expert_parallel.size, or `expert` of trainer.mesh, so that it divides {count}."
        )
    return count
