"""Reads the card's use, free memory, temperature and power. Empty where there is no NVIDIA card or driver."""

import contextlib
import os
import time
from typing import Any


class GpuMeter:
    """Reads one card through the vendor's library (nvidia-ml-py), at most once per second."""

    def __init__(self, index: int) -> None:
        self._handle = _open_card(index)
        self._read_at = float("-inf")
        self._facts: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """``total_bytes, free_bytes, use_percent, temperature_c, power_w``; those the card does not report are left out."""
        if self._handle is None or time.monotonic() - self._read_at < 1:
            return self._facts
        self._read_at = time.monotonic()
        self._facts = _read_card(self._handle)
        return self._facts


def visible_card(index: int, *, visible: str) -> int | str:
    """The card behind torch's ``cuda:index`` under ``CUDA_VISIBLE_DEVICES``: a number, or a UUID as the variable allows."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not names:
        return index
    name = names[min(index, len(names) - 1)]
    return int(name) if name.isdecimal() else name


def card_identity(index: int) -> str:
    """The UUID of the card behind torch's ``cuda:index``; its number where no driver answers."""
    import pynvml

    handle = _open_card(index)
    if handle is not None:
        with contextlib.suppress(pynvml.NVMLError):
            return str(pynvml.nvmlDeviceGetUUID(handle))
    return str(visible_card(index, visible=os.environ.get("CUDA_VISIBLE_DEVICES", "")))


def card_names() -> list[str]:
    """Names of the cards the driver sees; empty without one. Does not start a CUDA context."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []


def _open_card(index: int) -> Any:
    import pynvml

    card = visible_card(index, visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    try:
        pynvml.nvmlInit()
        if isinstance(card, str):
            return pynvml.nvmlDeviceGetHandleByUUID(card)
        return pynvml.nvmlDeviceGetHandleByIndex(card)
    except pynvml.NVMLError:
        return None


def _read_card(handle: Any) -> dict[str, Any]:
    import pynvml

    facts: dict[str, Any] = {}
    # each on its own: not every card reports everything
    with contextlib.suppress(pynvml.NVMLError):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        facts |= {"total_bytes": int(memory.total), "free_bytes": int(memory.free)}
    with contextlib.suppress(pynvml.NVMLError):
        facts["use_percent"] = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(pynvml.NVMLError):
        facts["temperature_c"] = int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    with contextlib.suppress(pynvml.NVMLError):
        facts["power_w"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return facts
