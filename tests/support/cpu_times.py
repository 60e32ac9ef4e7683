"""What each test costs: seconds of CPU, those of the processes that it starts included.

A plugin of pytest. The run ends with a table of the ten files that cost the most; `--cpu-times FILE` writes what every
test took. Nothing is asserted, since the figures depend on the machine, unless FORGE_CPU_MINUTES says how many minutes
all tests may take here: the workflow for every change does.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import forked

SHOWN = 10
LIMIT = "FORGE_CPU_MINUTES"
TICKS = os.sysconf("SC_CLK_TCK")


class CPUTimes:
    """One in every process of the run: a worker measures, and the process that reports adds up."""

    def __init__(self) -> None:
        self.last = cpu_seconds()
        self.tests: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        yield
        self.last = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            now = cpu_seconds()
            report.cpu_seconds, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.tests[report.nodeid] = getattr(report, "cpu_seconds", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.OK and self.over_limit():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def over_limit(self) -> str:
        """Return the line that says how far the tests are over their limit; "" if they are not."""
        limit, minutes = float(os.environ.get(LIMIT) or "inf"), sum(self.tests.values()) / 60
        return f"{minutes:.1f} minutes of CPU; {LIMIT} allows {limit:g}" if minutes > limit else ""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        files: Counter[str] = Counter()
        for test, seconds in self.tests.items():
            files[test.partition("::")[0]] += seconds
        if len(files) > 1:
            terminalreporter.section("files that took the most CPU time")
            for file, seconds in files.most_common(SHOWN):
                terminalreporter.line(f"{seconds:7.1f} s  {file}")
            terminalreporter.line(f"{files.total():7.1f} s  all {len(files)} files, without collecting them")
        if said := self.over_limit():
            terminalreporter.write_line(said, red=True)
        if config.option.cpu_times:
            slowest = sorted(self.tests.items(), key=lambda test: -test[1])
            config.option.cpu_times.write_text("".join(f"{seconds:.3f} {test}\n" for test, seconds in slowest))


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help="write the seconds of CPU that each test took")


def cpu_seconds() -> float:
    """User and system time of this process, of those that have ended and were waited for, and of forked ones so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_so_far, forked.processes()))


def _so_far(process: int) -> float:
    try:
        values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return 0.0
    return sum(map(int, values[11:15])) / TICKS
