"""Costs of bringing ranks together that train alone for some steps: bytes on the host, bytes on links, milliseconds. Torch-free.

``runtime/ranks/outer_step.py`` says what happens. Weights are read and written over the link between device and host, in turn
with what the host computes and with what crosses between ranks; nothing of it runs beside compute.

Connections have been idle since the last synchronization, so the first bytes cross slowly.

*Not modelled*: buckets of one synchronization beside each other, which the runtime does not do; rounds so short that TCP still
remembers its window.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Final

from optimizer.estimate.categories.network import Exchange, Network, restart_ms
from optimizer.estimate.categories.optimizer_state import host_bytes_per_s
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.collectives.gloo import Call
from optimizer.estimate.memo import Table
from optimizer.estimate.tasks.transfers import Legs
from optimizer.formats.outer_step import SENT_BYTES, count_host_bytes, count_scales, list_buckets
from optimizer.formats.transfer_sizes import PIECE_ELEMENTS, SCALE_BYTES
from optimizer.hardware.rates import Rates
from optimizer.plan.devices.layout import SyncFormat, SyncRule
from optimizer.plan.plan import Plan

_READ_BYTES: Final = 12 + 8
"""Host memory that is read and written for each element before differences cross: subtracted, weighed."""
_ENCODED_BYTES: Final[dict[SyncFormat, int]] = {"fp32": 0, "bf16": 6, "int8": 4 + 8 + 8 + 5}
_DECODED_BYTES: Final[dict[SyncFormat, int]] = {"fp32": 0, "bf16": 6, "int8": 5 + 8}
_UPDATED_BYTES: Final[dict[SyncRule, int]] = {"average": 12, "nesterov": 8 + 12 + 12 + 12}
"""After that: the common weights; before them momentum shrunk and added to, and Nesterov's sum."""
_FP32_BYTES: Final = 4
_KNOWN: Final[Table[Hashable, "OuterCosts"]] = Table()


@dataclass(frozen=True, kw_only=True)
class OuterCosts:
    """One synchronization of a rank."""

    sync_every: int
    host_bytes: int
    """On the host all the while."""
    written_bytes: int
    """On the host for a moment, while weights are written."""
    sent_bytes: tuple[int, ...]
    """Bytes that each rank gives to its connections."""
    before: Legs
    """Copies and work before ranks exchange, one after the other."""
    exchange_ms: float
    after: Legs

    @property
    def mean_sent_bytes(self) -> tuple[int, ...]:
        """The same for a step, on average."""
        return tuple(round(num_bytes / self.sync_every) for num_bytes in self.sent_bytes)


def estimate_outer(tensors: TensorList, *, network: Network, plan: Plan, rates: Rates, trains_all: bool) -> OuterCosts:
    """tensors: all that are trained. rates: of a rank's part of the machine. trains_all: False under adapters."""
    key = (network, plan.layout, plan.weights, plan.optimizer_state, rates.fingerprint, trains_all)
    return _KNOWN.obtain(tensors, key, lambda: _estimate(tensors, network, plan, rates, trains_all=trains_all))


def list_outer_exchanges(num_elements: int, sync_format: SyncFormat) -> Iterator[Exchange]:
    """The exchanges of a synchronization, over the hosts. num_elements: of all trained tensors."""
    for bucket in list_buckets(num_elements):
        if sync_format == "int8":
            yield _all_reduce(SCALE_BYTES * count_scales(len(bucket)), element_bytes=SCALE_BYTES)
        size = SENT_BYTES[sync_format]
        yield _all_reduce(size * len(bucket), element_bytes=size)


def _all_reduce(num_bytes: int, *, element_bytes: int) -> Exchange:
    return Exchange(Call(collective="all_reduce", num_bytes=num_bytes, element_bytes=element_bytes), 1, is_on_host=True)


def _estimate(tensors: TensorList, network: Network, plan: Plan, rates: Rates, *, trains_all: bool) -> OuterCosts:
    layout, weights, host = plan.layout, plan.weights, network.between_hosts
    exchanges = [each.call for each in list_outer_exchanges(tensors.total_elements, layout.sync_format)]
    sent = [host.sent_by_rank(call) for call in exchanges]
    away = _list_away(tensors, plan, trains_all=trains_all)
    on_device = tensors.total_elements - sum(compress(tensors.num_elements, away))
    is_finer = weights.master_bytes_per_element > 0
    read_bytes = on_device * weights.updated_bytes_per_element
    written_bytes = on_device * (weights.bytes_per_element + weights.master_bytes_per_element)
    memory_bytes_per_s = host_bytes_per_s(rates)

    def host_ms(bytes_each: int) -> float:
        return 1000 * bytes_each * tensors.total_elements / memory_bytes_per_s

    return OuterCosts(
        sync_every=layout.sync_every,
        host_bytes=count_host_bytes(
            tensors.total_elements,
            sync_format=layout.sync_format,
            sync_rule=layout.sync_rule,
            weight_bytes=weights.bytes_per_element,
            are_rounded=weights.bytes_per_element < _FP32_BYTES and not is_finer,
        ),
        written_bytes=_piece_bytes(list(compress(tensors.num_elements, away)), weights.updated_bytes_per_element),
        sent_bytes=tuple(round(sum(each[rank] for each in sent)) for rank in range(network.num_ranks)),
        before=(
            ("copy_out", 1000 * read_bytes / rates.device_to_host_bytes_per_s),
            ("host", host_ms(_READ_BYTES + _ENCODED_BYTES[layout.sync_format])),
        ),
        exchange_ms=sum(
            1000 * host.seconds("all_reduce", call.num_bytes, element_bytes=call.element_bytes) for call in exchanges
        )
        + restart_ms(network, max(round(sum(each)) for each in zip(*sent, strict=True))),
        after=(
            ("host", host_ms(_DECODED_BYTES[layout.sync_format] + _UPDATED_BYTES[layout.sync_rule])),
            ("copy_in", 1000 * written_bytes / rates.host_to_device_bytes_per_s),
        ),
    )


def _list_away(tensors: TensorList, plan: Plan, *, trains_all: bool) -> list[bool]:
    """Flags of tensors whose new weights are written on the host: at home there, or with their state there."""
    leaving = tensors.list_leaving(plan.optimizer_state)
    streams = trains_all and plan.weights.place != "device"
    in_blocks = (streams and 0 <= block < tensors.num_blocks for block in tensors.blocks)
    return [is_leaving or is_home for is_leaving, is_home in zip(leaving, in_blocks, strict=True)]


def _piece_bytes(sizes: list[int], element_bytes: int) -> int:
    """Bytes of the pieces of the largest tensor that are there at once: one is made while the one before is still there."""
    largest = max(sizes, default=0)
    return element_bytes * (min(largest, PIECE_ELEMENTS) + min(max(0, largest - PIECE_ELEMENTS), PIECE_ELEMENTS))
