"""Reads the card's use, free memory, temperature and power. Empty where there is no NVIDIA card or driver."""

import contextlib
import logging
import os
import time
from typing import Any

logger = logging.getLogger(__name__)


class GpuMeter:
    """Reads one card through the vendor's library (nvidia-ml-py), at most once per second."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._handle: Any = None
        self._read_at = float("-inf")
        self._facts: dict[str, Any] = {}
        self.is_silent = False
        """The last reading found the vendor's library and no answer for this card: how much of it is free nobody knows."""

    def read(self) -> dict[str, Any]:
        """``total_bytes, free_bytes, use_percent, temperature_c, power_w``; those the card does not report are left out."""
        if time.monotonic() - self._read_at < 1:
            return self._facts
        self._read_at = time.monotonic()
        import pynvml

        try:
            self._handle = self._handle or _open_card(self._index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
        except pynvml.NVMLError as error:
            self._facts = {}
            self._note(is_silent=not _never_reports(error), why=str(error))
            if self.is_silent:
                self._handle = None  # what comes back may be found anew alone
        else:
            self._facts = {"total_bytes": int(memory.total), "free_bytes": int(memory.free)}
            self._note(is_silent=False)
        if self._handle is not None:
            self._facts |= _read_card(self._handle)
        return self._facts

    def _note(self, *, is_silent: bool, why: str = "") -> None:
        if is_silent and not self.is_silent:
            logger.warning("cuda:%d does not answer its driver (%s); nothing is begun on it until it does", self._index, why)
        elif self.is_silent and not is_silent:
            logger.info("cuda:%d answers its driver again", self._index)
        self.is_silent = is_silent


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

    with contextlib.suppress(pynvml.NVMLError):
        return str(pynvml.nvmlDeviceGetUUID(_open_card(index)))
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
    """Raises NVMLError."""
    import pynvml

    card = visible_card(index, visible=os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    pynvml.nvmlInit()
    if isinstance(card, int):
        return pynvml.nvmlDeviceGetHandleByIndex(card)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(card)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument) as error:
        # CUDA takes the beginning of a UUID for the whole, the vendor's library does not
        raise pynvml.NVMLError_NotSupported from error


def _never_reports(error: Exception) -> bool:
    """Report whether nothing is wrong: there is no such library, or a card such as this one does not say."""
    import pynvml

    kinds = (
        pynvml.NVMLError_LibraryNotFound,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_NoPermission,
    )
    return isinstance(error, kinds)


def _read_card(handle: Any) -> dict[str, Any]:
    import pynvml

    facts: dict[str, Any] = {}
    # each on its own: not every card reports everything
    with contextlib.suppress(pynvml.NVMLError):
        facts["use_percent"] = int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    with contextlib.suppress(pynvml.NVMLError):
        facts["temperature_c"] = int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    with contextlib.suppress(pynvml.NVMLError):
        facts["power_w"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    return facts
