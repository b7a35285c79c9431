"""The serving loop: requests wait, run together, and end, one token of each at a time, within a budget of device memory.

A request is let in when a row is free and the bytes that it may come to (keys and values of its prompt and all the tokens it
asked for) fit beside those that run: what was let in is never put out for want of memory. Those that wait are let in by age, one
between two tokens, so that a long prompt holds the others up once. *Not done*: sharing the keys and values of equal beginnings.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from optimizer.base.errors import InvalidWorkload, OutOfDeviceMemory
from optimizer.base.units import format_bytes
from optimizer.runtime.meter.counting import CountingPolicy
from optimizer.runtime.meter.meter import Meter, count_allocations, mark_phase
from optimizer.runtime.serving.adapters import AdapterShelf
from optimizer.runtime.serving.forward import Forward
from optimizer.runtime.serving.row import Made, Row, ServedRequest


class Server:
    """One model that answers many. Not thread-safe: whoever calls ``step`` calls everything."""

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        num_rows: int,
        kv_limit_bytes: int,
        max_tokens: int,
        meter: Meter | None = None,
    ) -> None:
        """model: in evaluation mode, on ``device``. num_rows: sequences that run at once at most. kv_limit_bytes: for all their
        keys and values. max_tokens: longest prompt and answer together.
        """
        self._meter = meter
        self._device = device
        self.num_rows = num_rows
        self.kv_limit_bytes = kv_limit_bytes
        self.max_tokens = max_tokens
        self._counting = CountingPolicy()
        self._num_steps = 0
        self.shelf = AdapterShelf(model, device=device, meter=meter)
        with count_allocations(meter):
            self.forward = Forward(model, device=device, num_rows=num_rows, shelf=self.shelf, meter=meter)
        self._waiting: deque[ServedRequest] = deque()
        self._running: list[Row] = []
        self.failed: list[tuple[str, OutOfDeviceMemory]] = []
        """Requests that did not fit after all, with why; whoever reads it empties it."""

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all that run, at their full lengths."""
        return sum(row.kv_bytes for row in self._running)

    def submit(self, request: ServedRequest) -> None:
        """Queue a request. Raises InvalidWorkload for one that could never be let in."""
        if not request.token_ids:
            raise _refused("the prompt makes no tokens", value=0, limit=1)
        if request.adapter not in self.shelf:
            raise _refused(f"adapter {request.adapter} is not held", value=request.adapter, limit=None)
        if request.num_tokens > self.max_tokens:
            raise _refused(
                f"the prompt has {len(request.token_ids):,} tokens and {request.sampling.max_new_tokens:,} more are asked for, "
                f"{request.num_tokens:,} in all; this model is held for at most {self.max_tokens:,}",
                value=request.num_tokens,
                limit=self.max_tokens,
            )
        needed = self.forward.kv_bytes(request.num_tokens)
        if needed > self.kv_limit_bytes:
            raise _refused(
                f"the keys and values of {request.num_tokens:,} tokens take {format_bytes(needed)}; the budget leaves "
                f"{format_bytes(self.kv_limit_bytes)} for them",
                value=needed,
                limit=self.kv_limit_bytes,
            )
        self._waiting.append(request)

    def drop(self, request_id: str) -> bool:
        """Forget a request, wherever it is; its memory is free at once. False where it is not there."""
        kept = [row for row in self._running if row.request.id != request_id]
        waiting = [request for request in self._waiting if request.id != request_id]
        was_there = len(kept) + len(waiting) < len(self._running) + len(self._waiting)
        self._running, self._waiting = kept, deque(waiting)
        return was_there

    def step(self) -> list[Made]:
        """Let one request in, if there is one and room for it, and make one token more for each that ran before."""
        others = list(self._running)
        made = self._let_in()
        if others:
            made += self._decode(others)
        ended = {each.id for each in made if each.finish_reason}
        self._running = [row for row in self._running if row.request.id not in ended]
        return made

    def _let_in(self) -> list[Made]:
        if not self._waiting or len(self._running) >= self.num_rows:
            return []
        request = self._waiting[0]
        needed = self.forward.kv_bytes(request.num_tokens)
        if self.kv_bytes + needed > self.kv_limit_bytes:
            return []
        self._waiting.popleft()
        try:
            with count_allocations(self._meter):
                mark_phase(self._meter, "prefill")
                row = Row(request, self.forward.make_cache(request.num_tokens), kv_bytes=needed)
                made = row.take(self.forward.prefill(request.token_ids, cache=row.cache, adapter=request.adapter))
        except OutOfDeviceMemory as error:
            self.failed.append((request.id, error))
            return []
        self._running.append(row)
        return [made]

    def _decode(self, rows: Sequence[Row]) -> list[Made]:
        is_counted = self._counting.is_due(self._num_steps)
        self._num_steps += 1
        with count_allocations(self._meter, is_counted=is_counted):
            mark_phase(self._meter, "decode")
            logits = self.forward.decode(rows)
            return [row.take(logits[index]) for index, row in enumerate(rows)]


def _refused(message: str, *, value: object, limit: int | None) -> InvalidWorkload:
    return InvalidWorkload(
        message,
        field="messages",
        value=str(value),
        allowed=None if limit is None else {"maximum": limit},
        hint="Send less, ask for fewer tokens, or hold the model with a larger budget.",
    )
