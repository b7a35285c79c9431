"""Costs of blocks that keep their weights elsewhere (``runtime/step/weights.py``): a task before each block's own."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import CATEGORIES, LANES, Lane, Link
from optimizer.estimate.categories.stores import STORE_LANES, STORE_LINKS, reach_ms, read_ms
from optimizer.estimate.ops.op_times import weights_python_s
from optimizer.estimate.tasks.change import Change
from optimizer.estimate.tasks.parts import PartTime
from optimizer.estimate.tasks.tasks import Task, add_legs, as_moves, moved_bytes, single
from optimizer.estimate.tasks.transfers import Legs, Transfer
from optimizer.hardware.rates import Rates
from optimizer.hardware.thread_wakeup import count_multithreaded, wakeup_cost_s
from optimizer.plan.weights import WeightsPlan

_WEIGHTS = CATEGORIES.index("weights")


def make_weights_task(
    phase: str,
    block: int,
    *,
    by_block: tuple[int, ...],
    tensors: tuple[tuple[int, ...], ...],
    gone: Sequence[int],
    coming: Sequence[int],
    plan: WeightsPlan,
    rates: Rates,
    waits_for: tuple[Hashable, ...] = (),
    num_keys: int | None = None,
    holds_up_cpu: bool = False,
    generates: bool = False,
    exchange_ms: Sequence[float] = (),
    comes_for: str = "",
) -> Task:
    """The task before a block: the blocks in ``gone`` go, those in ``coming`` come, and the block's own must have arrived.

    by_block: bytes of each block's weights. tensors: those of each, one by one. num_keys: blocks whose numbers differ by a
    multiple of it share a transfer's key, so that tasks which are alike can be one; never fewer than come ahead, and the one at
    work. holds_up_cpu: as ``Transfer``'s.
    exchange_ms: milliseconds by block in which ranks send each other what each keeps of it; empty where weights come otherwise.
    comes_for: the key's part for what is waited for beyond a phase; the phase unless given.
    """

    def legs_of(other: int) -> Legs:
        return (("network", exchange_ms[other]),) if exchange_ms else _legs(by_block[other], tensors[other], plan, rates)

    transfers = {
        other: Transfer(
            key=("weights", comes_for or phase, other if num_keys is None else other % num_keys),
            legs=legs_of(other),
            holds_up_cpu=holds_up_cpu or bool(exchange_ms),
        )
        for other in (*coming, block)
    }
    come_bytes, gone_bytes = (sum(by_block[other] for other in blocks) for blocks in (coming, gone))
    sizes = [num_bytes for other in coming for num_bytes in tensors[other]]
    legs = [leg for other in coming for leg in transfers[other].legs]
    time = add_legs(PartTime.spent(hooks=streaming_python_ms(sizes, plan, rates, generates=generates)), legs)
    changes: list[Change] = [("device", _WEIGHTS, -num_bytes) for other in gone for num_bytes in tensors[other]]
    changes += [("device", _WEIGHTS, num_bytes) for other in coming for num_bytes in tensors[other]]
    return Task(
        phase=phase,
        block=block,
        name="",
        bytes=moved_bytes(single("weights", come_bytes - gone_bytes)),
        time=time,
        copied={} if exchange_ms else _copied(come_bytes, plan),
        waits_for=waits_for,
        arrives=(transfers[block],),
        begins=tuple(transfers[other] for other in coming if other != block),
        moves=partial(as_moves, changes),
    )


def sum_weights_ms(
    by_block: Sequence[int],
    tensors: Sequence[Sequence[int]],
    *,
    plan: WeightsPlan,
    rates: Rates,
    exchange_ms: Sequence[float] = (),
    exchange_lane: Lane = "network",
) -> NDArray[np.float64]:
    """Milliseconds by lane, of the weights of all blocks once. tensors: bytes of each block's, one by one. exchange_ms: as
    ``make_weights_task``'s. exchange_lane: the one that they are counted on; on the CPU device one that holds compute up.
    """
    total = np.zeros(len(LANES))
    for (num_bytes, sizes), count in Counter(zip(by_block, map(tuple, tensors), strict=True)).items():
        time = PartTime.spent(hooks=streaming_python_ms(sizes, plan, rates))
        legs = () if exchange_ms else _legs(num_bytes, sizes, plan, rates)
        total += count * np.array(add_legs(time, legs).by_lane)
    total[LANES.index(exchange_lane)] += sum(exchange_ms)
    return total


def streaming_python_ms(
    tensors: Sequence[int], plan: WeightsPlan, rates: Rates, *, generates: bool = False
) -> float:
    """Time of Python for weights that come, beside their copies. tensors: bytes of each."""
    each_s = weights_python_s(rates, generates=generates, is_stored=plan.place in STORE_LANES)
    num_shared = count_multithreaded(num_bytes // plan.bytes_per_element for num_bytes in tensors)
    return (len(tensors) * each_s + wakeup_cost_s(num_shared, rates, after_s=each_s)) * 1000


def _copied(num_bytes: int, plan: WeightsPlan) -> Mapping[Link, int]:
    if not num_bytes:
        return {}
    if plan.place not in STORE_LINKS:
        return {"host_to_device": num_bytes}
    return {"host_to_device": num_bytes, STORE_LINKS[plan.place][1]: num_bytes}


def _legs(num_bytes: int, tensors: Sequence[int], plan: WeightsPlan, rates: Rates) -> Legs:
    """tensors: bytes of each, which are asked for one by one."""
    copy: Legs = (("copy_in", num_bytes / rates.host_to_device_bytes_per_s * 1000),)
    if plan.place not in STORE_LANES:
        return copy
    reached_ms = sum(reach_ms(size, rates, place=plan.place) for size in tensors)
    return ((STORE_LANES[plan.place], read_ms(num_bytes, rates, place=plan.place) + reached_ms), *copy)
