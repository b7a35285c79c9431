"""The link between the devices of the machine, measured by processes that exchange tensors as its ranks do: over gloo and the
loopback on the CPU device, over NCCL between cards.

From the seconds of all-reduces follow what the estimate asks for (``estimate/collectives``). Of N ranks the smallest takes
2 (N-1) messages in turn, over gloo each with a notice before it; a larger one beside that 2 (N-1)/N of its bytes, and over gloo a
notice for each segment that goes around. Where nothing can be exchanged the link is what the table or the driver says.

*Not modelled*: more than ``_MOST_PROCESSES`` that exchange at once, and fewer, which share switches and cores with fewer others.
"""

import contextlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from optimizer.base.errors import InvalidInput
from optimizer.hardware.devices import find_device
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import assumed_link, link_of_kind, peer_link_of
from optimizer.hardware.probe.rates.peer_exchange import LARGE_BYTES, SMALL_BYTES

_MODULE: Final = "optimizer.hardware.probe.rates.peer_exchange"
_START_S: Final = 120.0
"""Longest that processes take to start, find each other and exchange, beside the time that is to be measured."""
_SEGMENT_BYTES: Final = 1 << 20
"""Most of an all-reduce over gloo that goes around at once; every rank makes at least two."""
_MOST_PROCESSES: Final = 8


def probe_peers(machine: Machine, *, max_s: float) -> PeerLink | None:
    """The link between devices of the machine, whose own field for it is not read. None on one device."""
    if machine.total_devices == 1:
        return None
    is_cuda = machine.device.kind == "cuda"
    assumed = _link_of_cards(machine) if is_cuda else assumed_link(replace(machine, peers=None))
    number = min(machine.total_devices, _MOST_PROCESSES)
    devices = [f"cuda:{index}" for index in _card_indices(machine)[:number]] if is_cuda else ["cpu"] * number
    try:
        seconds = time_processes(devices, max_s=max_s)
    except (OSError, subprocess.SubprocessError, ValueError):
        return assumed
    return measured_link(seconds, assumed, num_ranks=number, is_gloo=not is_cuda)


def measured_link(seconds: Mapping[int, float], assumed: PeerLink, *, num_ranks: int, is_gloo: bool) -> PeerLink:
    """The link on which the ranks' all-reduces take these seconds, by bytes."""
    others = num_ranks - 1
    latency_s = seconds[SMALL_BYTES] / (2 * others * (1 + is_gloo))
    rates = {}
    for size, took_s in sorted(seconds.items()):
        num_waits = 2 * others
        if is_gloo:
            num_segments = max(2 * num_ranks, num_ranks * math.ceil(size / _SEGMENT_BYTES / num_ranks))
            num_waits = 2 * (num_segments - num_segments // num_ranks)
        # Of a size whose messages wait longer than its bytes take only that much is known.
        rates[size] = 2 * others / num_ranks * size / max(took_s - num_waits * latency_s, took_s / 2)
    del rates[SMALL_BYTES]
    return replace(
        assumed,
        bytes_per_s=rates[LARGE_BYTES],
        latency_s=latency_s,
        source="measured",
        bytes_per_s_by_size=tuple((float(size), rate) for size, rate in rates.items()),
    )


def time_processes(devices: list[str], *, max_s: float) -> dict[int, float]:
    """Seconds of all-reduces by bytes. Raises OSError, SubprocessError or ValueError where a process cannot start or ends
    early.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                cwd=Path(__file__).resolve().parents[4],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for _ in devices
        ]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        for rank, (process, device) in enumerate(zip(processes, devices, strict=True)):
            assert process.stdin is not None
            asked = {"rank": rank, "num_ranks": len(devices), "folder": folder, "device": device, "max_s": max_s}
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=_START_S + max_s)[0] for process in processes]
    return {int(size): float(took_s) for size, took_s in json.loads(answers[0]).items()}


def _link_of_cards(machine: Machine) -> PeerLink:
    """NVLink where links of the card are up, PCIe where its driver lets it read another's memory, else through the host."""
    index, places = machine.device.index, _card_indices(machine)
    if all(torch.cuda.can_device_access_peer(one, other) for one in places for other in places if one != other):
        with contextlib.suppress(InvalidInput):  # of a card that is not in the table, and so without a rate
            spec = find_device(machine.device.name)
            has_nvlink = not machine.others and _has_nvlink(index)
            return peer_link_of(spec, num_cards=len(places)) if has_nvlink else link_of_kind(spec, "pcie")
    return assumed_link(replace(machine, peers=None))


def count_on_one_switch(machine: Machine) -> int:
    """The most cards of the machine that share one PCIe link to the host, as the vendor's library says; 1 where it does not
    answer.
    """
    import pynvml

    places = _card_indices(machine) if machine.device.kind == "cuda" else []
    with contextlib.suppress(pynvml.NVMLError):
        cards = [_handle_of(index) for index in places]
        return max((sum(_share_a_switch(card, other) for other in cards if other is not card) + 1 for card in cards), default=1)
    return 1


def _share_a_switch(card: Any, other: Any) -> bool:
    import pynvml

    return bool(pynvml.nvmlDeviceGetTopologyCommonAncestor(card, other) <= pynvml.NVML_TOPOLOGY_MULTIPLE)


def _handle_of(index: int) -> Any:
    """The vendor library's card behind torch's index. Raises NVMLError."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def _card_indices(machine: Machine) -> list[int]:
    """torch's indices of all cards, by kind."""
    return [
        index
        for kind in machine.kinds
        for index in kind.device.indices or range(kind.device.index, kind.device.index + kind.num_devices)
    ]


def _has_nvlink(index: int) -> bool:
    """True if the vendor's library says that a link of the card is up; false where it does not answer."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        return bool(pynvml.nvmlDeviceGetNvLinkState(_handle_of(index), 0))
    return False


def count_like_cards(index: int) -> int:
    """Cards from this one on that are like it: torch's numbers without a gap, so that each is named by its place."""
    cards = [_card_of(other) for other in range(index, torch.cuda.device_count())]
    return next((place for place, card in enumerate(cards) if card != cards[0]), len(cards))


def _card_of(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.total_memory
