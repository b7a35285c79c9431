"""One sequence that is served: its request, its own keys and values, and what is drawn for it."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from optimizer.formats.sampling import Sampling
from optimizer.runtime.generation.kv_cache import KvCache
from optimizer.runtime.generation.sampling import Chooser

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """One prompt and how it is continued."""

    id: str
    token_ids: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str = ""
    """Name of a held adapter; empty for the model as it is."""
    num_top: int | None = None
    """Likeliest tokens reported beside each new one, 0 for its own logarithm alone; None reports none."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values it may come to keep: the last one made is never given back to the model."""
        return len(self.token_ids) + self.sampling.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class Made:
    """One new token of one request."""

    id: str
    token_id: int
    logprob: float | None = None
    """Natural logarithm of its probability before temperature and limits."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their logarithms, the likeliest first."""
    finish_reason: FinishReason | None = None
    """Set on a request's last token."""


class Row:
    """A request that runs."""

    def __init__(self, request: ServedRequest, cache: KvCache, *, kv_bytes: int) -> None:
        """kv_bytes: what its cache comes to."""
        self.request = request
        self.cache = cache
        self.kv_bytes = kv_bytes
        self.newest_id = -1
        self.num_made = 0
        self._chooser = None if request.sampling.is_greedy else Chooser(request.sampling)

    @property
    def position(self) -> int:
        """Place of the newest token in the sequence, from 0: whose keys and values are not there yet."""
        return len(self.request.token_ids) + self.num_made - 1

    def take(self, logits: torch.Tensor) -> Made:
        """Choose the next token by ``logits`` [vocabulary]."""
        chosen = logits.argmax()
        if self._chooser is not None:
            self._chooser.draw(logits, into=chosen)
        self.newest_id = int(chosen)
        self.num_made += 1
        logprob, top = self._logprobs(logits)
        sampling = self.request.sampling
        reason: FinishReason | None = "length" if self.num_made >= sampling.max_new_tokens else None
        if self.newest_id in sampling.stop_token_ids:
            reason = "stop"
        return Made(id=self.request.id, token_id=self.newest_id, logprob=logprob, top=top, finish_reason=reason)

    def _logprobs(self, logits: torch.Tensor) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        if self.request.num_top is None:
            return None, ()
        scores = logits.to(torch.float32).log_softmax(dim=-1)
        logprob = float(scores[self.newest_id])
        if not self.request.num_top:
            return logprob, ()
        values, tokens = scores.topk(min(self.request.num_top, len(scores)))
        return logprob, tuple(zip(tokens.tolist(), values.tolist(), strict=True))
