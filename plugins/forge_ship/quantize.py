"""Quantise a model that is to be exported: weights, and where asked activations, in 8 bits.

torchao does the work. `int8-static` works on the exported graph (torchao.quantization.pt2e), with one scheme on every
machine: inputs and weights of linear layers and convolutions. The other kinds replace the weights of nn.Linear
(torchao's `quantize_`). A quantised model is made of plain tensors and of torch's
own operators: torchao is not needed where it runs.
"""

from __future__ import annotations

import copy
import importlib
import logging
import platform
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from forge_ship.engine import ExportError
from forge_ship.int8 import LARGEST, SMALLEST_SCALE, STEPS, activation_grid
from forge_ship.torch_internals import int_mm

KINDS = {
    "int8-dynamic": "Weights of linear layers in 8 bits; inputs too, each row by its own range. CPU and GPU.",
    "int8-static": "Weights and inputs of linear layers and convolutions in 8 bits; ranges are found on data, or are "
    "those that the plugin qat has learnt. CPU and GPU.",
    "int8-weights": "Weights of linear layers in 8 bits; computes in float. CPU and GPU.",
    "fp8": "Weights and inputs of linear layers in 8-bit floating point. GPU of compute capability 8.9 or more.",
}
"""The names of `--quantize`: what each does, and on which device."""

TRACED = "torch.jit.trace cannot record its graph. Use pt2, onnx or aoti, or int8-weights."
DOES_NOT_WORK = {
    ("fp8", "onnx"): "torch.onnx has no translation of torch's products in fp8. Use int8-weights.",
    ("int8-dynamic", "torchscript"): TRACED,
    ("int8-static", "torchscript"): TRACED,
    ("fp8", "torchscript"): TRACED,
    ("int8-dynamic", "executorch"): "ExecuTorch has no integer matrix product. Use int8-weights.",
    ("int8-static", "executorch"): "ExecuTorch has no kernel for the rounding of single layers. Use int8-weights.",
    ("fp8", "executorch"): "ExecuTorch does not run on a GPU. Use int8-weights.",
}
"""Why a kind cannot be exported to a format, and what to do instead."""

FEWEST_ROWS = 17
"Rows that CUDA's product of integers needs."
Inputs = tuple[Tensor, ...]
Ranges = Mapping[str, tuple[float, float]]
"""Least and largest input of layers, by the names of modules."""


def quantize(
    model: nn.Module,
    kind: str,
    examples: Sequence[Inputs],
    *,
    dynamic_shapes: Any = None,
    device: str | torch.device = "cpu",
    ranges: Ranges | None = None,
) -> nn.Module:
    """Return a quantised copy of a model in evaluation mode that takes `*inputs`; the model itself stays as it is.

    `examples` are inputs from real data. The one with the largest batch shapes the graph (at least 2 where the batch is
    dynamic), and `int8-static` finds ranges on all of them. With `ranges`, those that the plugin qat has learnt, by
    names of `model`'s modules, exactly these layers are quantised, and nothing is calibrated. The result goes through
    torch.export with the same `dynamic_shapes`. Raises ExportError with the reason that `refusal` gives.
    """
    device = torch.device(device)
    reason = refusal(kind, model, device)
    if reason is not None:
        raise ExportError(reason)
    if not examples:
        raise ExportError(f"--quantize {kind} needs examples of inputs, and there are none.")
    model = copy.deepcopy(model).eval().to(device)
    inputs = sorted((tuple(tensor.to(device) for tensor in example) for example in examples), key=_size, reverse=True)
    with torch.no_grad(), quiet():
        if kind == "int8-static":
            return QuantizedGraph(_static(model, inputs, dynamic_shapes, ranges))
        _replace_weights(model, kind, device)
        return model if kind.endswith("weights") else _without_torchao(model, inputs[0], dynamic_shapes, device)


def refusal(kind: str, model: nn.Module, device: str | torch.device = "cpu", to: str | None = None) -> str | None:
    """Say why a model cannot be quantised so, for this device and this format, and what to do; None where it can."""
    if kind not in KINDS:
        return f"--quantize {kind} is unknown. Known are {', '.join(KINDS)}."
    if to is not None and (kind, to) in DOES_NOT_WORK:
        return f"--quantize {kind} does not work with --to {to}: {DOES_NOT_WORK[kind, to]}"
    device = torch.device(device)
    return _refused_device(kind, device) or _refused_model(kind, model, device)


def ranges_of(state: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[float, float]]:
    """Return the ranges in the state of the plugin qat in a checkpoint; `prefix` is the task's name in the model.

    A layer that no training batch reached has none.
    """
    found = {name: [float(number) for number in saved] for name, saved in state["ranges"].items()}
    return {prefix + name: (low, high) for name, (low, high, count) in found.items() if count}


def weight_bytes(model: nn.Module | ExportedProgram) -> int:
    """Count the bytes of parameters, saved buffers and constants as they are stored: an int8 number is one byte."""
    if isinstance(model, ExportedProgram):
        tensors = [*model.state_dict.values(), *model.constants.values()]
    else:
        tensors = [*model.state_dict(keep_vars=True).values()]
    unique = {id(tensor): tensor for tensor in tensors if isinstance(tensor, Tensor)}
    return sum(tensor.nbytes for tensor in unique.values())


def _size(example: Inputs) -> int:
    return max((len(tensor) for tensor in example if tensor.dim()), default=0)


class QuantizedGraph(nn.Module):
    """A graph that takes any number of tensors; it has no modes, so train() and eval() change nothing."""

    def __init__(self, graph: nn.Module):
        super().__init__()
        self.quantized = graph
        self.training = False

    def forward(self, *inputs: Tensor) -> Any:
        return self.quantized(*inputs)

    def train(self, mode: bool = True) -> QuantizedGraph:
        return self


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be quantised


def _refused_device(kind: str, device: torch.device) -> str | None:
    if kind == "fp8":
        found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        if found is None or found < (8, 9):
            has = f"is {device}" if found is None else f"has {found[0]}.{found[1]}"
            return f"--quantize fp8 needs a GPU of compute capability 8.9 or more; the device {has}. Use int8-weights."
    return None


def _refused_model(kind: str, model: nn.Module, device: torch.device) -> str | None:
    """Refuse a model in which nothing would be quantised; of int8-static the graph says it."""
    if kind == "int8-static" or linears(model, kind, device):
        return None
    sizes = " and multiples of 16 inputs and outputs" if kind == "fp8" else ""
    return (
        f"--quantize {kind} would change nothing: the model has no nn.Linear with a weight of its own{sizes}. "
        "int8-static takes convolutions too."
    )


def linears(model: nn.Module, kind: str, device: torch.device) -> dict[str, nn.Linear]:
    """Return the linear layers that a kind quantises, by name.

    A weight that is used elsewhere too, as by an embedding, would be stored twice: it stays in float.
    """
    uses = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)  # MultiheadAttention reads it
        and uses[id(layer.weight)] == 1
        and _fits(layer, kind, device)
    }


def _fits(layer: nn.Linear, kind: str, device: torch.device) -> bool:
    """Whether the kernels of a kind take a layer of this size."""
    inner, outer = (16, 16) if kind == "fp8" else (1, 1)
    if kind == "int8-dynamic" and device.type == "cuda":
        inner, outer = 8, 8
    return layer.in_features % inner == 0 and layer.out_features % outer == 0


# ---------------------------------------------------------------------------------------------------------------------
# Weights replaced in the model


def _replace_weights(model: nn.Module, kind: str, device: torch.device) -> None:
    """Replace weights by quantised ones, in place."""
    torchao = _torchao("torchao.quantization")
    layers = [*linears(model, kind, device).values()]
    chosen = set(map(id, layers))
    config = _config(kind, layers[0].weight.dtype)
    torchao.quantize_(model, config, filter_fn=lambda module, name: id(module) in chosen)
    _torchao("torchao.utils").unwrap_tensor_subclass(model)


def _config(kind: str, dtype: torch.dtype) -> Any:
    torchao = _torchao("torchao.quantization")
    if kind == "int8-dynamic":
        return torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    if kind == "int8-weights":
        return torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    # torchao scales rows of bfloat16 weights alone
    scales = torchao.PerRow() if dtype == torch.bfloat16 else torchao.PerTensor()
    return torchao.Float8DynamicActivationFloat8WeightConfig(granularity=scales, set_inductor_config=False)


def _without_torchao(model: nn.Module, example: Inputs, dynamic_shapes: Any, device: torch.device) -> nn.Module:
    """Return the model's graph with torchao's own operators written out in torch's."""
    from forge_ship.torch_internals import decompositions  # torchao registers its own there

    program = torch.export.export(model, example, dynamic_shapes=dynamic_shapes)
    own = {node.target for node in program.graph.nodes if str(node.target).startswith("torchao.")}
    written: Any = program.run_decompositions({operator: decompositions[operator] for operator in own})
    graph = written.module(check_guards=False)
    if device.type == "cuda":
        _pad_rows(graph)
    return QuantizedGraph(graph)


def _pad_rows(graph: GraphModule) -> None:
    """Give each product of integers rows of zeros, and cut them off its result: CUDA's takes no fewer than 17 rows."""
    aten = torch.ops.aten
    for node in [*graph.graph.nodes]:
        if node.target not in (int_mm, torch.ops.higher_order.out_dtype):
            continue
        x = node.args[-2]
        with graph.graph.inserting_before(node):
            padded = graph.graph.call_function(aten.constant_pad_nd.default, (x, [0, 0, 0, FEWEST_ROWS]))
        node.args = (*node.args[:-2], padded, node.args[-1])
        with graph.graph.inserting_after(node):
            cut = graph.graph.call_function(aten.slice.Tensor, (node, 0, 0, -FEWEST_ROWS))
        node.replace_all_uses_with(cut, lambda user, cut=cut: user is not cut)
    graph.recompile()


# ---------------------------------------------------------------------------------------------------------------------
# Weights and inputs, in the graph


def _static(model: nn.Module, inputs: list[Inputs], dynamic_shapes: Any, ranges: Ranges | None) -> nn.Module:
    pt2e = _torchao("torchao.quantization.pt2e.quantize_pt2e")
    program: Any = torch.export.export(model, inputs[0], dynamic_shapes=dynamic_shapes)
    scheme = InputsAndWeights(ranges)
    prepared = pt2e.prepare_pt2e(program.module(check_guards=False), scheme)
    for example in inputs if ranges is None else inputs[:1]:  # weights are observed in a forward too
        prepared(*example)
    graph = pt2e.convert_pt2e(prepared)
    _drop_unused(graph)
    return graph


class InputsAndWeights:
    """A quantizer for torchao's pt2e: inputs and weights of linear layers and convolutions, and nothing else.

    The values are the same everywhere. Inputs are stored as uint8 on x86, whose kernels want it, else as int8.
    """

    def __init__(self, ranges: Ranges | None):
        aten = torch.ops.aten
        plain = (aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
        padded = (aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
        self.operators: dict[Any, tuple[int, int, int]] = dict.fromkeys((*plain, *padded), (0, 1, 0))
        "Positions of input and weight among the arguments, and the weight's axis of output channels."
        self.operators[aten.addmm.default] = (1, 2, 1)
        self.ranges = ranges
        self.dtype, self.least = (torch.uint8, 0) if platform.machine() == "x86_64" else (torch.int8, -128)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        torchao = _torchao("torchao.quantization.pt2e.quantizer.quantizer")
        found = 0
        for node in model.graph.nodes:
            if node.target in self.operators and self._is_chosen(node):
                given, weight, axis = self.operators[node.target]
                specs = {node.args[given]: self._input_spec(node), node.args[weight]: self._weight_spec(axis)}
                node.meta["quantization_annotation"] = torchao.QuantizationAnnotation(specs, _annotated=True)
                found += 1
        if not found:
            raise ExportError(
                "--quantize int8-static would change nothing: the model has no linear layer and no convolution with a "
                f"weight of its own{'' if self.ranges is None else ' that the plugin qat has a range of'}."
            )
        return model

    def validate(self, model: GraphModule) -> None:
        pass

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: Any) -> None:
        pass

    def _is_chosen(self, node: Node) -> bool:
        x, parameter = (node.args[i] for i in self.operators[node.target][:2])
        assert isinstance(x, Node)
        assert isinstance(parameter, Node)
        is_own = parameter.op == "get_attr" and len(parameter.users) == 1
        return is_own and x.meta["val"].is_floating_point() and (self.ranges is None or layer_of(node) in self.ranges)

    def _input_spec(self, node: Node) -> Any:
        torchao = _torchao("torchao.quantization.pt2e.quantizer.quantizer")
        grid = {"dtype": self.dtype, "quant_min": self.least, "quant_max": self.least + STEPS}
        grid["qscheme"] = torch.per_tensor_affine
        if self.ranges is None:
            observer = _input_range().with_args(eps=SMALLEST_SCALE)
            return torchao.QuantizationSpec(observer_or_fake_quant_ctr=observer, **grid)
        scale, zero = activation_grid(*torch.tensor(self.ranges[layer_of(node)]).unbind())
        return torchao.FixedQParamsQuantizationSpec(scale=scale.item(), zero_point=int(zero) + self.least, **grid)

    def _weight_spec(self, axis: int) -> Any:
        observer = _torchao("torchao.quantization.pt2e").PerChannelMinMaxObserver.with_args(eps=SMALLEST_SCALE)
        return _torchao("torchao.quantization.pt2e.quantizer.quantizer").QuantizationSpec(
            dtype=torch.int8,
            quant_min=-LARGEST,
            quant_max=LARGEST,
            qscheme=torch.per_channel_symmetric,
            ch_axis=axis,
            observer_or_fake_quant_ctr=observer,
        )


def _input_range() -> Any:
    """Return torchao's observer of ranges, for inputs of any floating point type: CUDA counts float32 alone."""
    observer: Any = _torchao("torchao.quantization.pt2e").HistogramObserver

    class InputRange(observer):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x.float())
            return x

    return InputRange


def layer_of(node: Node) -> str:
    """Return the name of the module whose forward made a node."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return [*stack.values()][-1][0]


def onnx_translations() -> dict[Any, Any]:
    """Return the `custom_translation_table` with which torch.onnx exports int8-dynamic models."""
    opset = importlib.import_module("onnxscript").opset18
    return {int_mm: lambda self, mat2: opset.MatMulInteger(self, mat2)}


def in_torchs_operators(program: ExportedProgram) -> ExportedProgram:
    """Return the program of an int8-static model with rounding written out: pt2 and torchscript need this.

    The graph rounds by `quantized_decomposed` operators, which ONNX, AOTInductor and ExecuTorch know, but which a fresh
    process has only after an import. Other programs are returned as they are.
    """
    from forge_ship.torch_internals import quantized_decomposed

    own = {node.target for node in program.graph.nodes if str(node.target).startswith("quantized_decomposed.")}
    return program.run_decompositions({op: getattr(quantized_decomposed, op._opname) for op in own}) if own else program


def _drop_unused(graph: GraphModule) -> None:
    """Remove the float weights that nothing reads any more: they would be stored beside the integers."""
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [*graph.state_dict(keep_vars=True)]:
        if name not in used:
            around, _, last = name.rpartition(".")
            delattr(graph.get_submodule(around), last)


# ---------------------------------------------------------------------------------------------------------------------
# torchao


def _torchao(module: str) -> Any:
    """Import a part of torchao."""
    try:
        with quiet():
            return importlib.import_module(module)
    except ImportError as error:
        raise ExportError(
            f"--quantize needs the package torchao, which cannot be imported ({error}). "
            "Install it: pip install 'forge-trainer[export]'"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings for authors of torchao: deprecations that a user can do nothing about."""
    pytree = logging.getLogger("torch.utils._pytree")
    level = pytree.level
    pytree.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        pytree.setLevel(level)
