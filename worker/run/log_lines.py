"""Lines of an attempt's log from its messages: each with the moment in UTC, measurements with their numbers. Torch-free."""

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from optimizer.base.units import format_bytes

STEPS_EVERY_S = 30.0
"""Steps and passes have a line at most so often, the first one at once; evaluations and checkpoints always."""


class LogLines:
    """Prints to standard output, which is the attempt's log."""

    def __init__(self) -> None:
        self._next_step_s = 0.0

    def write(self, message: Mapping[str, Any]) -> None:
        """The line of one message of docs/attempt.md, where it has one."""
        if message["type"] == "sample" and message["kind"] != "eval":
            now_s = time.monotonic()
            if now_s < self._next_step_s:
                return
            self._next_step_s = now_s + STEPS_EVERY_S
        if words := words_of(message):
            moment = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(message.get("time_s")))
            with contextlib.suppress(OSError):  # a line of the log is not worth an attempt on a full disk
                print(f"{moment} {words}", flush=True)


def words_of(message: Mapping[str, Any]) -> str:
    """The message in words; empty for one that is not for people."""
    match message:
        case {"type": "started", "resumed_from_step": int(step)}:
            return f"goes on from step {step}" if step else "started"
        case {"type": "phase", "phase": str(phase)}:
            return f"{phase}: {message['message']}" if message.get("message") else phase
        case {"type": "log", "message": str(text)}:
            return text
        case {"type": "checkpoint", "step": int(step), "num_bytes": int(num_bytes)}:
            return f"checkpoint of step {step}, {format_bytes(num_bytes)}"
        case {"type": "sample"}:
            return ", ".join(_sample_words(message))
    return ""


def _sample_words(sample: Mapping[str, Any]) -> list[str]:
    """Words for what was measured alone: ``step 40, loss 5.2041, 120 ms, 447 tokens/s, peak 394 MiB``."""
    reached = f"step {sample['step']}"
    if sample.get("num_prompts"):
        reached = f"{sample['prompts_done']} of {sample['num_prompts']} prompts"
    elif sample["kind"] == "generate":
        reached = f"{sample['step']} tokens"
    written: dict[str, Callable[[Any], str]] = {
        "loss": lambda value: f"loss {value:.4f}",
        "validation_loss": lambda value: f"validation loss {value:.4f}",
        "step_ms": lambda value: f"{value:.4g} ms",
        "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
        "device_peak_bytes": lambda value: f"peak {format_bytes(value)}",
    }
    return [reached, *(write(sample[name]) for name, write in written.items() if sample.get(name) is not None)]
