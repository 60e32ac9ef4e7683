"""A process that loads one exported file and computes outputs for another process.

The two are connected by its standard input. The first message says what to load; each further one is the inputs, as a
safetensors file. An answer is two messages: JSON with the structure of what the program returned, or with an error, and
the tensors; of a file of weights alone there is one, with these. Nothing of the trained task is imported here;
libraries whose operators the program uses are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from forge import registry
from forge.errors import ForgeError
from forge_ship.engine import ExportError, Port
from forge_ship.export_formats import module_of
from forge_ship.operators import import_libraries
from forge_ship.structure import flat, structure_of

PROGRAM = "from forge_ship.runner import main; main()"


class Remote:
    """An engine in a fresh process that has loaded nothing but an exported file."""

    def __init__(
        self,
        format: str,
        file: Path,
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        device: str = "cpu",
        libraries: Sequence[str] = (),
    ):
        self.inputs, self.outputs = inputs, outputs
        self.returned: Any = None
        "The structure of what the program returned last."
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=theirs.fileno(),
            stdout=self._said,
            stderr=self._said,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        theirs.close()
        names = [port.name for port in inputs]
        job = [format, str(file), names, device, torch.get_num_threads(), [*libraries]]
        try:
            self.weights = self._ask(json.dumps(job).encode())
            "The tensors of a file that holds weights alone."
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Remote:
        return self

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = self._ask(save(_numbered([inputs[port.name].detach() for port in self.inputs])))
        return {port.name: found[number] for port, number in zip(self.outputs, sorted(found), strict=False)}

    def _ask(self, message: bytes) -> dict[str, Tensor]:
        try:
            self._connection.send_bytes(message)
            answer = json.loads(self._connection.recv_bytes())
            found = load(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            code = self._process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().splitlines()[-3:]
            ended = f"The process that ran the export ended with the code {code}."
            raise ExportError("\n".join([ended, *said])) from error
        if "error" in answer:
            raise ExportError(answer["error"])
        self.returned = answer.get("returned")
        return found

    def __exit__(self, *details: object) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._said.close()


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"{at:06d}": tensor.cpu().contiguous() for at, tensor in enumerate(tensors)}


def main() -> None:
    """Load and compute what the process asks for that started this one, until it ends this one."""
    connection = Connection(os.dup(0))

    def answer(returned: Any, tensors: Mapping[str, Tensor]) -> None:
        connection.send_bytes(json.dumps(returned).encode())
        connection.send_bytes(save(dict(tensors)))

    try:
        format, file, names, device, threads, libraries = json.loads(connection.recv_bytes())
        torch.set_num_threads(threads)
        import_libraries(libraries)
        module, path = module_of(format), Path(file)
        if getattr(module, "WEIGHTS_ONLY", False):
            with registry.blamed("format", format, f"read {path.name}"):
                answer({}, {key: tensor.contiguous().clone() for key, tensor in module.read_file(path).items()})
            return
        with registry.blamed("format", format, f"open {path.name}"):
            run = module.open_file(path, names, device)
        answer({}, {})
        while True:
            inputs = [tensor.to(device) for _, tensor in sorted(load(connection.recv_bytes()).items())]
            with registry.blamed("format", format, f"run {path.name}"):
                returned = run(inputs)
            answer({"returned": structure_of(returned)}, _numbered(flat(returned)))
    except Exception as error:
        told = isinstance(error, ForgeError)
        answer({"error": str(error) if told else f"{type(error).__name__}: {error}"}, {})
