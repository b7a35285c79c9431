"""Volumes and times of what ranks exchange in a step: gradients, norms and new weights. Torch-free.

Of S bytes among N ranks, with a link of so many bytes a second in each direction, and a latency for each message in turn:

             NCCL: rings and chains                  gloo (torch's ``third_party/gloo``)
all-reduce   2 (N-1)/N S, 2 (N-1) messages            the same (``allreduce.cc``, ring)
reduce       S through a chain, N-1 messages          ring, then gathered on the owner: as long as an all-reduce (``reduce.cc``)
broadcast    S through a chain, N-1 messages          a binomial tree: S in each of log2 N rounds (``broadcast.cc``)

All-reduce is Patarasuk and Yuan's ring (Bandwidth Optimal All-reduce Algorithms, 2009). Sent by all ranks together: an all-reduce
2 (N-1) S; NCCL's reduce and the broadcasts (N-1) S; gloo's reduce (N-1)(1 + 1/N) S (counted on the loopback interface
with torch 2.13 at 2 and 4 ranks, up to 1 MiB; tensors of 16 MiB gather more than they need, which is not modelled).

Not modelled: NCCL's trees for small messages, and exchanges of ranks that are not there yet, which wait for the slowest.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import LOOPBACK, assumed_link
from optimizer.plan.layout import DeviceLayout
from optimizer.plan.plan import Plan

Collective = Literal["all_reduce", "reduce", "broadcast"]
Backend = Literal["nccl", "gloo"]
_NUMBER_BYTES: Final = 8
"""Numbers on which ranks agree are float64; each rank sends a table with a row for every rank."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The ranks of one machine and the link between them. Hashable, and part of the keys of what depends on it."""

    num_ranks: int
    backend: Backend
    link: PeerLink
    slowdown: float = 1.0
    """Factor by which finished runs correct the network's time."""

    @classmethod
    def of(cls, machine: Machine, layout: DeviceLayout) -> "Network | None":
        """The network of a layout on a whole machine; None on one device."""
        if layout.num_devices == 1:
            return None
        return cls(
            num_ranks=layout.num_devices,
            backend="gloo" if machine.device.kind == "cpu" else "nccl",
            link=assumed_link(machine),
            slowdown=machine.rates.time_factor("network"),
        )

    def seconds(self, collective: Collective, num_bytes: int) -> float:
        """From the moment when the last rank begins until all have what they need."""
        others = self.num_ranks - 1
        if collective == "all_reduce" or (collective == "reduce" and self.backend == "gloo"):
            share, messages = 2 * others / self.num_ranks, 2 * others
        elif self.backend == "gloo":
            share = messages = math.ceil(math.log2(self.num_ranks))
        else:
            share, messages = 1.0, others
        return self.slowdown * (share * num_bytes / self.link.bytes_per_s + messages * self.link.latency_s)

    def sent_bytes(self, collective: Collective, num_bytes: int) -> float:
        """Bytes that a rank sends, the mean of all of them."""
        others = self.num_ranks - 1
        if collective == "all_reduce":
            return 2 * others * num_bytes / self.num_ranks
        gathers = collective == "reduce" and self.backend == "gloo"
        return others * num_bytes * (1 + gathers / self.num_ranks) / self.num_ranks

    def sum_ms(self, collective: Collective, sizes: Iterable[int]) -> float:
        """Milliseconds of one exchange for each size in bytes, one after the other."""
        return 1000 * sum(self.seconds(collective, num_bytes) for num_bytes in sizes)


def gradient_collective(layout: DeviceLayout) -> Collective:
    return "reduce" if layout.shares_state else "all_reduce"


def reduces_each_micro_batch(plan: Plan) -> bool:
    """True if gradients are exchanged after every micro-batch; False if only after the last."""
    return plan.layout.reduces_each_micro_batch or plan.gradients.choice != "keep"


def overlaps(plan: Plan, *, device_kind: str) -> bool:
    """True if gradients travel beside backward and are waited for before clipping; False if compute waits for each."""
    return device_kind == "cuda" and plan.gradients.choice == "keep" and not plan.layout.shares_state


def agreement_ms(network: Network, num_tensors: int) -> float:
    """Milliseconds in which ranks exchange, over the host, what they must agree on: labels, losses and the norms of gradients."""
    table_bytes = _NUMBER_BYTES * network.num_ranks * num_tensors
    return replace(network, backend="gloo", link=LOOPBACK).sum_ms("all_reduce", [0, 0, table_bytes])


def barrier_ms(network: Network) -> float:
    """Milliseconds in which the last of the ranks comes to know that all are there."""
    return replace(network, backend="gloo", link=LOOPBACK).sum_ms("all_reduce", [0])


def estimate_sent_bytes(
    network: Network, num_elements: Sequence[int], plan: Plan, *, num_sent: int | None = None, dealt_bytes: int = 0
) -> int:
    """Bytes that a rank sends in a step, the mean of all of them. num_elements: of every trained tensor. num_sent: elements of
    those whose new weights are sent, where state is shared; all unless given. dealt_bytes: of blocks' weights, each
    of which one rank keeps, as often as they are sent.
    """
    layout, size = plan.layout, plan.weights.bytes_per_element
    times = plan.batch.accumulation_steps if reduces_each_micro_batch(plan) else 1
    total_bytes = size * sum(num_elements)
    sent = times * network.sent_bytes(gradient_collective(layout), total_bytes)
    if layout.shares_state:
        sent += network.sent_bytes("broadcast", total_bytes if num_sent is None else size * num_sent)
    sent += network.sent_bytes("broadcast", dealt_bytes)
    sent += network.sent_bytes("all_reduce", _NUMBER_BYTES * network.num_ranks * len(num_elements))
    return round(sent)
