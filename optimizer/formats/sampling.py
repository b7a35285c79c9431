"""Settings that decide how one prompt is continued: which token is taken each time, and when to stop. Torch-free."""

import math
import reprlib
from dataclasses import dataclass

from optimizer.base.errors import InvalidWorkload
from optimizer.base.shown import shown_value

_MAX_STOP_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings of one request. The default takes the likeliest token each time (greedy)."""

    max_new_tokens: int = 128
    """Most tokens generated, 1 to 131,072; fewer if a stop token comes first."""
    temperature: float = 0.0
    """Divides the logits before a token is drawn, 0 to 100; 0 takes the likeliest and draws nothing."""
    top_k: int = 0
    """Only this many of the likeliest tokens may be drawn; 0 for no such limit."""
    top_p: float = 1.0
    """Only the likeliest tokens, until their probabilities sum to this, may be drawn, above 0 to 1; the likeliest always may."""
    seed: int = 0
    """The same seed draws the same numbers, whatever else runs in the same batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends the sequence, and is its last token; none for a sequence that always has its full length."""

    def __post_init__(self) -> None:
        _require_number("max_new_tokens", self.max_new_tokens, low=1, high=131_072)
        _require_number("top_k", self.top_k, low=0, high=2**31 - 1)
        _require_number("seed", self.seed, low=0, high=2**63 - 1)
        _require_number("temperature", self.temperature, low=0, high=100, is_whole=False)
        _require_number("top_p", self.top_p, low=0, high=1, is_whole=False, low_allowed=False)
        if len(self.stop_token_ids) > _MAX_STOP_TOKENS:
            raise InvalidWorkload(
                f"sampling.stop_token_ids has {len(self.stop_token_ids):,} tokens; allowed: at most {_MAX_STOP_TOKENS:,}",
                field="sampling.stop_token_ids",
                value=len(self.stop_token_ids),
                allowed={"maximum": _MAX_STOP_TOKENS},
            )
        for token in self.stop_token_ids:
            _require_number("stop_token_ids", token, low=0, high=2**31 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _require_number(
    name: str, value: object, *, low: int, high: int, is_whole: bool = True, low_allowed: bool = True
) -> None:
    kinds = int if is_whole else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (value == low and not low_allowed):  # type: ignore[operator]
        kind = "an integer" if is_whole else "a number"
        opening = "from" if low_allowed else "above"
        raise InvalidWorkload(
            f"sampling.{name} is {reprlib.repr(value)}; allowed: {kind} {opening} {low:,} to {high:,}",
            field=f"sampling.{name}",
            value=shown_value(value),
            allowed={"minimum": low, "maximum": high},
        )
