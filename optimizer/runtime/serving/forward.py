"""Forward passes of a served model: a prompt alone, then the newest token of all rows.

Rows go through the model together, in a batch that always has the same number of rows: products of one shape are made by one
kernel, which sums each row in one order, so that a row's numbers are the same to the last bit whoever else is served. A model
whose blocks cannot be asked for attention (``row_attention.py``) runs one row after the other, which a trial finds out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from optimizer.models.anatomy import find_anatomy
from optimizer.runtime.generation.kv_cache import KvCache, find_windows
from optimizer.runtime.meter.meter import Meter, set_region
from optimizer.runtime.serving.adapters import AdapterShelf
from optimizer.runtime.serving.row import Row, ServedRequest
from optimizer.runtime.serving.row_attention import RowsCache, RowsNotSupportedError, attending_by_row

_TRIAL_LENGTHS = (3, 5)
_TRIAL_TOLERANCE = 0.02
"""Share of the largest logit: two kernels differ by less, in 16 bits too; a wrong position or a wrong key by much more."""


class Forward:
    """A model, ready to be asked for logits. Raises InvalidModel for one that keeps more than keys and values."""

    def __init__(
        self, model: nn.Module, *, device: torch.device, num_rows: int, shelf: AdapterShelf, meter: Meter | None
    ) -> None:
        self._model = model
        self._device = device
        self._num_rows = num_rows
        self._shelf = shelf
        self._meter = meter
        self._windows = find_windows(model)
        self._anatomy = find_anatomy(model)
        self.runs_rows_together = True
        self.kv_bytes_per_token = self._measure_kv()
        self.runs_rows_together = self._try_rows()

    def make_cache(self, num_tokens: int) -> KvCache:
        return KvCache(self._windows, capacity=num_tokens, meter=self._meter)

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes of the cache of a sequence of so many tokens: a block with a window keeps no more than that."""
        kept = [num_tokens if window is None else min(num_tokens, window) for window in self._windows]
        return sum(one * num for one, num in zip(self.kv_bytes_per_token, kept, strict=True))

    @torch.no_grad()
    def prefill(self, ids: Sequence[int], *, cache: KvCache, adapter: str) -> torch.Tensor:
        """Logits [vocabulary] after a prompt, whose keys and values are then in ``cache``."""
        with self._shelf.switched([adapter]):
            return self._logits(torch.tensor([ids], device=self._device), cache=cache)[0]

    @torch.no_grad()
    def decode(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [rows, vocabulary] after each row's newest token."""
        if not self.runs_rows_together:
            return torch.stack([self._decode_one(row) for row in rows])
        ids, positions = ([*values, *[values[0]] * (self._num_rows - len(rows))] for values in _columns(rows))
        cache = RowsCache([row.cache for row in rows])
        names = [row.request.adapter for row in rows]
        with self._shelf.switched([*names, *[""] * (self._num_rows - len(rows))]), attending_by_row(self._model.config):
            logits = self._logits(
                torch.tensor(ids, device=self._device).unsqueeze(1),
                cache=cache,
                position_ids=torch.tensor(positions, device=self._device).unsqueeze(1),
            )
        cache.check_attended()
        return logits[: len(rows)]

    def _decode_one(self, row: Row) -> torch.Tensor:
        with self._shelf.switched([row.request.adapter]):
            return self._logits(torch.tensor([[row.newest_id]], device=self._device), cache=row.cache)[0]

    def _logits(self, ids: torch.Tensor, *, cache: Any, **positions: torch.Tensor) -> torch.Tensor:
        set_region(self._meter, "activations")
        found = self._anatomy.backbone(input_ids=ids, past_key_values=cache, use_cache=True, **positions)
        last = found.last_hidden_state[:, -1].clone()
        del found
        set_region(self._meter, "logits_and_loss")
        return self._anatomy.compute_logits(last)

    def _measure_kv(self) -> list[int]:
        """Bytes of one token's keys and values, by block."""
        cache = self.make_cache(1)
        self.prefill([0], cache=cache, adapter="")
        layers: list[Any] = [*cache.layers]
        return [_bytes_of(layer.keys) + _bytes_of(layer.values) for layer in layers]

    def _try_rows(self) -> bool:
        """Compare rows together with rows alone, where the model takes positions and lets others attend."""
        if self._num_rows < 2:
            return False
        rows: list[Row] = []
        alone: list[Row] = []
        for length in _TRIAL_LENGTHS:
            ids = tuple(range(1, length + 1))
            for found in (rows, alone):
                row = Row(ServedRequest(id="trial", token_ids=ids), self.make_cache(length + 1), kv_bytes=0)
                row.take(self.prefill(ids, cache=row.cache, adapter=""))
                found.append(row)
        try:
            together = self.decode(rows)
        except (RowsNotSupportedError, TypeError, ValueError, RuntimeError, AttributeError, IndexError):
            return False
        expected = torch.stack([self._decode_one(row) for row in alone])
        return bool((together - expected).abs().max() <= _TRIAL_TOLERANCE * expected.abs().max().clamp(min=1e-6))


def _columns(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    return [row.newest_id for row in rows], [row.position for row in rows]


def _bytes_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
