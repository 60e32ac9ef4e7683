"""Peaks of devices by their data sheets: dense matrix products, in TFLOP/s."""

from __future__ import annotations

import re

import torch

NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _peaks(fp32: float, tf32: float | None, fp16: float, bf16: float | None = None) -> dict[str, float]:
    """Devices with tf32 have bf16 too, as fast as fp16."""
    found = {"fp32": fp32, "tf32": tf32, "fp16": fp16, "bf16": bf16 if tf32 is None else fp16}
    return {dtype: peak for dtype, peak in found.items() if peak is not None}


PEAKS: dict[str, dict[str, float]] = {
    # words that must all be in a device's name; of several entries the one with most words counts
    "B200": _peaks(75, 1125, 2250),
    "GH200": _peaks(66.9, 494.7, 989.4),
    "H200": _peaks(66.9, 494.7, 989.4),
    "H200 NVL": _peaks(60, 417.5, 835.5),
    "H100": _peaks(66.9, 494.7, 989.4),
    "H100 NVL": _peaks(60, 417.5, 835.5),
    "H100 PCIe": _peaks(51.2, 378, 756),
    "H800": _peaks(66.9, 494.7, 989.4),
    "H20": _peaks(44, 74, 148),
    "A100": _peaks(19.5, 156, 312),
    "A800": _peaks(19.5, 156, 312),
    "A40": _peaks(37.4, 74.8, 149.7),
    "A30": _peaks(10.3, 82, 165),
    "A10": _peaks(31.2, 62.5, 125),
    "A10G": _peaks(31.5, 35, 70),
    "L4": _peaks(30.3, 60, 121),
    "L40": _peaks(90.5, 90.5, 181),
    "L40S": _peaks(91.6, 183, 362),
    "T4": _peaks(8.1, None, 65),
    "V100": _peaks(15.7, None, 125),
    "V100 PCIE": _peaks(14, None, 112),
    "V100S": _peaks(16.4, None, 130),
    "RTX A6000": _peaks(38.7, 77.4, 154.8),
    "RTX 6000 Ada": _peaks(91.1, 182.1, 364.2),
    "RTX 5090": _peaks(104.8, 104.8, 209.5),
    "RTX 4090": _peaks(82.6, 82.6, 165.2),
    "RTX 3090": _peaks(35.6, 35.6, 71),
    "MI250X": _peaks(95.7, None, 383, bf16=383),
    "MI300X": _peaks(163.4, 653.7, 1307.4),
}
UNLIKE = {"mig", "laptop", "max", "super", "d", "ti"}
"""Words that mark a different device with the same number: a slice, or a slower or faster variant."""


def peak_of(device_name: str, dtype: str) -> float | None:
    """Return the peak of a device for a dtype, in TFLOP/s; None if unknown."""
    words = _words(device_name)
    if words & UNLIKE:
        return None
    fitting = [name for name in PEAKS if _words(name) <= words]
    return PEAKS[max(fitting, key=lambda name: len(_words(name)))].get(dtype) if fitting else None


def as_computed(dtype: torch.dtype, device: torch.device, convolution: bool) -> str:
    """Return the type in which the device computes: CUDA may compute float32 products in tf32."""
    if dtype == torch.float32 and device.type == "cuda":
        backends = torch.backends
        precision = backends.cudnn.conv.fp32_precision if convolution else backends.cuda.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
        return "tf32" if precision == "tf32" else "fp32"
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _words(text: str) -> set[str]:
    return {word.lower() for word in re.split(r"[^A-Za-z0-9]+", text) if word}
