"""Tensor parallelism."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, parallel

import forge
from forge.contract.task import Build
from forge.errors import ForgeError, RecipeError, TaskError
from forge.optim.sharded import is_distributed, whole
from forge.rng import seed_all
from forge.util.patterns import MANY, chosen, listed
from forge_plugins.tensor_parallel.whole_shapes import fails_divided

logger = logging.getLogger("forge")

Kind = Literal["column", "row", "gather", "sequence", "replicate"]
AXIS = "tensor"
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
APPLIED = "_distribute_module_applied"
"""Attribute by which torch marks a divided module, to refuse a second time."""
CUT: dict[tuple[type[nn.Module], Kind], str] = {
    (nn.Linear, "column"): "out_features",
    (nn.Linear, "gather"): "out_features",
    (nn.Linear, "row"): "in_features",
    (nn.Embedding, "gather"): "embedding_dim",
}
"""The size of a layer that is divided."""
PARTED = {kind for _, kind in CUT}


class TensorParallel(forge.Plugin):
    """Divide layers among ranks that train on the same samples: for layers too large, or too slow, for one rank.

    It works together with `fsdp` or `pipeline`, on a mesh of both: `size` neighbouring ranks share each layer, ideally
    within one host, and the other axes divide batches, weights, blocks and sequences. Weights, checkpoints and random
    numbers are those of a single process; ranks that share layers draw the same numbers.

    `plan` assigns a style to layers, by class or by pattern of module names. `column` divides a Linear by its outputs:
    each rank gets its part of the hidden size. `row` divides the Linear after it by its inputs, and sums over the
    ranks. `gather` is a column whose outputs are gathered again, for a head with many classes, or for an Embedding. A
    block's MLP is a column and a row; in its attention the layers for queries, keys and values are columns, each a
    separate layer, and the output layer is a row. Heads are divided, so a block must not hard-code their number: write
    `q.view(batch, length, -1, head_size)`; else the block is named, with its line. With `sequence`, for a norm or a
    dropout between row and column, each rank computes a part of the positions, which are dimension `sequence_dim`; with
    `replicate` all ranks compute the same. Other layers stay unchanged, which is right where every rank has the whole
    input. Dropout between a column and its row draws the same numbers in every part.

    A pattern without a match, and a size that does not divide a layer, are refused.

    ::

        forge fit quickstart --nproc 2 -p fsdp -p tensor_parallel "tensor_parallel.plan={net.1: column, net.4: row}"
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        size: int | None = None
        "Number of ranks that share each layer; null: `tensor` of trainer.mesh, else 2."
        plan: dict[str, Kind] = field(default_factory=dict)
        "Style of layers: column, row, gather, sequence or replicate, by class or pattern of names."
        sequence_dim: int = 1
        "For sequence: the dimension of a layer's input that holds the positions."

    config: Config
    provides = ("tensor_parallel", "split_layers")
    cures = {"divided": "{name}.plan"}
    axes = {"tensor": "matrices"}
    before = ("strategy",)

    def __init__(self, *first: int, **values: Any):
        super().__init__(*first, **values)
        self._size = 2 if self.config.size is None else self.config.size
        if self._size < 2:
            raise RecipeError(f"tensor_parallel.size is {self.config.size}; it must be at least 2.")
        if not self.config.plan:
            raise RecipeError(
                "tensor_parallel.plan is empty. Name the layers to divide, for example "
                '"tensor_parallel.plan={blocks.*.fc1: column, blocks.*.fc2: row}".'
            )
        if self.config.sequence_dim < 0:
            raise RecipeError(f"tensor_parallel.sequence_dim is {self.config.sequence_dim}; it must be at least 0.")
        self._undo: list[Callable[[], None]] = []
        self._divided: dict[nn.Module, Kind] = {}
        self._failed = False

    # -- a run --------------------------------------------------------------------------------------------------------

    @forge.hookimpl
    def forge_configure(self, trainer: forge.Run) -> None:
        trainer.mesh_axes[AXIS] = 0 if trainer.mesh and self.config.size is None else self._size

    @forge.hookimpl
    def forge_build_model(self, trainer: forge.Run, build: Build, phase: str) -> None:
        if phase != "shard":
            return
        self._undo, self._failed = [], False
        mesh = trainer.env.mesh
        assert mesh is not None
        self._size = mesh[AXIS].size()
        planned = self._planned(build.task)
        self._divided = dict(planned.values())
        if not any(tensor.is_meta for tensor in (*build.task.parameters(), *build.task.buffers())):
            trainer.env.copy_from_first(build.task)  # the weights of a norm are assumed equal
        for module, kind in planned.values():
            self._divide(module, kind, mesh[AXIS])
        kinds = {kind: [name for name, (_, k) in planned.items() if k == kind] for _, kind in planned.values()}
        shown = "; ".join(f"{kind}: {listed(names, MANY)}" for kind, names in kinds.items())
        logger.info("tensor_parallel: %d ranks share each of these layers. %s.", self._size, shown)

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        """Seed ranks that share layers equally, so that their dropout agrees."""
        if trainer.seed is None and trainer.env.world > 1:
            seeds = trainer.env.gather(torch.initial_seed())
            seed_all(seeds[trainer.env.rank - trainer.env.rank % self._size])

    @forge.hookimpl(wrapper=True)
    def forge_forward(self, step: forge.Step) -> Generator[None, Any, Any]:
        """Name a module that writes down a size that is divided."""
        try:
            return (yield)
        except ForgeError:
            raise
        except Exception as error:
            found = fails_divided(step.trainer.task, self._divided, error)
            if found is None:
                raise
            inner = [name for name, module in found.module.named_modules() if self._divided.get(module, "") in PARTED]
            raise TaskError(
                f"tensor_parallel: {found.name} runs with whole layers, and fails with 1/{self._size} of "
                f"{listed(inner, MANY)}: {str(error).rstrip('.')}. At {found.place} it counts on a whole one, often on "
                f"the number of heads: {found.line}\nWrite -1 in that place, as in q.view(batch, length, -1, "
                "head_size), or leave these layers out of tensor_parallel.plan."
            ) from error

    @forge.hookimpl
    def forge_exception(self) -> None:
        self._failed = True

    @forge.hookimpl
    def forge_end(self) -> None:
        """Give back whole layers, where the strategy, which has ended by now, has not done so."""
        for undo in self._undo:
            undo()
        made: dict[int, nn.Parameter] = {}
        for inner in [inner for module in self._divided for inner in module.modules() if not self._failed]:
            for name, part in inner._parameters.items():
                if is_distributed(part) and part.device_mesh.mesh_dim_names == (AXIS,):
                    made.setdefault(id(part), nn.Parameter(whole(part), requires_grad=part.requires_grad))
                    inner._parameters[name] = made[id(part)]
        self._undo, self._divided = [], {}

    # -- layers -------------------------------------------------------------------------------------------------------

    def _planned(self, task: nn.Module) -> dict[str, tuple[nn.Module, Kind]]:
        """Return the style of each module; refuse what cannot be divided."""
        planned: dict[str, tuple[nn.Module, Kind]] = {}
        for pattern, kind in self.config.plan.items():
            for name, module in chosen(task, [pattern], "tensor_parallel.plan").items():
                if planned.get(name, (module, kind))[1] != kind:
                    raise RecipeError(f"tensor_parallel.plan: {name} is given both {planned[name][1]} and {kind}.")
                self._refuse_undividable(name, module, kind)
                planned[name] = module, kind
        return planned

    def _refuse_undividable(self, name: str, module: nn.Module, kind: Kind) -> None:
        if kind in ("sequence", "replicate"):
            if kind == "sequence" and next(module.children(), None) is not None:
                raise RecipeError(
                    f"tensor_parallel.plan: {name} is a {type(module).__name__} with layers in it; sequence is for "
                    "layers that compute each position independently, such as a LayerNorm."
                )
            return
        dimension = next((cut for (layer, k), cut in CUT.items() if k == kind and isinstance(module, layer)), None)
        if dimension is None:
            raise RecipeError(
                f"tensor_parallel.plan: {name} is a {type(module).__name__}; column, row and gather divide nn.Linear, "
                "and gather nn.Embedding. Name such layers."
            )
        size = getattr(module, dimension)
        if size % self._size:
            raise RecipeError(
                f"tensor_parallel.plan: {name} has {dimension}={size}, which {self._size} ranks "
                f"(tensor_parallel.size) cannot divide evenly. Choose a multiple of {self._size}."
            )

    def _divide(self, module: nn.Module, kind: Kind, mesh: DeviceMesh) -> None:
        hooks = {name: set(getattr(module, name)) for name in HOOKS}
        trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        for style in self._styles(kind):
            parallel.parallelize_module(module, mesh, style)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(trained[name])  # torch makes new parameters, all of them trained

        def undo() -> None:
            for name, before in hooks.items():
                for key in getattr(module, name).keys() - before:
                    del getattr(module, name)[key]
            for inner in module.modules():
                vars(inner).pop(APPLIED, None)

        self._undo.append(undo)

    def _styles(self, kind: Kind) -> list[parallel.ParallelStyle]:
        """Return torch's styles, one inside the other; between layers all tensors are plain."""
        whole, dim = Replicate(), self.config.sequence_dim
        if kind in ("column", "gather"):
            return [parallel.ColwiseParallel(output_layouts=whole if kind == "gather" else None)]
        if kind == "row":
            return [parallel.RowwiseParallel()]
        inner = parallel.SequenceParallel(sequence_dim=dim) if kind == "sequence" else ReplicatedLayer()
        layout = Shard(dim) if kind == "sequence" else whole
        return [
            parallel.PrepareModuleInput(input_layouts=whole, desired_input_layouts=layout),
            inner,
            parallel.PrepareModuleOutput(output_layouts=layout, desired_output_layouts=whole),
        ]


class ReplicatedLayer(parallel.ParallelStyle):
    """A layer that every rank holds completely."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from torch.distributed.tensor import distribute_module

        return distribute_module(module, device_mesh)
