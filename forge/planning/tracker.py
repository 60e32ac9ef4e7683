"""Tracker: torch's MemTracker, which counts live storages, adapted to a dry run."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge.planning.fake_cuda import HOST
from forge.planning.footprint import Moment
from forge.torch_internals import MemKind, MemTracker

ROUNDING = 512
"""CUDA's allocator hands out multiples of this."""


class Tracker(MemTracker):
    """Counts every tensor made while it is entered, and keeps the worst moment of each phase of a step.

    It differs from MemTracker in three ways: it rounds like CUDA for tensors on the host too, it keeps no statistics
    per module, which take most of the time, and so it allows a module to run forward twice, as accumulation does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[str, Moment] = {}

    def watch(self, task: nn.Module) -> None:
        """Count the task's parameters, buffers and gradients separately from other tensors."""
        self._track_module_params_and_buffers(task)

    def forget_moments(self) -> None:
        self.moments = {}

    @property
    def live(self) -> int:
        """Return the bytes that are allocated now."""
        return self._curr_mem_snap.get(HOST, {}).get("Total", 0)

    # -- overridden methods of MemTracker -----------------------------------------------------------------------------

    def _update_snap(self, u_type: Any, winfo: Any, *args: Any, **kwargs: Any) -> None:
        winfo.mem_consumed = -(-winfo.mem_consumed // ROUNDING) * ROUNDING
        super()._update_snap(u_type, winfo, *args, **kwargs)

    def _update_peak_stats(self, peak_state: Any) -> None:
        now = self._curr_mem_snap.get(HOST)
        phase = "optimizer" if self._in_opt else "backward" if self._mod_tracker.is_bw else "forward"
        if now is None:
            return
        moment = Moment(now["Total"], now[MemKind.GRAD])
        if phase not in self.moments or self.moments[phase].total < moment.total:
            self.moments[phase] = moment

    def _ignore(self, *args: Any) -> None:
        pass

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _ignore
