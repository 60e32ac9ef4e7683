"""system: figures of the machine, read in a thread that ends with the run and leaves its bits alone."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_plugins import JSONL, System
from forge_plugins import system as module
from tests.support.patience import PATIENCE
from tests.support.tasks import Classifier, fit

HOST = {"cpu_percent", "process_cpu_percent", "ram_gb", "process_ram_gb", "disk_free_gb"}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("forge-system")]


class Waits(Classifier):
    """Each update waits until the thread has read something."""

    def training_step(self, batch: Any) -> Any:
        assert self.trainer is not None
        plugin = next(plugin for plugin in self.trainer.stack if isinstance(plugin, System))
        assert plugin._sampler is not None
        while plugin._sampler._thread.is_alive() and "ram_gb" not in plugin._sampler._read:
            plugin._sampler._over.wait(1e-3)  # limit: a pause in a loop that waits
        return super().training_step(batch)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_each_log_has_the_figures_of_the_host(tmp_path: Path) -> None:
    task = Waits()
    fit(task, log_every=2, plugins=[System(every=1e-3), JSONL()], run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [{name.removeprefix("system/") for name in line if name.startswith("system/")} for line in lines]
    assert [line["update"] for line, names in zip(lines, found, strict=True) if names] == [2, 4]
    assert {"ram_gb", "process_ram_gb", "disk_free_gb"} <= set().union(*found) <= HOST
    last = lines[[bool(names) for names in found].index(True)]
    assert 0 < last["system/process_ram_gb"] < last["system/ram_gb"] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_ends_with_the_run(fails: bool) -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any) -> Any:
            assert threads() == ["forge-system"]
            if fails:
                raise RuntimeError("on purpose")
            return super().training_step(batch)

    try:
        fit(Fails(), plugins=[System()])
    except RuntimeError:
        assert fails
    assert threads() == []


def test_means_are_of_what_was_read_since() -> None:
    values = iter([1.0, 3.0])
    read = threading.Event()

    def source() -> dict[str, float]:
        try:
            return {"x": next(values)}
        except StopIteration:
            read.set()
            return {}

    sampler = module.Sampler([source], 1e-4)
    assert read.wait(PATIENCE)
    assert (sampler.take(), sampler.take()) == ({"x": 2.0}, {})
    sampler.stop()
    assert not sampler._thread.is_alive()


def test_gpus_are_read_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    nvml = SimpleNamespace(
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid) or len(asked) - 1,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50 + handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=2_000_000_000),
        nvmlDeviceGetPowerUsage=lambda handle: 300_000,
        nvmlDeviceGetTemperature=lambda handle, kind: 60,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"abc{number}"))
    found: dict[str, float] = {}
    for read in module.readers(torch.device("cuda"), Path("not/there")):
        found |= read()
    assert asked == ["GPU-abc0", "GPU-abc1"]
    gpu = {"gpu1_percent": 51.0, "gpu1_memory_gb": 2.0, "gpu1_watts": 300.0, "gpu1_celsius": 60.0}
    assert gpu.items() <= found.items()
    assert found["disk_free_gb"] > 0


def test_without_nvml_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level("WARNING", logger="forge"):
        assert len(module.readers(torch.device("cuda"), Path())) <= 3
    assert "pip install 'forge-trainer[system]'" in caplog.text
