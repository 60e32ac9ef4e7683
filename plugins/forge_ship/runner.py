"""A process that loads one exported file and computes outputs for another process, over a pipe.

Frames are a length in 8 bytes and a safetensors file. A first frame of length 0 says that the file was loaded; the
marker 2**63 stands before an error's text. An answer is two frames: the structure of what the program returned as JSON,
and its tensors. Nothing of the trained task is imported here; libraries whose operators the program uses are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from forge import registry
from forge.errors import ForgeError
from forge_ship.engine import ExportError, Port
from forge_ship.export_formats import module_of
from forge_ship.operators import import_libraries
from forge_ship.structure import flat, structure_of

ERROR = 2**63
PROGRAM = "import sys; from forge_ship.runner import main; main(sys.argv[1:])"


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
        names = [port.name for port in inputs]
        words = [
            sys.executable,
            "-c",
            PROGRAM,
            format,
            str(file),
            device,
            str(torch.get_num_threads()),
            ",".join(libraries),
        ]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [*words, *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        try:
            self._answer()
        except BaseException:
            self.close()
            raise

    def __call__(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = {f"{at:03d}": inputs[port.name].detach().cpu().contiguous() for at, port in enumerate(self.inputs)}
        self._ask(save(flat))
        self.returned = json.loads(self._answer())
        found = load(self._answer())
        return {port.name: found[f"{at:03d}"] for at, port in enumerate(self.outputs)}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a file that holds weights alone."""
        self._ask(b"")
        return load(self._answer())

    def _ask(self, body: bytes) -> None:
        try:
            _send(self._stdin, body)
        except BrokenPipeError as error:
            raise self._ended() from error

    def _ended(self) -> ExportError:
        """Explain with the last lines that the process wrote."""
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()[-3:]
        return ExportError("\n".join([f"The process that ran the export ended with the code {code}.", *said]))

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _answer(self) -> bytes:
        assert self._process.stdout is not None
        length = int.from_bytes(self._process.stdout.read(8), "little")
        if length >= ERROR:
            raise ExportError(self._process.stdout.read(length - ERROR).decode(errors="replace"))
        body = self._process.stdout.read(length)
        if self._process.poll() is not None or len(body) < length:
            raise self._ended()
        return body

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._process.kill()
        self._process.wait()
        self._said.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _send(stream: IO[bytes], body: bytes) -> None:
    stream.write(len(body).to_bytes(8, "little") + body)
    stream.flush()


def main(words: Sequence[str]) -> None:
    """Serve the file of `FORMAT FILE DEVICE THREADS LIBRARIES NAME...`."""
    format, file, device, threads, libraries, *names = words
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes to stderr
    torch.set_num_threads(int(threads))
    try:
        import_libraries(libraries.split(","))
        module: Any = module_of(format)
        weights_only = getattr(module, "WEIGHTS_ONLY", False)
        name = Path(file).name
        with registry.blamed("format", format, f"open {name}"):
            run = module.read_file if weights_only else module.open_file(Path(file), names, device)
        _send(out, b"")
        while head := sys.stdin.buffer.read(8):
            body = sys.stdin.buffer.read(int.from_bytes(head, "little"))
            if weights_only:
                with registry.blamed("format", format, f"read {name}"):
                    found = {key: tensor.contiguous().clone() for key, tensor in run(Path(file)).items()}
                _send(out, save(found))
                continue
            inputs = [tensor.to(device) for _, tensor in sorted(load(body).items())]
            with registry.blamed("format", format, f"run {name}"):
                returned = run(inputs)
            _send(out, json.dumps(structure_of(returned)).encode())
            _send(out, save({f"{at:03d}": each.cpu().contiguous() for at, each in enumerate(flat(returned))}))
    except Exception as error:
        told = isinstance(error, ForgeError)
        text = (str(error) if told else f"{type(error).__name__}: {error}").encode()
        out.write((ERROR + len(text)).to_bytes(8, "little") + text)
        out.flush()
