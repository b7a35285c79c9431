"""Bytes that a link carries for what ranks send: TCP's, IP's and Ethernet's headers, and acknowledgements. Torch-free.

Sources: RFC 894 (Ethernet, 14 bytes), RFC 791 (IPv4, 20), RFC 9293 and RFC 7323 (TCP, 20, and 12 for timestamps, which Linux
sends); RFC 5681, section 4.2: at least every second full frame is acknowledged. gloo turns Nagle's algorithm off (``pair.cc``),
so each message begins a frame of its own.

*Not modelled*: what is sent again, and several messages in one frame, which saves headers where a link is busy.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from optimizer.estimate.collectives.gloo import PREAMBLE_BYTES, Call, list_actions


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The frames in which a link carries what is given to TCP."""

    content_bytes: int
    """Most bytes of content in a frame."""
    header_bytes: int
    acknowledged: int
    """Full frames for each acknowledgement; 0 where none crosses."""

    def count(self, num_bytes: int) -> int:
        """Frames of one message."""
        return max(1, -(-num_bytes // self.content_bytes))


ETHERNET: Final = Frame(content_bytes=1448, header_bytes=66, acknowledged=2)


@lru_cache(maxsize=4096)
def count_framed_bytes(call: Call, num_ranks: int, frame: Frame) -> tuple[int, ...]:
    """By rank: bytes that leave its interface for one collective."""
    sent = [0] * num_ranks
    for rank in range(num_ranks):
        for action, times in Counter(list_actions(call, rank, num_ranks)).items():
            content_bytes = PREAMBLE_BYTES + action.num_bytes
            if action.what == "send":
                num_frames = 1 + frame.count(content_bytes)
                sent[rank] += times * (PREAMBLE_BYTES + content_bytes + num_frames * frame.header_bytes)
            elif action.what == "receive":
                full = content_bytes // frame.content_bytes
                num_frames = 1 + (full // frame.acknowledged if frame.acknowledged else 0)
                sent[rank] += times * (PREAMBLE_BYTES + num_frames * frame.header_bytes)
    return tuple(sent)
