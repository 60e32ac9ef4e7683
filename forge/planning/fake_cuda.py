"""Fake tensors that stand for those of a CUDA device, and need no such device."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from forge.torch_internals import fake_tensors, local_scalar

HOST, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # without an index, a torch built for the CPU looks for one
TORCH, HERE = str(Path(torch.__file__).parent), str(Path(__file__).parent)
aten = torch.ops.aten


class FakeCudaMode(fake_tensors.FakeTensorMode):
    """Fake tensors that are all on the host, also where CUDA was asked for.

    Fake tensors on CUDA can run forward without a GPU, but not backward: autograd looks for the device's threads.

    A plugin that reads a value gets 1, and two tensors compare as different: on the host some plugins read values that
    they would leave on a device, and their decisions (a norm to log, a BatchNorm that moves) change no size. A task
    gets an error, because its next steps cannot be known.
    """

    def __init__(self, plugins: Collection[str], between: str = ""):
        super().__init__(allow_non_fake_inputs=True)
        self.plugins, self.between = plugins, between
        "The top-level packages of the plugins, and the module of what hands operations on to this mode."

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs = {**kwargs, "device": HOST}
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except fake_tensors.DataDependentOutputException:
            if not self._asked_by_plugin():
                raise
            if func is local_scalar:
                return _one(args[0].dtype)
            if func is aten.equal.default:
                return False
            raise

    def _asked_by_plugin(self) -> bool:
        """Return whether the innermost frame outside torch belongs to a plugin."""
        frame = sys._getframe(1)
        while frame is not None and (
            frame.f_code.co_filename.startswith((TORCH, HERE)) or frame.f_globals.get("__name__") == self.between
        ):
            frame = frame.f_back
        return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in self.plugins


def _one(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
