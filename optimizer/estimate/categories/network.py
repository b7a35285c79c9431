"""Volumes and times of what ranks exchange in a step: gradients, norms and new weights. Torch-free.

Of S bytes among N ranks, with a link of so many bytes a second in each direction, and a latency for each message in turn, NCCL's
rings and chains take

all-reduce   2 (N-1)/N S, 2 (N-1) messages
reduce       S through a chain, N-1 messages
broadcast    S through a chain, N-1 messages

All-reduce is Patarasuk and Yuan's ring (Bandwidth Optimal All-reduce Algorithms, 2009). Sent by all ranks together: an all-reduce
2 (N-1) S; NCCL's reduce and the broadcasts (N-1) S. With several replicas of what ranks share out, reduce and broadcasts are of
one replica's ranks, over their own link, and an all-reduce of a tensor's owners follows, one in each replica. gloo's collectives
are run by the clock, and their messages counted (``estimate/collectives``): its reduce ends with a gathering and, from 2 MiB for
each rank on, sends more than it needs.

Bytes are those that ranks give to their connections. Beside them a link carries TCP's, IP's and Ethernet's headers:
``estimate_framed_bytes``
adds them.

Not modelled: NCCL's trees for small messages, and exchanges of ranks that are not there yet, which wait for the slowest.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, NamedTuple

from optimizer.estimate.collectives.framing import ETHERNET, Frame, count_framed_bytes
from optimizer.estimate.collectives.gloo import PREAMBLE_BYTES, Call, count_sent_bytes
from optimizer.estimate.collectives.over_links import simulate_seconds
from optimizer.formats.ownership import assign_owners
from optimizer.hardware.machine import Machine, PeerLink
from optimizer.hardware.peers import LOOPBACK, assumed_link
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.plan import Plan

Collective = Literal["all_reduce", "reduce", "broadcast"]
Backend = Literal["nccl", "gloo"]
Among = Literal["all", "replica", "owners"]
_FIRST_WINDOW_BYTES: Final = 10 * 1460
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
    replicas: int = 1
    """Replicas of what the ranks share (``DeviceLayout.replicas``)."""
    link_within: PeerLink | None = None
    """The link between the ranks of a replica, where that is another."""

    @classmethod
    def of(cls, machine: Machine, layout: DeviceLayout) -> "Network | None":
        """The network of a layout on a whole machine; None on one device."""
        if layout.num_devices == 1:
            return None
        link, within = assumed_link(machine), machine.peers_within
        if within is not None and link.kind != "network" and layout.num_devices <= machine.num_within:
            link = within
        return cls(
            num_ranks=layout.num_devices,
            backend="gloo" if machine.device.kind == "cpu" else "nccl",
            link=link,
            slowdown=machine.rates.time_factor("network"),
            replicas=layout.replicas,
            link_within=within if layout.replicas > 1 and layout.num_sharing <= machine.num_within else None,
        )

    @property
    def within(self) -> "Network":
        """The ranks of one replica, over their own link."""
        if self.replicas == 1:
            return self
        link = self.link_within or self.link
        return replace(self, num_ranks=self.num_ranks // self.replicas, replicas=1, link=link, link_within=None)

    @property
    def across(self) -> "Network":
        """The ranks that own the same tensor, one in each replica."""
        return replace(self, num_ranks=self.replicas, replicas=1, link_within=None)

    @property
    def between_hosts(self) -> "Network":
        """The same ranks where they agree on numbers, which goes through gloo on cards, too."""
        if self.backend == "gloo":
            return self
        return replace(self, backend="gloo", link=self.link if self.link.kind == "network" else LOOPBACK)

    def seconds(self, collective: Collective, num_bytes: int, *, element_bytes: int = 4, owner: int = 0) -> float:
        """From the moment when the last rank begins until all have what they need."""
        if self.backend == "gloo":
            return self._run([_call(collective, num_bytes, element_bytes, owner)])
        others = self.num_ranks - 1
        share, messages = (2 * others / self.num_ranks, 2 * others) if collective == "all_reduce" else (1.0, others)
        link = self.link.at_size(num_bytes)
        return self.slowdown * (share * num_bytes / link.bytes_per_s + messages * link.latency_s)

    def sent_bytes(self, collective: Collective, num_bytes: int, *, element_bytes: int = 4, owner: int = 0) -> float:
        """Bytes that a rank sends, the mean of all of them."""
        return sum(self.sent_by_rank(_call(collective, num_bytes, element_bytes, owner))) / self.num_ranks

    def sent_by_rank(self, call: Call) -> tuple[float, ...]:
        """Bytes that each rank sends. NCCL's rings and chains are taken to load all alike."""
        if self.backend == "gloo":
            return count_sent_bytes(call, self.num_ranks)
        times = 2 if call.collective == "all_reduce" else 1
        return (times * (self.num_ranks - 1) * call.num_bytes / self.num_ranks,) * self.num_ranks

    def sum_ms(
        self, collective: Collective, sizes: Iterable[int], *, element_bytes: int = 4, owners: Sequence[int] = ()
    ) -> float:
        """Milliseconds of one exchange for each size in bytes, one after the other. owners: of each; rank 0 unless given."""
        sizes = list(sizes)
        given = [*owners, *[0] * (len(sizes) - len(owners))]
        if self.backend == "gloo" and collective == "broadcast":
            # A rank that has sent what it owns goes on to the next one.
            calls = [_call(collective, size, element_bytes, owner) for size, owner in zip(sizes, given, strict=True)]
            return 1000 * self._run(calls)
        return 1000 * sum(
            self.seconds(collective, size, element_bytes=element_bytes, owner=owner)
            for size, owner in zip(sizes, given, strict=True)
        )

    def _run(self, calls: Sequence[Call]) -> float:
        # Several at the rate of the size that most of their bytes have.
        num_bytes = sum(call.num_bytes for call in calls)
        size = sum(call.num_bytes**2 for call in calls) / num_bytes if num_bytes else 0
        return self.slowdown * simulate_seconds(tuple(calls), self.num_ranks, self.link.at_size(size))


def _call(collective: Collective, num_bytes: int, element_bytes: int, owner: int) -> Call:
    # In a ring all places are alike.
    owner = 0 if collective == "all_reduce" else owner
    return Call(collective=collective, num_bytes=num_bytes, element_bytes=element_bytes, owner=owner)


def gradient_collective(layout: DeviceLayout) -> Collective:
    return "reduce" if layout.shares_state else "all_reduce"


def reduces_each_micro_batch(plan: Plan) -> bool:
    """True if gradients are exchanged after every micro-batch; False if only after the last."""
    return plan.layout.reduces_each_micro_batch or plan.gradients.choice != "keep"


def overlaps(plan: Plan, *, device_kind: str) -> bool:
    """True if gradients travel beside backward and are waited for before clipping; False if compute waits for each.

    On the CPU device it does wait: ``Ranks.all_reduce_`` returns when gloo is done.
    """
    return device_kind == "cuda" and plan.gradients.choice == "keep" and not plan.layout.shares_state


def agreement_ms(network: Network, num_tensors: int, *, num_micro_batches: int = 1) -> float:
    """Milliseconds in which ranks exchange, over the host, what they must agree on: labels, losses and the norms of gradients.
    num_micro_batches: of which labels are counted; 0 where all ranks have the same.
    """
    return network.between_hosts.sum_ms(
        "all_reduce", _table_sizes(network.num_ranks, num_tensors, num_micro_batches), element_bytes=_NUMBER_BYTES
    )


def _table_sizes(num_ranks: int, num_tensors: int, num_micro_batches: int) -> list[int]:
    """Bytes of the tables of labels, of norms and of the loss."""
    return [_NUMBER_BYTES * num_ranks * columns for columns in (num_micro_batches, num_tensors, 1) if columns]


def barrier_ms(network: Network) -> float:
    """Milliseconds in which the last of the ranks comes to know that all are there."""
    host = network.between_hosts
    return 1000 * host.slowdown * simulate_seconds((Call(collective="barrier"),), host.num_ranks, host.link)


def restart_ms(network: Network, num_bytes: int) -> float:
    """Milliseconds that an exchange takes longer over connections that were idle, which TCP lets begin slowly again (RFC 5681,
    section 4.1): from its first window (RFC 6928) the bytes under way double with each round trip until they fill the link.

    num_bytes: that a rank sends. 0 within a machine.
    """
    link = network.between_hosts.link
    if link.kind != "network":
        return 0.0
    round_trip_s = 2 * link.latency_s
    window_bytes = min(num_bytes, link.bytes_per_s * round_trip_s)
    if window_bytes <= _FIRST_WINDOW_BYTES:
        return 0.0
    grown_s = round_trip_s * math.log2(window_bytes / _FIRST_WINDOW_BYTES)
    return 1000 * network.slowdown * max(0.0, grown_s - window_bytes / link.bytes_per_s)


class Exchange(NamedTuple):
    """One of a step's exchanges."""

    call: Call
    times: int
    """Number of times that it comes in a step."""
    is_on_host: bool = False
    """True where ranks agree on numbers, which crosses between their hosts on cards, too."""
    among: Among = "all"
    """The ranks that take part: all, those of each replica, or those at one place in all replicas."""
    place: int = 0
    """That place."""

    def by_rank(self, network: Network, count: Callable[[Network], tuple[float, ...]]) -> list[float]:
        """Bytes that each rank of the network sends. count: those that ranks send who take part, as a network of their own."""
        if network.replicas == 1 or self.among == "all":
            return list(count(network))
        size = network.within.num_ranks
        if self.among == "replica":
            return [*count(network.within)] * network.replicas
        sent = count(network.across)
        return [sent[rank // size] if rank % size == self.place else 0.0 for rank in range(network.num_ranks)]


def exchange_of_dealt(num_bytes: int, *, owner: int, times: int) -> Exchange:
    """The exchanges of a step by which the others get a tensor that one rank keeps, as bytes."""
    return Exchange(_call("broadcast", num_bytes, 1, owner), times, among="replica")


def dealt_ms(network: Network, sizes: Iterable[Sequence[int]], owners: Iterable[Sequence[int]]) -> tuple[float, ...]:
    """Milliseconds in which the others get the tensors of each block, one after the other. sizes: bytes of each, by block."""
    return tuple(
        network.within.sum_ms("broadcast", block, element_bytes=1, owners=keepers)
        for block, keepers in zip(sizes, owners, strict=True)
    )


def list_exchanges(
    num_elements: Sequence[int],
    plan: Plan,
    *,
    are_summed: Sequence[bool] = (),
    are_sent: Sequence[bool] = (),
    dealt: Sequence[Exchange] = (),
) -> Iterator[Exchange]:
    """A step's exchanges, those of one kind together. num_elements: of every trained tensor. are_summed: whether its gradient is
    a sum over the ranks; are_sent: whether its new weights are sent, where state is shared; all unless given. dealt: exchanges of
    weights that one rank keeps (``exchange_of_dealt``).
    """
    yield from dealt
    layout, size = plan.layout, plan.weights.bytes_per_element
    num_ranks, num_steps = layout.num_devices, plan.batch.accumulation_steps
    times = num_steps if reduces_each_micro_batch(plan) else 1
    owners = assign_owners(num_elements, num_ranks=layout.num_sharing) if layout.shares_state else [0] * len(num_elements)
    among: Among = "replica" if layout.shares_state else "all"
    for index, (number, owner) in enumerate(zip(num_elements, owners, strict=True)):
        if not are_summed or are_summed[index]:
            yield Exchange(_call(gradient_collective(layout), size * number, size, owner), times, among=among)
            if layout.shares_state and layout.replicas > 1:
                crossings = times if plan.gradients.choice != "keep" else 1
                yield Exchange(_call("all_reduce", size * number, size, 0), crossings, among="owners", place=owner)
        if layout.shares_state and (not are_sent or are_sent[index]):
            yield Exchange(_call("broadcast", size * number, size, owner), 1, among="replica")
    num_counted = 0 if layout.sees_whole_batch else num_steps
    for table_bytes in _table_sizes(num_ranks, len(num_elements), num_counted):
        yield Exchange(_call("all_reduce", table_bytes, _NUMBER_BYTES, 0), 1, is_on_host=True)
    if plan.gradients.choice == "consume":
        # Losses before each backward, which changes weights.
        yield Exchange(_call("all_reduce", _NUMBER_BYTES * num_ranks, _NUMBER_BYTES, 0), num_steps, is_on_host=True)
    if layout.shares_state and not layout.shares_weights and are_sent and not all(are_sent):
        yield Exchange(Call(collective="barrier"), 1, is_on_host=True)


def crossing_ms(network: Network, num_bytes: int) -> float:
    """Milliseconds in which one rank's tensor comes to another that waits for it."""
    link = network.link.at_size(num_bytes)
    return 1000 * network.slowdown * (num_bytes / link.bytes_per_s + link.latency_s)


def notice_ms(network: Network) -> float:
    """Milliseconds from when a rank is ready to receive until the sender knows, before which gloo sends no content."""
    return 1000 * network.slowdown * network.link.latency_s if network.backend == "gloo" else 0.0


def estimate_staged_bytes(
    network: Network, num_tensors: int, *, ranks: Sequence[RankStages], hidden_bytes: int, num_micro_batches: int
) -> tuple[int, ...]:
    """Bytes that each rank of a cut model gives to its connections in a step. hidden_bytes: of one micro-batch."""
    tables = [
        network.between_hosts.sent_by_rank(_call("all_reduce", table_bytes, _NUMBER_BYTES, 0))
        for table_bytes in _table_sizes(network.num_ranks, num_tensors, 0)
    ]
    # What goes to each neighbour, and over gloo two preambles before it and a notice for what comes back.
    each_bytes = hidden_bytes + (3 * PREAMBLE_BYTES if network.backend == "gloo" else 0)
    num_sent = [sum((not stage.is_first) + (not stage.is_last) for stage in own.stages) for own in ranks]
    return tuple(
        round(num_sent[rank] * num_micro_batches * each_bytes + sum(table[rank] for table in tables))
        for rank in range(network.num_ranks)
    )


def estimate_sent_bytes(
    network: Network,
    num_elements: Sequence[int],
    plan: Plan,
    *,
    are_summed: Sequence[bool] = (),
    are_sent: Sequence[bool] = (),
    dealt: Sequence[Exchange] = (),
) -> tuple[int, ...]:
    """Bytes that each rank gives to its connections in a step; see ``list_exchanges``."""
    sent = [0.0] * network.num_ranks
    for exchange in list_exchanges(num_elements, plan, are_summed=are_summed, are_sent=are_sent, dealt=dealt):
        among = network.between_hosts if exchange.is_on_host else network
        each = exchange.by_rank(among, partial(Network.sent_by_rank, call=exchange.call))
        sent = [total + exchange.times * num_bytes for total, num_bytes in zip(sent, each, strict=True)]
    return tuple(round(num_bytes) for num_bytes in sent)


def estimate_framed_bytes(
    network: Network,
    num_elements: Sequence[int],
    plan: Plan,
    *,
    are_sent: Sequence[bool] = (),
    dealt: Sequence[Exchange] = (),
    frame: Frame = ETHERNET,
) -> tuple[int, ...]:
    """Bytes that leave each rank's interface in a step, headers and acknowledgements among them, over gloo."""
    sent = [0] * network.num_ranks
    for exchange in list_exchanges(num_elements, plan, are_sent=are_sent, dealt=dealt):
        each = exchange.by_rank(network, partial(_count_framed, exchange.call, frame))
        sent = [total + exchange.times * round(num_bytes) for total, num_bytes in zip(sent, each, strict=True)]
    return tuple(sent)


def _count_framed(call: Call, frame: Frame, network: Network) -> tuple[float, ...]:
    return count_framed_bytes(call, network.num_ranks, frame)
