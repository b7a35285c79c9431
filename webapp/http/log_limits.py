"""Keeps strangers from filling the log: what anyone can cause without an account is one short line each ten seconds."""

import logging
import threading
import time

EVERY_S = 10.0
LONGEST_LINE = 200
_REFUSALS = "django.security."
"""Loggers of requests that Django refuses before it knows who asks, such as those with a wrong ``Host``; a traceback each."""
_SERVER = "uvicorn.error"
"""Its warnings are of malformed requests and of too many connections; its errors are ours and stay whole."""


class LimitRefusals(logging.Filter):
    """A filter of a handler, since one of a logger would not see what loggers below it say."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._next_at: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        is_refusal = record.name.startswith(_REFUSALS)
        if not is_refusal and not (record.name == _SERVER and record.levelno == logging.WARNING):
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._next_at.get(record.name, 0.0):
                self._num_left_out[record.name] = self._num_left_out.get(record.name, 0) + 1
                return False
            self._next_at[record.name] = now + EVERY_S
            num_left_out = self._num_left_out.pop(record.name, 0)
        text = record.getMessage()
        if len(text) > LONGEST_LINE:
            text = f"{text[:LONGEST_LINE]}…"
        record.msg = f"{text} (and {num_left_out:,} more like it)" if num_left_out else text
        record.args, record.exc_info, record.exc_text = None, None, None
        return True
