"""A place of its own for each package: a virtual environment chained to this one, so that torch is not installed twice.

pip sees the packages of this environment as installed, and adds what is missing. Where a package asks for other
versions than torch's here, it is installed with `--no-deps`, and what it needs is named beside it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HOME = Path(os.environ.get("FORGE_LIGHTNING_PLACES", Path.home() / ".cache/forge/lightning_modules"))
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Package:
    """What pip is asked for."""

    name: str
    needs: tuple[str, ...] = ()
    "Installed with its dependencies, before the package."
    alone: bool = False
    "Whether the package itself is installed without its dependencies."

    @property
    def title(self) -> str:
        """The distribution's name."""
        return re.split(r"[\[=<>~]", self.name)[0]

    def version(self) -> str:
        """Return the installed version; empty if there is none."""
        key = self.title.lower().replace("-", "_")
        folders = self.place.glob("lib/python*/site-packages/*.dist-info")
        found = [f.name.removesuffix(".dist-info") for f in folders if f.name.lower().replace("-", "_").startswith(key)]
        return found[0].rpartition("-")[2] if found else ""

    @property
    def place(self) -> Path:
        key = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        return HOME / f"{self.title}-{key}"

    def install(self) -> Path:
        """Return the place's interpreter, after installing what is not there yet."""
        python, mark = self.place / "bin/python", self.place / "installed"
        if mark.exists():
            return python
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--clear", self.place], check=True)
        folder = self.place / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        chained = [str(ROOT), *(f"{ROOT}/{room}" for room in ("plugins", "recipes")), *_site_packages()]
        (folder / "chain.pth").write_text("\n".join(chained))
        if self.needs:
            self._pip(python, *self.needs)
        self._pip(python, *(["--no-deps"] if self.alone else []), self.name)
        mark.touch()
        return python

    def _pip(self, python: Path, *arguments: str) -> None:
        constraints = self.place / "constraints.txt"
        constraints.write_text(_pins())
        command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "-c", constraints, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"pip install {' '.join(arguments)}: {done.stderr.strip()[-600:]}")


def _site_packages() -> list[str]:
    own = sysconfig.get_paths()["purelib"]
    return [own, *(path for path in sys.path if path.endswith("site-packages") and path != own)]


def _pins() -> str:
    """torch, Lightning and torchmetrics as they are here: both Trainers, and every package, use the same."""
    from importlib.metadata import version

    names = ("torch", "torchvision", "lightning", "pytorch-lightning", "torchmetrics")
    return "".join(f"{name}=={version(name)}\n" for name in names)
