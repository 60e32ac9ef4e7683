"""One trial of a sweep, in a process of its own: `forge fit`, with a channel to the sweep that started it."""

from __future__ import annotations

import sys

from forge.cli import fit, target
from forge.util.children import die_with_parent
from forge_sweep.runners import TrialChannel, train


def main() -> None:
    """Train as the channel says."""
    channel = TrialChannel.of_trial()
    die_with_parent()
    words, metric = channel.hear()
    sys.argv = ["forge", "fit", *words]  # the command that repeats this trial, for its run card
    args = fit.parser().parse_intermixed_args(words)
    recipe = target.load(args, to_train=True)
    train(*target.build(recipe, args.run_dir), metric, channel.report)


if __name__ == "__main__":
    main()
