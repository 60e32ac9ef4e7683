"""Tracker: torch's own MemTracker, which counts storages as they come and go, made to fit a rehearsal."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType

from forge.planning.fake_cuda import HOST
from forge.planning.footprint import Moment

ROUNDING = 512
"""CUDA's allocator hands out multiples of this."""


class Tracker(MemTracker):
    """Counts every tensor made while it is entered, and keeps the worst moment of each phase of a step.

    What MemTracker lacks for a rehearsal, and is put right here: it rounds as CUDA does only for tensors on CUDA, it
    copies statistics of every module at every operation, which takes most of the time, and for their sake it refuses
    to see a module's forward twice, which accumulation does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[str, Moment] = {}

    def watch(self, task: nn.Module) -> None:
        """Tell a task's parameters, buffers and gradients from other tensors."""
        self._track_module_params_and_buffers(task)

    def forget_moments(self) -> None:
        self.moments = {}

    @property
    def live(self) -> int:
        """Bytes that are held now."""
        return self._curr_mem_snap.get(HOST, {}).get("Total", 0)

    # -- MemTracker's own parts, each called at its moment ------------------------------------------------------------

    def _update_snap(self, u_type: Any, winfo: Any, *args: Any, **kwargs: Any) -> None:
        winfo.mem_consumed = -(-winfo.mem_consumed // ROUNDING) * ROUNDING
        super()._update_snap(u_type, winfo, *args, **kwargs)

    def _update_peak_stats(self, peak_state: Any) -> None:
        now = self._curr_mem_snap.get(HOST)
        phase = "optimizer" if self._in_opt else "backward" if self._mod_tracker.is_bw else "forward"
        if now is not None and (phase not in self.moments or self.moments[phase].total < now["Total"]):
            self.moments[phase] = Moment(now["Total"], now[_MemRefType.GRAD])

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        pass

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None:
        pass
