"""The end of a step as tasks: clipping, the update where the state is, and what of it runs beside the next forward.

On CUDA a thread of the host updates what left the device; the next forward waits block by block for its own new weights.
Where nothing is clipped or scaled it does so during backward. On the CPU device all is done in turn.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Final, NamedTuple

import numpy as np

from optimizer.base.categories import CATEGORIES, Lane
from optimizer.estimate.categories.gradients import (
    estimate_clip_bytes,
    estimate_clip_ms,
    estimate_clipped_bytes,
    estimate_fetched_scaling_ms,
    estimate_rows_bytes,
    estimate_rows_update_bytes,
    gradient_python_s,
)
from optimizer.estimate.categories.network import Network, agreement_ms, barrier_ms, overlaps
from optimizer.estimate.categories.optimizer_state import (
    Rows,
    StateCosts,
    as_rows,
    estimate_update_ms,
    host_update_s,
)
from optimizer.estimate.categories.stores import STORE_LANES, STORE_LINKS, read_ms, write_ms
from optimizer.estimate.categories.tensors import TensorList
from optimizer.estimate.categories.weights import list_sent
from optimizer.estimate.memo import Table
from optimizer.estimate.tasks.change import Change, Move
from optimizer.estimate.tasks.parts import PartTime, sum_device_rows
from optimizer.estimate.tasks.tasks import NO_TIME, Task, add_legs, as_moves, moved_bytes, risen_bytes, single
from optimizer.estimate.tasks.transfers import Legs, Transfer
from optimizer.hardware.machine import Machine
from optimizer.hardware.rates import PythonWork, Rates
from optimizer.hardware.thread_wakeup import count_multithreaded, wakeup_cost_s
from optimizer.optimizers import KeptState
from optimizer.plan.devices.layout import DataParallel
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import TrainingWorkload

_SLOT = {name: index for index, name in enumerate(CATEGORIES)}
_SLOTS = (_SLOT["temporaries"], _SLOT["gradients"], _SLOT["optimizer_state"])
"""Places of the categories that the columns of ``Rows`` count."""


def update_key(block: int) -> Hashable:
    """Key of the update on the host of a block's weights; -1 is before the blocks, their number what is after."""
    return ("update", block)


class UpdateInputs(NamedTuple):
    """All that the update depends on beside the tensors: the same for every shape."""

    gradients: GradientsPlan
    optimizer_state: OptimizerStatePlan
    weights: WeightsPlan
    clips: bool
    trains_all: bool
    kept: KeptState
    tokens_per_step: int
    device_kind: str
    rates_fingerprint: str
    shares_state: bool
    exchange: "UpdateExchange | None"


def update_inputs(
    plan: Plan, workload: TrainingWorkload, machine: Machine, exchange: "UpdateExchange | None"
) -> UpdateInputs:
    """The inputs of the update that follows the last micro-batch. exchange: of the ranks; None on one device."""
    return UpdateInputs(
        gradients=plan.gradients,
        optimizer_state=plan.optimizer_state,
        weights=plan.weights,
        clips=workload.max_grad_norm is not None,
        trains_all=workload.adapter is None,
        kept=workload.kept_state,
        tokens_per_step=workload.tokens_per_step,
        device_kind=machine.device.kind,
        rates_fingerprint=machine.rates.fingerprint,
        shares_state=plan.layout.shares_state,
        exchange=exchange,
    )


def list_update_tasks(
    tensors: TensorList,
    state: StateCosts,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    exchange: "UpdateExchange | None" = None,
) -> Iterator[Task]:
    """Tasks that follow the last micro-batch. tensors: that this rank updates. exchange: None on one device."""
    exchange = exchange or NO_EXCHANGE
    clip, update = list_update_times(tensors, state, plan=plan, workload=workload, machine=machine)
    if exchange.broadcast_ms and update is not None:
        # New weights are sent when the host has made them.
        update = replace(update, arrives=(*clip.begins, *update.begins, *update.arrives), begins=())
    yield from _exchange_task("norm exchange", exchange.agreement_ms)
    scratch_bytes = estimate_clip_bytes(
        tensors, plan, clips=workload.max_grad_norm is not None, num_shared=exchange.num_tensors
    )
    is_on_host = plan.gradients.choice == "host"
    # Rows of sparse gradients are joined and summed into new ones.
    rows_bytes = estimate_rows_bytes(tensors, num_tokens=workload.tokens_per_step)
    device = single("temporaries", 0 if is_on_host else scratch_bytes) + single("gradients", rows_bytes)
    yield Task(
        phase="optimizer",
        block=-1,
        name="gradient clipping",
        bytes=risen_bytes(device, host=scratch_bytes * is_on_host),
        time=clip.time,
        begins=clip.begins,
        drains=is_on_host or exchange.is_awaited,
    )
    if update is None:
        yield from _exchange_task("weights exchange", exchange.broadcast_ms)
        return
    clipped_bytes = estimate_clipped_bytes(plan) if plan.gradients.choice == "keep" else 0
    changes = np.concatenate(
        [
            as_rows([(clipped_bytes, 0, 0)]),
            state.changes,
            as_rows(_rows_changes(tensors, workload)),
            as_rows([(-clipped_bytes, 0, 0)]),
        ]
    )
    yield Task(
        phase="optimizer",
        block=-1,
        name="optimizer step",
        bytes=sum_device_rows(changes, slots=_SLOTS),
        time=update.time,
        copied=state.copied_bytes,
        arrives=update.arrives,
        begins=update.begins,
        moves=partial(_list_moves, changes),
    )
    yield from _exchange_task("weights exchange", exchange.broadcast_ms)


@dataclass(frozen=True, kw_only=True)
class UpdateExchange:
    """The exchanges of ranks once a step, beside gradients."""

    num_tensors: int = 0
    """Trained tensors whose norms each rank gets to know; 0 on one device."""
    agreement_ms: float = 0.0
    broadcast_ms: float = 0.0
    """Time to send new weights, and to wait for those that owners write where all ranks read them."""
    is_awaited: bool = False
    """True where gradients travel beside backward, so that clipping waits for them."""

    @classmethod
    def of(
        cls, tensors: TensorList, *, network: Network | None, plan: Plan, device_kind: str, trains_all: bool
    ) -> "UpdateExchange | None":
        """tensors: all that are trained. trains_all: False under adapters. None on one device."""
        if network is None:
            return None
        is_cut, size = plan.layout.is_cut, plan.weights.bytes_per_element
        is_awaited = overlaps(plan, device_kind=device_kind) and not is_cut
        are_at_home = plan.layout.shares_state and trains_all and plan.shares_homes(trains_all=True)

        num_micro_batches = 0 if plan.layout.sees_whole_batch else plan.batch.accumulation_steps

        def make() -> UpdateExchange:
            are_sent = list_sent(tensors, plan, trains_all=trains_all)
            within = network.within
            owners = tensors.owners(within.num_ranks)
            broadcast_ms = within.sum_ms(
                "broadcast",
                [size * number for number in compress(tensors.num_elements, are_sent)],
                element_bytes=size,
                owners=list(compress(owners, are_sent)),
            )
            return cls(
                num_tensors=len(tensors.sizes),
                agreement_ms=agreement_ms(network, len(tensors.sizes), num_micro_batches=num_micro_batches),
                broadcast_ms=broadcast_ms + are_at_home * barrier_ms(network),
                is_awaited=is_awaited,
            )

        key = (network, size, plan.layout.data, are_at_home, is_awaited, num_micro_batches)
        return _EXCHANGES.obtain(tensors, key, make)


NO_EXCHANGE: Final = UpdateExchange()
_EXCHANGES: Final[Table[tuple[Network, int, DataParallel, bool, bool, int], UpdateExchange]] = Table()


def exchange_task(phase: str, name: str, exchange_ms: float, *, waits: bool = True) -> Task:
    """An exchange among ranks, which moves no bytes on the device. waits: whether compute does; else it is only begun."""
    legs: Legs = (("network", exchange_ms),)
    transfer = Transfer(key=(phase, name), legs=legs, holds_up_cpu=True)
    return Task(
        phase=phase,
        block=-1,
        name=name,
        bytes=moved_bytes(single("weights", 0)),
        time=add_legs(NO_TIME, legs),
        arrives=(transfer,) if waits else (),
        leaves=() if waits else (legs,),
    )


def _exchange_task(name: str, exchange_ms: float) -> Iterator[Task]:
    if exchange_ms:
        yield exchange_task("optimizer", name, exchange_ms)


@dataclass(frozen=True, kw_only=True)
class UpdateTime:
    """One of the two: what it takes, what it waits for and what it begins beside compute."""

    time: PartTime
    arrives: tuple[Transfer, ...] = ()
    begins: tuple[Transfer, ...] = ()


def list_update_times(
    tensors: TensorList, state: StateCosts, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> tuple[UpdateTime, UpdateTime | None]:
    """Times of clipping, and of the update where it is not inside backward."""
    away = _list_host_updates(state, plan=plan, workload=workload, machine=machine)
    is_threaded = machine.device.kind == "cuda"
    in_backward = is_threaded and begins_in_backward(plan, workload)
    clip = _clip_time(tensors, state, plan, workload, machine, begins=away if in_backward else ())
    if plan.gradients.choice == "consume":
        return clip, None
    fetched_bytes = state.num_staying * plan.weights.bytes_per_element if plan.gradients.choice == "host" else 0
    fetched: Legs = (("copy_in", fetched_bytes / machine.rates.host_to_device_bytes_per_s * 1000),)
    back = (Transfer(key="gradients", legs=fetched),) if fetched_bytes else ()
    optimizer_ms = estimate_update_ms(state.num_staying, plan, machine.rates, kept=workload.kept_state)
    if fetched_bytes and (workload.max_grad_norm is not None or plan.weights.scales_loss):
        scaling_ms = estimate_fetched_scaling_ms(state.num_staying, plan, machine.rates)
        optimizer_ms += scaling_ms * machine.rates.time_factor("optimizer")
    time = PartTime.spent(
        optimizer=optimizer_ms,
        hooks=_python_ms(tensors, state.num_tensors_staying, plan, workload, machine.rates)
        + _waking_ms(tensors, plan, machine.rates, scales=workload.max_grad_norm is not None or plan.weights.scales_loss),
    )
    time = add_legs(time, [leg for transfer in (*back, *(() if in_backward else away)) for leg in transfer.legs])
    return clip, UpdateTime(
        time=time,
        arrives=back if is_threaded else (*away, *back),
        begins=away if is_threaded and not in_backward else (),
    )


def begins_in_backward(plan: Plan, workload: TrainingWorkload) -> bool:
    """True where a block's update on the host of a card may begin before the backward of the others has ended. Ranks that share
    a step find out together at its end whether all numbers are finite.
    """
    is_alone = plan.layout.num_devices == 1 or plan.layout.steps_alone
    return is_alone and workload.max_grad_norm is None and not plan.weights.scales_loss


def _clip_time(
    tensors: TensorList,
    state: StateCosts,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    *,
    begins: tuple[Transfer, ...],
) -> UpdateTime:
    optimizer_ms = estimate_clip_ms(tensors, plan, machine.rates, scales=workload.max_grad_norm is not None)
    optimizer_ms *= machine.rates.time_factor("optimizer")
    hooks_ms = 0.0
    if plan.gradients.choice == "consume":
        # The update of each tensor is inside backward; its time is the same there.
        optimizer_ms += estimate_update_ms(tensors.total_elements, plan, machine.rates, kept=workload.kept_state)
        hooks_ms = _python_ms(tensors, state.num_tensors_staying, plan, workload, machine.rates)
    time = PartTime.spent(optimizer=optimizer_ms, hooks=hooks_ms)
    time = add_legs(time, [leg for transfer in begins for leg in transfer.legs])
    return UpdateTime(time=time, begins=begins)


def _python_ms(tensors: TensorList, num_staying: int, plan: Plan, workload: TrainingWorkload, rates: Rates) -> float:
    """Time of clipping, updating and moving states beside kernels: once a step, and for each tensor.

    num_staying: of the tensors, those whose state is on the device.
    """
    staying_s = rates.python_work_s(_work_on_staying(plan, workload))
    if plan.optimizer_state.bits == 8:
        staying_s += rates.python_work_s("update 8-bit")
    leaving_s = rates.python_work_s("state")
    num_leaving = len(tensors.sizes) - num_staying
    seconds = rates.python_work_s("step") + num_staying * staying_s + num_leaving * leaving_s
    if num_leaving and plan.weights.place != "device":
        seconds += min(num_leaving, tensors.num_in_blocks) * (rates.python_s.get("state at home", leaving_s) - leaving_s)
    return seconds * rates.time_factor("hooks") * 1000


def _waking_ms(tensors: TensorList, plan: Plan, rates: Rates, *, scales: bool) -> float:
    """Time to wake threads for gradients on the host, which are scaled one by one and fetched, or their new weights are.
    The update itself shares tensors of any size, and is probed so.
    """
    if plan.gradients.choice != "host" or not rates.wake_s:
        return 0.0
    leaving = tensors.list_leaving(plan.optimizer_state)
    num_copied = num_shared = count_multithreaded(tensors.num_elements)
    if plan.weights.place != "device":
        # New weights stay where they are at home.
        blocks = range(tensors.num_blocks)
        each = zip(tensors.num_elements, leaving, tensors.blocks, strict=True)
        num_copied -= count_multithreaded(number for number, is_away, block in each if is_away and block in blocks)
    return wakeup_cost_s(num_copied + num_shared * scales, rates, after_s=gradient_python_s(rates)) * 1000


def more_for_leaving_ms(num_tensors: int, rates: Rates) -> float:
    """Milliseconds by which a step can at most be cheaper, in Python, than where the state of so many tensors leaves."""
    more_s = max(0.0, rates.python_work_s("state") - rates.python_work_s("gradients"))
    return num_tensors * more_s * rates.time_factor("hooks") * 1000


def _work_on_staying(plan: Plan, workload: TrainingWorkload) -> PythonWork:
    """Work on each tensor whose state is on the device."""
    if plan.gradients.choice == "host":
        return "gradients"
    steps_alone = plan.gradients.choice == "consume" or plan.weights.widens_updates or workload.kept_state.declared.steps_alone
    return "update one" if steps_alone else "update many"


def _list_host_updates(
    state: StateCosts, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> tuple[Transfer, ...]:
    """List the host's updates in the order in which the host makes them, unless they follow backward."""
    rates = machine.rates
    size = plan.weights.bytes_per_element
    host_s = host_update_s(plan, rates, kept=workload.kept_state, clips=workload.max_grad_norm is not None)
    num_leaving = sum(state.leaving_by_block.values())
    returned_bytes = state.copied_bytes.get("host_to_device", 0)
    if plan.gradients.choice == "host":
        returned_bytes -= state.num_staying * size
    transfers = []
    for block, num_elements in state.leaving_by_block.items():
        share = num_elements / num_leaving
        legs: list[tuple[Lane, float]] = []
        for place, (out, back) in STORE_LINKS.items():
            out_bytes, back_bytes = state.copied_bytes.get(out, 0), state.copied_bytes.get(back, 0)
            if out_bytes or back_bytes:
                come_ms = read_ms(round(share * back_bytes), rates, place=place)
                go_ms = write_ms(round(share * out_bytes), rates, place=place)
                legs.append((STORE_LANES[place], come_ms + go_ms))
        legs.append(("host", num_elements * host_s * 1000))
        if returned_bytes:
            legs.append(("copy_in", share * returned_bytes / rates.host_to_device_bytes_per_s * 1000))
        transfers.append(Transfer(key=update_key(block), legs=tuple(legs), after_block=block))
    return tuple(transfers)


def _rows_changes(tensors: TensorList, workload: TrainingWorkload) -> list[tuple[int, int, int]]:
    num_bytes = estimate_rows_update_bytes(tensors, num_tokens=workload.tokens_per_step)
    return [(num_bytes, 0, 0), (-num_bytes, 0, 0)] if num_bytes else []


def _list_moves(changes: Rows) -> tuple[Move, ...]:
    pairs = ((slot, size) for change in changes.tolist() for slot, size in zip(_SLOTS, change, strict=True))
    found: list[Change] = [("device", slot, size) for slot, size in pairs if size]
    return as_moves(found)
