"""Which files are not the user's code: torch, forge and the packages beside it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import forge

PLUGINS = Path(__file__).resolve().parent
PACKAGES = [Path(str(package.__file__)).resolve().parent for package in (torch, forge)]
PACKAGES += [PLUGINS, PLUGINS.with_name("forge_kernels"), PLUGINS.with_name("forge_lightning")]
NOT_THE_USERS = (*(f"{package}{os.sep}" for package in PACKAGES), "<")
"""The beginnings of such file names; "<" is that of code without a file."""
