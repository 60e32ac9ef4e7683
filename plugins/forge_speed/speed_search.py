"""The search for the fastest step: each lever alone, then the winners together, then the answer against the start.

It knows levers and readings, and nothing of how a step is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from forge.tuning.step_reading import StepReading, in_ms
from forge_speed.levers import NUMBERS, Change, Lever, Numbers
from forge_speed.speed_report import LeverRow, SpeedReport

LEAST = 0.02
"""A lever is added if the whole step becomes faster by at least this share."""
PROMISING = 0.03
"""A lever that is slower than the start by more than this share, and the noise, is not measured again."""
DEAR, CLEAR = 0.05, 0.1
"""A measurement that takes the first share of the budget is not repeated if it says that the step is faster by the
second: the answer is compared with the start at the end anyway."""
RESERVE = 0.8
"""The share of the budget after which only the answer is checked."""
SLOW = 0.5
"""Levers that take minutes are tried only while this share of the budget is left."""
NO_GAIN = "no gain with the others"
SPENT, TOO_SLOW = "the budget was spent", "takes minutes, more than this budget has left"
DISTURBED, IMPLAUSIBLE = 1.2, 1.5
"""Readings of equal steps that differ by the first factor, or a step that a lever makes slower by the second, say that
others use the machine: they are repeated."""
PAIRS, LEAST_PAIRS, NOISY = 3, 2, 0.05
"""How often the answer is measured beside the start at the end, also when the budget is spent, and the share of
differences between equal steps from which on it is measured more often."""


class LeverFailed(Exception):
    """Raised by a measurement: the lever does not work here, for the reason in the message."""


Measure = Callable[[Sequence[Lever]], StepReading]


class SpeedSearch:
    """One search. `measure` runs the step with some levers; it raises LeverFailed where they do not work."""

    def __init__(
        self,
        measure: Measure,
        levers: Sequence[Lever],
        *,
        numbers: Numbers = "precision",
        limit: int | None = None,
        budget: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda text: None,
    ):
        self.measure, self.numbers, self.limit = measure, numbers, limit
        self.budget, self.clock, self.tell = budget, clock, tell
        self.rows = [LeverRow(lever, lever.why_not or self._forbidden(lever)) for lever in levers]
        self.begun = clock()
        self.spent = False
        self.starts: list[StepReading] = []
        self.costs: dict[str, float] = {}
        "Seconds of the last measurement with a lever, compiling included."

    def run(self, first: StepReading | None = None) -> SpeedReport:
        """Search, and return what was found; `first` is a reading of the start, if there is one."""
        if first is None:
            self._measure_start()
        else:
            self.starts.append(first)
        self._alone()
        chosen = self._together()
        report = SpeedReport(
            StepReading.middle(self.starts), self.rows, reproducible=self._reproducible, noise=self.noise
        )
        self._check(report, chosen)
        for row in self.rows:
            row.chosen = row.lever in report.chosen
        times = [reading.ms for reading in self.starts]
        report.extremes = min(times), max(times)
        report.spent, report.seconds = self.spent, self.clock() - self.begun
        return report

    # -- alone --------------------------------------------------------------------------------------------------------

    def _alone(self) -> None:
        """Measure every lever between two readings of the start, some of them again."""
        readings: dict[str, list[StepReading]] = {}
        shares: dict[str, list[float]] = {}
        for again in range(3):
            for row in self.rows:
                name = row.lever.name
                if row.why_not or (again and not self._is_worth_repeating(row.lever, shares[name], again)):
                    continue
                if self._is_over(self.costs.get(name, 0.0), slow=row.lever.slow):
                    if not again:
                        row.why_not = TOO_SLOW if row.lever.slow else SPENT
                    continue
                found = self._between_starts(row)
                if found is not None:
                    readings.setdefault(name, []).append(found[0])
                    shares.setdefault(name, []).append(found[1])
        for row in self.rows:  # neighbours in time are compared: a machine that others use changes its pace
            if row.lever.name in readings:
                share = statistics.median(shares[row.lever.name])
                row.alone = replace(StepReading.middle(readings[row.lever.name]), ms=share * self.start.ms)

    def _is_worth_repeating(self, lever: Lever, shares: Sequence[float], times: int) -> bool:
        """Return whether a lever is measured again: the promising and the implausible twice, contradictions thrice."""
        if times == 1:
            if self._is_clear([lever], shares[0]):
                return False
            return not 1 + PROMISING + self.noise < shares[0] < IMPLAUSIBLE
        return len(shares) == times and max(shares) > DISTURBED * min(shares)

    def _is_clear(self, wanted: Sequence[Lever], share: float) -> bool:
        """Return whether a gain is so large, and its measurement so dear, that once is enough."""
        return share < 1 - CLEAR - self.noise and self._cost(wanted) > DEAR * self.budget

    def _between_starts(self, row: LeverRow) -> tuple[StepReading, float] | None:
        """Measure a lever between two readings of the start; once more if these differ, since something disturbed it.

        Return the reading, and its share of the start's time.
        """
        while True:
            reading, before = self._try(row, [row.lever]), self.starts[-1].ms
            if reading is None:
                return None
            self._measure_start()
            after = self.starts[-1].ms
            calm = max(before, after) < DISTURBED * min(before, after)
            if calm or row.repeated or self._is_over(self.costs[row.lever.name]):
                return reading, reading.ms / statistics.fmean((before, after))
            row.repeated = True
            self._measure_start()

    # -- together -----------------------------------------------------------------------------------------------------

    def _together(self) -> list[Lever]:
        """Add levers by their gain alone, each only if the whole step gains by it."""
        chosen: list[Lever] = []
        best = self.start
        for row in self._by_gain():
            alone = row.alone
            assert alone is not None
            row.why_not = _why_not_beside(chosen, row.lever)
            if row.why_not:
                continue
            wanted = [*(lever for lever in chosen if _group(lever) != _group(row.lever)), row.lever]
            if chosen and self._is_over(2 * self._cost(wanted)):
                row.why_not = SPENT
                continue
            if len(wanted) == 1 and not chosen:
                reading: StepReading | None = alone
            else:
                reading = self._beside(row, wanted, chosen, best)
            if reading is None:
                continue
            row.together = reading
            row.why_not = self._refused(reading) or self._too_slow(reading, best, first=not chosen)
            if not row.why_not:
                chosen, best = wanted, reading
            elif row.why_not == NO_GAIN and len(wanted) <= len(chosen):
                row.why_not = f"{_groups_choice(chosen, row.lever)} is faster"
        for row in self.rows:
            if not row.why_not and row.lever not in chosen:
                row.why_not = f"{_groups_choice(chosen, row.lever)} is faster"
        return chosen

    def _by_gain(self) -> list[LeverRow]:
        tried = [row for row in self.rows if row.alone is not None and not row.why_not]
        for row in tried:
            assert row.alone is not None
            if row.alone.ms > (1 + PROMISING) * self.start.ms and self._fits(self.start):
                row.why_not = "slower"
            row.why_not = row.why_not or self._refused(row.alone)
        return sorted((row for row in tried if not row.why_not), key=_time_to_beat)

    def _beside(
        self, row: LeverRow, wanted: Sequence[Lever], chosen: Sequence[Lever], best: StepReading
    ) -> StepReading | None:
        """Measure a combination in turns with the best so far; the best keeps its time, by which all are judged."""
        readings, shares = [], []
        while len(shares) < 2 or (len(shares) == 2 and max(shares) > DISTURBED * min(shares)):
            now = self._try(row, chosen)
            reading = None if now is None else self._try(row, wanted)
            if now is None or reading is None:
                return None
            readings.append(reading)
            shares.append(reading.ms / now.ms)
            if 1 + PROMISING + self.noise < shares[0] < IMPLAUSIBLE or self._is_clear(wanted, shares[0]):
                break
        return replace(StepReading.middle(readings), ms=statistics.median(shares) * best.ms)

    # -- the answer ---------------------------------------------------------------------------------------------------

    def _check(self, report: SpeedReport, chosen: list[Lever]) -> None:
        """Measure the answer and the start in turns, and keep the answer only if it wins."""
        report.fits = self._fits(report.start)
        if not chosen:
            return
        must = not report.fits  # the start is not permitted
        row = next(row for row in self.rows if row.lever is chosen[-1])
        starts, bests = [], []
        for i in range(PAIRS if self.noise < NOISY else 2 * PAIRS - 1):
            if i >= LEAST_PAIRS and self._is_over(self._cost(chosen), share=1.0):
                break
            self._measure_start()
            starts.append(self.starts[-1])
            reading = self._try(row, chosen)
            if reading is not None:
                bests.append(reading)
        pace, report.start = report.start.ms, StepReading.middle(starts)
        for other in self.rows:  # all times of the report are by one pace
            other.rescale(report.start.ms / pace)
        share = (
            statistics.median(best.ms / start.ms for start, best in zip(starts, bests, strict=False)) if bests else 1
        )
        best = replace(StepReading.middle(bests), ms=share * report.start.ms) if len(bests) == len(starts) else None
        if best is not None and not self._refused(best) and (must or share <= 1 - LEAST):
            report.best, report.chosen, report.fits = best, chosen, True
            return
        report.dropped = " + ".join(lever.name for lever in chosen)
        for row in self.rows:
            if row.lever in chosen:
                row.why_not = row.why_not or "no gain in the end"

    # -- one measurement ----------------------------------------------------------------------------------------------

    def _measure_start(self) -> None:
        self.starts.append(self.measure(()))
        self.tell(f"start: {in_ms(self.starts[-1].ms)} ms")

    def _try(self, row: LeverRow, wanted: Sequence[Lever]) -> StepReading | None:
        """Measure a combination; a failure is noted in the lever's row."""
        names, begun = " + ".join(lever.name for lever in wanted), self.clock()
        try:
            reading = self.measure(wanted)
        except LeverFailed as failure:
            row.failed = True
            row.why_not = str(failure)
            self.tell(f"{names}: {failure}")
            return None
        self.tell(f"{names}: {in_ms(reading.ms)} ms")
        self.costs |= dict.fromkeys((lever.name for lever in wanted), self.clock() - begun)
        return reading

    def _cost(self, wanted: Sequence[Lever]) -> float:
        """Return how many seconds a measurement will take, by those before."""
        return max(self.costs.get(lever.name, 0.0) for lever in wanted)

    # -- judging ------------------------------------------------------------------------------------------------------

    @property
    def start(self) -> StepReading:
        return StepReading.middle(self.starts)

    @property
    def noise(self) -> float:
        """Return by which share half of the readings of the start differ from their median, at most."""
        times = [reading.ms for reading in self.starts]
        middle = statistics.median(times)
        return statistics.median(abs(ms - middle) for ms in times) / middle

    @property
    def _reproducible(self) -> bool:
        return all(reading.same is not False for reading in self.starts)

    def _is_over(self, cost: float = 0.0, slow: bool = False, share: float = RESERVE) -> bool:
        """Return whether the budget has no room for a measurement of this cost; slow levers need more of it."""
        used = self.clock() - self.begun + cost
        if used > share * self.budget:
            self.spent = True
        return used > (1 - SLOW if slow else share) * self.budget

    def _forbidden(self, lever: Lever) -> str:
        if NUMBERS.index(lever.numbers) <= NUMBERS.index(self.numbers):
            return ""
        return "changes the precision" if lever.numbers == "precision" else "rounds differently"

    def _fits(self, reading: StepReading) -> bool:
        return self.limit is None or reading.memory is None or reading.memory <= self.limit

    def _refused(self, reading: StepReading) -> str:
        """Return why a reading is not permitted, however fast it is."""
        if not self._fits(reading):
            return f"over the limit of {(self.limit or 0) / 1e9:g} GB"
        return "other bits" if self.numbers == "bitwise" and reading.same is False else ""

    def _too_slow(self, reading: StepReading, best: StepReading, first: bool) -> str:
        if first and not self._fits(self.start):
            return ""
        least = max(LEAST, min(self.noise, 0.1))
        return "" if reading.ms <= (1 - least) * best.ms else "no gain" if first else NO_GAIN


def _group(lever: Lever) -> str:
    return lever.group or lever.name


def _time_to_beat(row: LeverRow) -> float:
    """Return a lever's time alone; a lever of several plugins comes after one that is as fast with fewer."""
    assert row.alone is not None
    return row.alone.ms * (1 + LEAST * max(0, len(row.lever.change.plugins) - 1))


def _why_not_beside(chosen: Sequence[Lever], lever: Lever) -> str:
    """Return why a lever need not be measured with those that are chosen: their times alone, or their changes, say it
    all. Those chosen came first, so they are faster alone."""
    if chosen and all(_group(other) == _group(lever) for other in chosen):
        return f"{chosen[0].name} is faster"
    contains = next((other for other in chosen if _contains(other.change, lever.change)), None)
    return f"part of {contains.name}" if contains is not None else ""


def _contains(change: Change, part: Change) -> bool:
    return (change | part) == change


def _groups_choice(chosen: Sequence[Lever], lever: Lever) -> str:
    return next((other.name for other in chosen if _group(other) == _group(lever)), "another combination")
