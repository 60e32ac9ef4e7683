"""One small run of each recipe that trains, cut halfway: its folder is kept, and how it ended when nothing cut it.

    python -m tests.truth.kept_recipes      # records them all, with the code at hand

Recorded by commit b61ff5f6, before the house was made smaller. Do not record newer code to make a test pass: that would
make a loss the truth. `resnet18` and `finetune` are not here: their eleven million weights are too large to keep.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import forge
from forge import cli
from tests.support.small_data import SONNET, write_images, write_small_data

FOLDER = Path(__file__).resolve().parent / "kept_recipes"
TOLERANCE = 2e-3
"""float32 over a few updates, on another processor."""
NEEDS = {"hf_text": ("transformers",), "dqn": ("gymnasium",), "ppo": ("gymnasium",)}
UPDATES, CUT = 6, 3
COMMON = (
    *("trainer.device=cpu", f"trainer.max_updates={UPDATES}", "trainer.log_every=2", "checkpoint.keep=1"),
    *("-p", "no:tensorboard", "-p", "no:progress"),
)
DIGITS = ("task.name=digits_mlp", "task.hidden=4", "task.dropout=0.0", "data.name=digits", "data.batch_size=256")
RECIPES: dict[str, tuple[str, ...]] = {
    "quickstart": ("task.hidden=4", "data.batch_size=256"),
    "debug": ("trainer.seed=3", *DIGITS),
    "frugal": ("trainer.seed=3", *DIGITS),
    "mlp": ("task.hidden=4", "data.samples=1024"),
    "fashion_mlp": ("task.hidden=4", "task.dropout=0.0"),
    "fashion_cnn": ("task.widths=[4,4,8]", "data.batch_size=64"),
    "mnist": ("task.width=2", "task.hidden=4", "task.dropout=0.0"),
    "metric_learning": ("task.width=4", "task.points=8", "data.train=200", "data.val=100", "data.batch_size=64"),
    "multilabel": ("task.width=4", "data.train=400", "data.val=100"),
    "regression": ("task.hidden=8", "data.samples=512"),
    "sentiment": ("task.width=8", "task.dropout=0.0", "data.train=400", "data.val=100"),
    "gan_digits": ("task.noise=4", "task.hidden=8"),
    "shakespeare_char_cpu": ("task.layers=1", "task.width=16", "task.heads=2", "data.samples=200"),
    "gpt2_124m": (
        *("task.layers=1", "task.width=16", "task.heads=2", "task.context=32", "task.vocabulary=64"),
        *("task.attention=sdpa", "task.loss=plain", "data.window=32", "data.batch_size=4", "data.vocabulary=64"),
        *("data.samples=200", "-p", "no:compile", "task.mlp=plain"),
    ),
    "hf_text": ("task.width=16", "task.layers=1", "task.heads=2", "task.context=64", "data.longest=64"),
    "grpo": ("task.width=16", "task.layers=1", "task.heads=2", "data.batch_size=32", "data.group=4"),
    "ppo": ("task.hidden=8", "task.steps=16", "data.environments=2", "data.batch_size=16", "data.episodes=1"),
    "dqn": (
        *("task.hidden=8", "task.steps=8", "data.environments=2", "data.batch_size=16", "data.every=16"),
        *("data.capacity=200", "data.warmup=32", "data.epoch=64", "data.episodes=1"),
    ),
}


def write_data(folder: Path) -> Path:
    """A folder of small data for all of them: FORGE_DATA."""
    write_small_data(folder)
    write_images(folder / "MNIST" / "raw")
    text = folder / "tinyshakespeare" / "input.txt"  # speeches, for hf_text
    text.write_text(text.read_text() + "\n".join(f"{line}\n" for line in 12 * SONNET.splitlines()))
    return folder


def command(recipe: str, run_dir: Path) -> list[str]:
    return ["fit", recipe, *RECIPES[recipe], *COMMON, "--run-dir", str(run_dir)]


def fit(recipe: str, run_dir: Path, cut: bool = False, resume: bool = False) -> int:
    """Train by the command line; with `cut` a SIGTERM comes in the middle."""
    words = [*command(recipe, run_dir), *(["--resume"] if resume else [])]
    stepped = forge.Step.finish
    seen: list[int] = []

    def leaving(step: Any) -> Any:
        if cut and step.index + 1 == CUT and not seen:
            seen.append(1)
            signal.raise_signal(signal.SIGTERM)
        return stepped(step)

    argv = mock.patch.object(sys, "argv", ["forge", *words])  # what the card says
    with argv, mock.patch.object(forge.Step, "finish", leaving) if cut else contextlib.nullcontext():
        return cli.main(words)


def ending(run_dir: Path) -> dict[str, Any]:
    """The update at which a run ended, and for each tensor of the newest checkpoint its mean size and its mean."""
    from safetensors.torch import load_file

    latest = (run_dir / "checkpoints" / "latest").resolve()
    tensors = load_file(latest / "model.safetensors")
    weights = {
        name: [tensor.double().abs().mean().item(), tensor.double().mean().item()]
        for name, tensor in sorted(tensors.items())
        if tensor.numel()
    }
    return {"update": int(latest.name.removeprefix("update-")), "weights": weights}


def near(now: float, then: float) -> bool:
    return math.isclose(now, then, rel_tol=TOLERANCE, abs_tol=TOLERANCE / 10)


def record(recipe: str) -> None:
    straight, run = Path("straight", recipe).absolute(), Path("run", recipe).absolute()
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        codes = fit(recipe, straight), fit(recipe, run, cut=True)
    if codes != (0, 85):
        raise SystemExit(f"{recipe} ended with {codes}:\n{said.getvalue()}")
    kept = FOLDER / recipe
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(run, kept / "run", symlinks=True, ignore=shutil.ignore_patterns(".lock", "profile*", "*.html"))
    (kept / "ended.json").write_text(json.dumps(ending(straight), indent=1) + "\n", encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    os.environ["FORGE_REHEARSE"] = "off"
    wanted = sys.argv[1:] or list(RECIPES)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # outside a checkout, so that cards name none
        os.environ["FORGE_DATA"] = str(write_data(Path(folder, "data")))
        for recipe in wanted:
            try:
                record(recipe)
                print(recipe, "kept", flush=True)
            except (Exception, SystemExit) as error:
                print(recipe, "FAILED", str(error)[-1500:], flush=True)


if __name__ == "__main__":
    main()
