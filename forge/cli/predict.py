"""`forge predict`: write a task's predictions to a safetensors file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.cli import ranks, target
from forge.cli.evaluate import explain_misfit, measuring_parser, warn_without_weights
from forge.errors import DataError, ForgeError, TaskError
from forge.util import show

if TYPE_CHECKING:
    from torch import Tensor


def parser() -> ArgumentParser:
    parser = measuring_parser("predict", "Write a task's predictions on the predict split (else the test split).")
    parser.add_argument(
        "--out", metavar="FILE", default="predictions.safetensors", help="a .safetensors file (default: %(default)s)"
    )
    return parser


def run(args: Namespace) -> int:
    from safetensors.torch import save_file

    out = Path(args.out)
    if out.is_dir():
        raise ForgeError(f"--out {args.out} is a folder; name a file, as in --out {out / 'predictions.safetensors'}.")
    if out.suffix != ".safetensors":
        raise ForgeError(
            f"--out {args.out}: predictions are written as safetensors. Name the file "
            f"{out.with_suffix('.safetensors')}, and read it with safetensors.torch.load_file."
        )
    recipe = target.load(args)
    if args.nproc is not None:
        return ranks.launch_pass("predict", args, recipe)
    trainer, task, data = target.build(recipe, run_dir=False)
    split = "predict" if data.predict is not None else "test"
    loader = getattr(data, split)
    if loader is None:
        raise DataError(f"The data of {args.target!r} have neither a predict nor a test split.")
    warn_without_weights(args)
    with explain_misfit(args, "predict", task):
        tensors = gather(trainer.predict(task, loader, weights=args.weights))
    if ranks.rank() != 0:  # every rank has all predictions; one of them writes the file
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out)
    grid = show.table("name", "shape", "type")
    for name, tensor in tensors.items():
        grid.add_row(name, " × ".join(map(str, tensor.shape)), str(tensor.dtype).removeprefix("torch."))
    console = show.console()
    console.print(grid)
    console.print(f"{split} split -> {out}", soft_wrap=True)
    return 0


def gather(outputs: list[Any]) -> dict[str, Tensor]:
    """Concatenate the outputs of all batches, by name; a bare tensor is named "predictions"."""
    import torch

    named = [dict(output) if isinstance(output, Mapping) else {"predictions": output} for output in outputs]
    for name, value in named[0].items():
        if not isinstance(value, torch.Tensor):
            raise TaskError(
                f"predict_step returned a {type(value).__name__} for {name!r}; only tensors, or dicts of tensors, can "
                "be written. To get other types, call trainer.predict from Python."
            )
    try:
        return {name: torch.cat([torch.atleast_1d(output[name]) for output in named]).contiguous() for name in named[0]}
    except (KeyError, RuntimeError) as error:
        raise TaskError(f"The batches' predictions do not fit together: {error}") from error
