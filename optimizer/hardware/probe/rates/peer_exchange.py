"""One of several processes that exchange tensors for a moment, through the same groups as ranks of a job: times their link.

``python -m optimizer.hardware.probe.rates.peer_exchange`` reads a line of JSON (rank, num_ranks, folder, device, max_s) and
prints one: seconds of an all-reduce by its bytes, the median of those that the time allowed.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

from optimizer.runtime.ranks.group import RankPlace, Ranks

SMALL_BYTES: Final = 1 << 10
LARGE_BYTES: Final = 16 << 20
SIZES: Final = (SMALL_BYTES, 64 << 10, 1 << 20, 4 << 20, LARGE_BYTES)
_TIMEOUT_S: Final = 60.0
_LEAST: Final = 3
_MOST: Final = 200


def time_exchanges(ranks: Ranks, *, device: torch.device, max_s: float) -> dict[int, float]:
    """By bytes: seconds until this one has the sum."""
    found = {}
    for num_bytes in SIZES:
        tensor = torch.ones(num_bytes // 4, device=device)
        _time_one(ranks, tensor)
        first_s = _time_one(ranks, tensor)
        # As often on each, by what the first of them found.
        (mean_s,) = ranks.from_first([first_s])
        number = min(_MOST, max(_LEAST, int(max_s / len(SIZES) / mean_s)))
        found[num_bytes] = statistics.median(_time_one(ranks, tensor) for _ in range(number))
    return found


def _time_one(ranks: Ranks, tensor: torch.Tensor) -> float:
    begin_s = time.perf_counter()
    ranks.all_reduce_(tensor)
    ranks.settle()
    return time.perf_counter() - begin_s


def main() -> int:
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    device = torch.device(asked["device"])
    place = RankPlace(rank=asked["rank"], num_ranks=asked["num_ranks"], folder=Path(asked["folder"]), timeout_s=_TIMEOUT_S)
    with Ranks(place, device=device) as ranks:
        found = time_exchanges(ranks, device=device, max_s=asked["max_s"])
        ranks.barrier()
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
