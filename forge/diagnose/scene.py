"""Where torch raised an error: the user's line, the module, and the tensors that met there."""

from __future__ import annotations

import dis
import inspect
import linecache
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor, nn

from forge.util.frames import folder_of
from forge.util.text import short_path
from forge.util.tracebacks import BETWEEN, is_users_frame, walk

KINDS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError)
"""Types of the errors that torch raises about tensors."""
RAISES = dis.opmap["RAISE_VARARGS"]
CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
OWN = ("weight", "weight_ih_l0")
"""Parameters of torch's modules that meet the input."""
NAMED = os.path.join(folder_of("torch"), "nn")
MANY = 6
"""Tensors that are named at most."""


@dataclass(slots=True)
class Scene:
    """What was going on when an error was raised."""

    line: str = ""
    "The innermost line of the user's, as file:line."
    name: str = ""
    'The dotted name in the task of the innermost module; "" is the task itself.'
    module: nn.Module | None = None
    met: dict[str, Tensor] = field(default_factory=dict)
    "The tensors that met, by the name of argument, variable or parameter."
    device: str = "cpu"
    "The kind of device that the run uses."

    def __str__(self) -> str:
        """Return the scene as one sentence."""
        what = ", ".join(f"{name} is {described(tensor)}" for name, tensor in list(self.met.items())[:MANY])
        place = [f"at {self.line}" if self.line else "", f"in {self.called}" if self.module is not None else ""]
        return f"{', '.join(filter(None, place))}: {what}"

    @property
    def called(self) -> str:
        """Return the module's name and how it was made."""
        made = repr(self.module)
        made = made if "\n" not in made and len(made) < 100 else type(self.module).__name__
        return f"{self.name} ({made})"

    def of(self, *names: str) -> Tensor | None:
        """Return the first of these tensors that was there."""
        return next((self.met[name] for name in names if name in self.met), None)


def scene_of(task: nn.Module, error: BaseException) -> Scene | None:
    """Return where torch raised an error; None for an error of the user's own, or of another library's."""
    entries = [entry for entry in walk(error.__traceback__) if entry.tb_frame.f_code.co_name not in BETWEEN]
    if not isinstance(error, KINDS) or not entries or not _is_torchs(entries[-1]):
        return None
    entries = _inside(entries)
    own = [i for i, entry in enumerate(entries) if is_users_frame(entry.tb_frame)]
    if not own:
        return None
    user = entries[own[-1]]
    scene = Scene(f"{short_path(user.tb_frame.f_code.co_filename)}:{user.tb_lineno}")
    behind = entries[own[-1] + 1 :]
    names = {id(part): name for name, part in task.named_modules() if name}
    for entry in entries:
        me = entry.tb_frame.f_locals.get("self")
        if id(me) in names:
            scene.name, scene.module = names[id(me)], me
    scene.met = dict(_met(scene.module, user, behind))
    return scene


def described(tensor: Tensor) -> str:
    """Return type, shape and device, as in "float32 (4, 8) on cpu"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"


def _inside(entries: list[TracebackType]) -> list[TracebackType]:
    """Return the entries that forge called last: those before only called the Trainer."""
    forges = [i for i, entry in enumerate(entries) if _file(entry.tb_frame).startswith(folder_of("forge"))]
    return entries[forges[-1] + 1 :] if forges else entries


def _is_torchs(entry: TracebackType) -> bool:
    """Whether torch raised the error: in a file of its own, or in C++, called by the user's line."""
    code = entry.tb_frame.f_code
    return code.co_filename.startswith(folder_of("torch")) or code.co_code[entry.tb_lasti] != RAISES


def _met(module: nn.Module | None, user: TracebackType, behind: list[TracebackType]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the innermost call whose arguments are known."""
    inside = [entry.tb_frame for entry in behind if entry.tb_frame.f_locals.get("self") is module is not None]
    forward = [frame for frame in inside if frame.f_code.co_name == "forward"]
    if forward:
        yield from _arguments(forward[-1])
        for name in OWN:
            if isinstance(own := getattr(module, name, None), Tensor):
                yield name, own
        return
    for entry in behind:  # a function of torch.nn: its arguments have names that users know
        found = list(_arguments(entry.tb_frame)) if _file(entry.tb_frame).startswith(NAMED) else []
        if found:
            yield from found
            return
    yield from _on_line(user)


def _arguments(frame: FrameType) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among the arguments of a call."""
    info = inspect.getargvalues(frame)
    for name in info.args:
        yield from _tensors(name, info.locals.get(name))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)) and len(value) <= MANY:
        for i, item in enumerate(value):
            if isinstance(item, Tensor):
                yield f"{name}[{i}]", item


def _on_line(entry: TracebackType) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the failing expression names."""
    local: Mapping[str, Any] = entry.tb_frame.f_locals
    for chain in dict.fromkeys(CHAIN.findall(_expression(entry))):
        root, *rest = chain.split(".")
        value, name = local.get(root), root
        for part in rest:
            if not isinstance(value, nn.Module):  # a property could run code
                break
            value, name = getattr(value, part, None), f"{name}.{part}"
        yield from _tensors(name, value)


def _expression(entry: TracebackType) -> str:
    """Return the source of the expression that failed, which may go over several lines; else the line."""
    code, file = entry.tb_frame.f_code, _file(entry.tb_frame)
    positions = list(code.co_positions())
    first, last, begin, end = positions[entry.tb_lasti // 2]
    if first is None or last is None:
        return linecache.getline(file, entry.tb_lineno)
    lines = [linecache.getline(file, number) for number in range(first, last + 1)]
    if begin is not None and end is not None and len(lines) == 1:
        return lines[0].encode()[begin:end].decode(errors="replace")
    return "".join(lines)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename
