"""What to write instead: cures for the errors that torch raises in a step, with the numbers of this run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from forge import registry
from forge.contract.run import Run
from forge.diagnose.again import backward_line, forward_line
from forge.diagnose.scene import Scene, scene_of
from forge.torch_internals import BatchNorm
from forge.util.oom import is_out_of_memory

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LONGER = {2: "(N, C, L)", 3: "(N, C, L)", 4: "(N, C, H, W)", 5: "(N, C, D, H, W)"}
"""Names of dimensions, by their number."""


def cures(trainer: Run, error: BaseException) -> Iterator[str]:
    """Yield what met where, and what to do about it; nothing for errors that torch did not raise."""
    said, scene = str(error), scene_of(trainer.task, error)
    if isinstance(error, RuntimeError) and "backward through the graph a second time" in said:
        yield _second_backward(trainer)
    elif isinstance(error, RuntimeError) and "modified by an inplace operation" in said:
        yield _in_place(trainer, error)
    elif isinstance(error, NotImplementedError) and 'is missing the required "forward"' in said:
        default = " or predict_step(self, batch), which calls it by default," if trainer.verb == "predict" else ""
        yield f"self(...) calls forward: define forward(self, x),{default} in {type(trainer.task).__name__}."
    if scene is not None and scene.met:
        scene.device = trainer.env.device.type
        yield f"{scene}."
        yield from _cure(scene, said)
    if is_out_of_memory(error):
        yield from _memory(trainer, error)


def _cure(scene: Scene, said: str) -> Iterator[str]:
    """Yield the cure for what torch said, if there is one."""
    for symptom, cure in CURES:
        if found := re.search(symptom, said):
            if advice := cure(scene, found):
                yield advice
            return


def _no_tensor(scene: Scene, found: re.Match[str]) -> str:
    return (
        f"A step gets its batch as the loader gives it, and this is a {found[1]}. Make it a tensor in the dataset, or "
        "in the step: torch.as_tensor(x).to(self.trainer.env.device). A torch DataLoader makes tensors of arrays."
    )


# -- shapes -----------------------------------------------------------------------------------------------------------


def _features(scene: Scene, found: re.Match[str]) -> str:
    """A Linear, or a product of matrices, whose sizes differ."""
    wanted, value = getattr(scene.module, "in_features", None), scene.of("input")
    if wanted is None or value is None:
        return "The last size of the left one must be the first of the right one: transpose one of them with .mT."
    if value[0].numel() == wanted and value.ndim > 2:
        return f"One sample has {wanted} values: flatten it before {scene.name}, with x.flatten(1) or nn.Flatten()."
    return (
        f"{scene.name} takes {wanted} features, but its input has {value.shape[-1]}. Set in_features={value.shape[-1]} "
        "there (nn.LazyLinear finds the number by itself), or change what comes before it."
    )


def _channels(scene: Scene, found: re.Match[str]) -> str:
    wanted, got = int(found[1]), int(found[2])
    value = scene.of("input")
    if value is not None and value.ndim > 2 and value.shape[-1] == wanted:
        return f"The {wanted} channels are the last dimension of the input: write x.movedim(-1, 1) before {scene.name}."
    if value is not None and value.ndim == 3 and value.shape[0] != wanted and wanted == 1:
        return f"The dimension of the channel is missing: write x.unsqueeze(1) before {scene.name}."
    return (
        f"{scene.name} takes {wanted} channels, but its input has {got}. Set in_channels={got} there, or change what "
        "comes before it."
    )


def _dimensions(scene: Scene, found: re.Match[str]) -> str:
    """A layer for images or sequences that got fewer or more dimensions."""
    value = scene.of("input")
    wanted = max(int(number) for number in re.findall(r"(\d)D", found[0]))
    if value is None:
        return ""
    form = LONGER.get(wanted, f"of {wanted} dimensions")
    if isinstance(scene.module, nn.RNNBase):
        form = "(N, L, features)" if scene.module.batch_first else "(L, N, features)"
    advice = f"{scene.name or 'It'} takes an input {form}, but got {tuple(value.shape)}."
    if isinstance(scene.module, BatchNorm) and value.ndim == 2:
        return f"{advice} For features (N, C) use nn.BatchNorm1d."
    if value.ndim == wanted - 1:
        return f"{advice} If the channel is missing, write x.unsqueeze(1)."
    return f"{advice} Was it flattened too early, or viewed in another shape?"


def _last_size(attribute: str) -> Callable[[Scene, re.Match[str]], str]:
    """A layer whose size of the last dimension is an option of its own."""

    def cure(scene: Scene, found: re.Match[str]) -> str:
        value, wanted = scene.of("input", "query"), getattr(scene.module, attribute, None)
        if value is None or wanted is None:
            return ""
        return (
            f"{scene.name} was made with {attribute}={wanted}, but the last dimension of its input is "
            f"{value.shape[-1]}. Make the two equal."
        )

    return cure


def _broadcast(scene: Scene, found: re.Match[str]) -> str:
    return (
        f"Sizes {found[1]} and {found[2]} meet in dimension {found[3]}: sizes must be equal, or 1. Look for a missing "
        "unsqueeze, a transposed tensor, or two batches of different size."
    )


def _same_shape(scene: Scene, found: re.Match[str]) -> str:
    value, target = scene.of("input"), scene.of("target")
    if value is None or target is None:
        return ""
    if value.ndim == target.ndim + 1 and value.shape[-1] == 1:
        return "Remove the last dimension of the predictions: output.squeeze(-1). The targets must be floats."
    return "This loss compares value by value, so both must have one shape."


def _batches(scene: Scene, found: re.Match[str]) -> str:
    return "Both must have the same number of samples: was one of them viewed, or flattened over the batch?"


# -- values -----------------------------------------------------------------------------------------------------------


def _labels(scene: Scene, found: re.Match[str]) -> str:
    """Labels that are no class of the output."""
    output, target = scene.of("input", "output"), scene.of("target")
    if output is None or target is None:
        return ""
    classes = output.shape[1] if output.ndim > 1 else output.shape[0]
    advice = f"The labels of this batch are {_range(target)}, but the model has {classes} outputs (labels 0 to "
    advice += f"{classes - 1}). Give the last layer as many outputs as there are classes, or renumber the labels from 0"
    return f"{advice}; labels to leave out are passed as ignore_index=... to the loss."


def _ids(scene: Scene, found: re.Match[str]) -> str:
    """Indices that an embedding has no row for."""
    rows, ids = getattr(scene.module, "num_embeddings", None), scene.of("input")
    if rows is None or ids is None:
        return ""
    return (
        f"{scene.name} has {rows} rows (ids 0 to {rows - 1}), but the ids of this batch are {_range(ids)}. Set "
        f"num_embeddings={max(int(ids.max()) + 1, rows)} or more (the size of the vocabulary, with special tokens), or "
        "map unknown ids to one of their own."
    )


def _range(values: Tensor) -> str:
    return f"{int(values.min())} to {int(values.max())}" if values.numel() else "none"


# -- types and devices ------------------------------------------------------------------------------------------------


def _types(scene: Scene, found: re.Match[str]) -> str:
    """Two tensors whose types differ."""
    by_type: dict[torch.dtype, list[str]] = {}
    for name, tensor in scene.met.items():
        by_type.setdefault(tensor.dtype, []).append(name)
    if torch.float64 in by_type:
        wide = by_type[torch.float64]
        return (
            f"{_listed(wide)} {_are(wide)} float64, which is what numpy makes. Write "
            ".float() in the dataset: torch.from_numpy(array).float(), or array.astype('float32')."
        )
    whole = [name for dtype, names in by_type.items() if dtype not in FLOATS for name in names]
    if whole and len(by_type) > 1:
        return f"{_listed(whole)} {_are(whole)} no floats: write .float() (for bytes of images: .float() / 255)."
    if len(by_type) > 1:
        kinds = "; ".join(f"{_listed(names)}: {str(dtype)[6:]}" for dtype, names in by_type.items())
        chosen = registry.advice("dtypes", ", or let {} choose types")
        return f"Types differ ({kinds}). Convert one with .to(other.dtype){chosen}."
    return ""


def _whole_labels(scene: Scene, found: re.Match[str]) -> str:
    return "Labels of classes must be whole numbers: write labels.long()."


def _devices(scene: Scene, found: re.Match[str]) -> str:
    """Tensors on different devices."""
    stray = {name: tensor for name, tensor in scene.met.items() if tensor.device.type != scene.device}
    where = next((str(tensor.device) for tensor in stray.values()), "")
    who = f"{_listed([*stray])} {_are([*stray])} on {where}, but this run is on {scene.device}. " if stray else ""
    return (
        f"{who}forge moves the task and its batches to the device. Make tensors of a step there too: "
        "torch.zeros(n, device=x.device); keep constants with self.register_buffer(name, tensor), and layers in an "
        "nn.ModuleList rather than a list."
    )


def _listed(names: list[str]) -> str:
    return " and ".join(names)


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _one_value(scene: Scene, found: re.Match[str]) -> str:
    return ""  # explained by its own hint, beside the shapes


CURES: list[tuple[str, Callable[[Scene, re.Match[str]], str]]] = [
    (r"must be Tensor, not ([\w.]+)", _no_tensor),
    (r"mat1 and mat2 must have the same dtype|expected m1 and m2 to have the same dtype", _types),
    (r"expected scalar type Long but found|not implemented for 'Int'|expected target .* Long", _whole_labels),
    (r"expected scalar type|type .* and (bias|weight) type|Found dtype|same dtype|can't be cast to|Input type", _types),
    (r"on the same device|not on the expected device|same device", _devices),
    (r"shapes cannot be multiplied|size mismatch, got|must match the size of mat|batch1 and batch2", _features),
    (r"to have (\d+) channels, but got (\d+) channels", _channels),
    (r"[Ee]xpected .*?\dD.*?(input|got).*", _dimensions),
    (r"input.size\(-1\) must be equal to input_size", _last_size("input_size")),
    (r"expecting embedding dimension", _last_size("embed_dim")),
    (r"Given normalized_shape", _last_size("normalized_shape")),
    (r"size of tensor a \((\d+)\) must match .* tensor b \((\d+)\) at .*dimension (\d+)", _broadcast),
    (r"Target size .* must be the same as input size|Using a target size", _same_shape),
    (r"Expected input batch_size", _batches),
    (r"Target -?\d+ is out of bounds|Class values must be", _labels),
    (r"index out of range in self", _ids),
    (r"more than 1 value per channel", _one_value),
]
"""What torch says, and the cure; the first that fits."""


# -- the backward pass ------------------------------------------------------------------------------------------------


def _second_backward(trainer: Run) -> str:
    line = backward_line(trainer)
    if line:
        return f"{line} calls backward() inside of the step. Leave it out and return the loss: forge calls backward."
    return (
        "A tensor of an earlier update is used again, with its graph. Detach what is kept from one step to the next, "
        "such as the state of an RNN: self.state = state.detach()."
    )


def _in_place(trainer: Run, error: BaseException) -> str:
    line = forward_line(trainer, error)
    place = f"The value that was overwritten belongs to the operation at {line}. " if line else ""
    return (
        f"{place}After it an in-place operation (x += y, x[i] = y, relu_(), inplace=True) changed that value, which "
        "backward needs. Write x = x + y, or clone first: x = x.clone()."
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def _memory(trainer: Run, error: BaseException) -> Iterator[str]:
    step, training = trainer.step, trainer.verb == "fit"
    samples = step.samples // max(len(step.window), 1) if step is not None and training else 0
    now = f" with {samples} samples in a micro-batch" if samples else ""
    ways = ["a smaller batch (`forge tune batch` finds the largest that fits)"]
    if training:
        window = 2 * len(step.window) if step is not None else 2
        ways += registry.cures("batch", window=window)
    for problem in ("memory", "activations") if training else ("memory",):
        ways += registry.cures(problem, beside=trainer.stack)
    yield f"The memory of {trainer.env.device} is full{now}. What helps: {'; '.join(ways)}."
