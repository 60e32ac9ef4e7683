"""Look at every rank before the first update."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import forge
from forge.errors import NegativeVerdict, RecipeError
from forge_cluster.health.examination import examine, judge

logger = logging.getLogger("forge")

UNFIT = "unfit host:"
"""Before the name of a host that a job should be tried without; the job's script looks for it."""


class Health(forge.Plugin):
    """Examine every rank before the first update: one that computes wrongly, or is slow, is named with its host.

    When to use it: on many nodes, where one of them is often not well. `forge launch --check` adds it to a job, and
    `forge env --ranks` does the same without a run. It takes a second or two at the start, and nothing afterwards.

    What you see: each rank multiplies matrices, copies numbers to its device and back, and exchanges numbers with its
    neighbours and with all. Results are compared with what they must be; a wrong one stops the run. Times are compared
    with the median rank's: one that takes `slower` times as long is named in a warning, or stops the run
    (`slow=stop`). A slow link makes two neighbours slow. On SLURM the job is then tried again without that host, as
    often as `--restarts` says. In one process there is nothing to compare, and nothing is done.

    ::

        forge fit quickstart --nproc 2 -p ddp -p health trainer.max_epochs=1
        forge env --ranks --nproc 2
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        slower: float = 1.5
        "How many times as long as the median rank a slow one takes."
        slow: Literal["warn", "stop"] = "warn"
        "What to do about a slow rank."

    config: Config
    observer = True

    def __init__(self, *first: float, **values: Any):
        super().__init__(*first, **values)
        if self.config.slower <= 1:
            raise RecipeError(f"health.slower is {self.config.slower:g}; it must be above 1.")

    @forge.hookimpl
    def forge_start(self, trainer: forge.Run) -> None:
        env = trainer.env
        if env.world == 1 or trainer.verb != "fit":
            return
        with env.no_timeout():
            pulses = examine(env, self.config.slower)
        found = judge(pulses, self.config.slower)
        stops = [one for one in found if one.is_wrong or self.config.slow == "stop"]
        for one in found if env.is_main else ():
            logger.warning("health: %s.", one)
        if stops:
            hosts = ", ".join(dict.fromkeys(one.pulse.host for one in stops))
            raise NegativeVerdict(f"{'; '.join(map(str, stops))}. Start without it.\n{UNFIT} {hosts.partition(',')[0]}")
        if env.is_main and not found:
            logger.info("health: all %d ranks compute rightly, and about equally fast.", env.world)
