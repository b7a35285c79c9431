"""Rates at which the host attends to keys and values that lie there, by how many queries share them, as the runtime does it."""

from functools import partial

import torch

from optimizer.formats.host_attention import HostAttention
from optimizer.formats.kv_packing import KvLayout, KvShape
from optimizer.hardware.curves import Curve
from optimizer.hardware.probe.clock import TimeShare, as_curve, quartile_s, random_tensor
from optimizer.runtime.generation.kv_host_attention import HostSums

_CPU = torch.device("cpu")
_GROUPS = (1, 4, 8)
"""Queries to a key."""
_NUM_TOKENS, _NUM_SEQUENCES, _NUM_HEADS, _DIM = 512, 4, 4, 64
_TOTAL_BYTES = 64 << 20
"""Bytes of all blocks' records, each of which is read in turn: none is in the processor's cache when it is read again."""


def probe_host_attention(dtypes: dict[str, torch.dtype], *, max_s: float) -> dict[str, Curve]:
    """FLOPs per second by FLOPs for each byte of keys and values, by their dtype."""
    share = TimeShare(max_s)
    points: dict[str, list[tuple[float, float]]] = {}
    num_left = len(dtypes) * len(_GROUPS)
    for name, dtype in dtypes.items():
        layout = _layout(dtype.itemsize)
        homes = _make_homes(layout.store_bytes, dtype)
        for group in _GROUPS:
            host = HostAttention(kept=layout, num_query_heads=group * _NUM_HEADS)
            run = partial(_attend, host, homes, dtype)
            seconds = quartile_s(run, _CPU, max_s=share.part_s(num_left)) / len(homes)
            flops = host.num_flops(_NUM_TOKENS)
            points.setdefault(name, []).append((flops / layout.store_bytes, flops / seconds))
            num_left -= 1
    return {name: as_curve(found) for name, found in points.items()}


def _attend(host: HostAttention, homes: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Compute attention for a token in each block."""
    room = torch.zeros(host.num_bytes, dtype=torch.uint8)
    for home in homes:
        HostSums(host, room, home, dtype=dtype).attend(_NUM_TOKENS, scaling=1.0, softcap=None)


def _layout(element_bytes: int) -> KvLayout:
    shape = KvShape(
        batch_size=_NUM_SEQUENCES, num_heads=_NUM_HEADS, key_dim=_DIM, value_dim=_DIM, element_bytes=element_bytes
    )
    return KvLayout(shape=shape, dtype="same", capacity=_NUM_TOKENS, window=None)


def _make_homes(num_bytes: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Each block's records, drawn once: what they hold takes no other time."""
    drawn = random_tensor((num_bytes // dtype.itemsize,), _CPU, dtype).view(torch.uint8)
    return [drawn.clone() for _ in range(max(2, _TOTAL_BYTES // num_bytes))]
