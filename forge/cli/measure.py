"""What `forge validate`, `forge test` and `forge predict` share: a recipe, weights, one pass without training."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from forge.cli import ranks, show, target


def measuring_parser(verb: str, description: str) -> ArgumentParser:
    example = f"example:\n  forge {verb} quickstart --weights runs/quickstart/RUN/weights.safetensors\n"
    parser = target.new_parser(verb, description, example)
    target.add_arguments(parser)
    parser.add_argument(
        "--weights", metavar="FILE", help="a run folder, a checkpoint, or a .safetensors, .pt or .ckpt file"
    )
    return parser


def warn_without_weights(args: Namespace) -> None:
    if args.weights is None and ranks.rank() == 0:
        show.warning("no --weights: the task's weights are freshly initialised, as before any training.")


def measure(args: Namespace, verb: str, split: str) -> int:
    """Run one evaluation and print its metrics; nothing is written."""
    from forge.errors import DataError

    trainer, task, data = target.build(target.load(args), run_dir=False)
    loader = getattr(data, split)
    if loader is None:
        raise DataError(f"The data of {args.target!r} have no {split} split: return forge.data.Splits({split}=...).")
    warn_without_weights(args)
    metrics = getattr(trainer, verb)(task, loader, weights=args.weights)
    if ranks.rank() == 0:
        show.console().print(show.metrics(metrics))
    return 0
