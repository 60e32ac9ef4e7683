"""One trial of a sweep, in a process of its own: `forge fit`, with a channel to the sweep that started it."""

from __future__ import annotations

import sys
import traceback

from forge.cli import fit, target
from forge.errors import ForgeError, Interrupted
from forge_sweep.runners import SweepChannel, TrialResult, train


def main() -> int:
    """Train as the channel says; the result, or why there is none, goes back through it."""
    channel = SweepChannel()
    sys.argv = ["forge", "fit", *channel.words]  # the command that repeats this trial, for its run card
    try:
        args = fit.parser().parse_intermixed_args(channel.words)
        recipe = target.load(args, to_train=True)
        result = train(lambda: target.build(recipe, args.run_dir), channel.metric, channel.report)
    except Interrupted as leaving:
        return leaving.EXIT_CODE
    except Exception as error:
        if isinstance(error, ForgeError):
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        result = TrialResult(reason=f"{type(error).__name__}: {error}")
    channel.finish(result)
    return 1 if result.reason else 0


if __name__ == "__main__":
    sys.exit(main())
