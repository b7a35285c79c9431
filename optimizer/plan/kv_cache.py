"""What can be decided about the cache of keys and values: the representation, and where it lives between uses."""

from dataclasses import dataclass
from typing import Literal

KvDtype = Literal["same"]
KvPlace = Literal["device"]


@dataclass(frozen=True, kw_only=True)
class KvCachePlan:
    """Keys and values of every token so far, by block; blocks with a sliding window hold no more than the window."""

    dtype: KvDtype = "same"
    """Of keys and values as the cache holds them: that of the weights."""
    place: KvPlace = "device"
    """Where they are between uses. They are allocated at their full length with the prompt, and never grow."""
