"""Lower bounds on the bytes and step time of all plans that share one setting, as sums over their blocks. Torch-free.

A setting is all that is decided outside the blocks. Bytes: the level between the last block's forward and its backward, where
all blocks hold what they save; parts count as the schedule counts them, storages that blocks share are taken as gone. Time: a
step is at least as long as each of a few sums of what has to be done one after the other. Neither is ever more than what the
estimator simulates; ``tests/optimizer/search/solver/test_relaxed.py`` holds them to it.

*Not in it*: the middle of backward, where gradients have grown and not all activations are gone; how lanes wait for each other
inside a micro-batch; on the CPU device the time that fresh memory takes to be touched.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optimizer.base.categories import LANES
from optimizer.estimate.bounds.lower_bounds import Form, Relaxation
from optimizer.estimate.bounds.relaxed_blocks import RelaxedBlocks, list_relaxed_blocks
from optimizer.estimate.bounds.relaxed_outside import RelaxedOutside, list_relaxed_outside
from optimizer.estimate.bounds.relaxed_time import MicroBatchTimes, Update, sums_on_cpu, sums_on_cuda
from optimizer.estimate.categories.batch import estimate_input_bytes, inputs_pile_up
from optimizer.estimate.categories.block_sums import SumCosts, estimate_sums
from optimizer.estimate.categories.gradients import estimate_gradient_bytes
from optimizer.estimate.categories.network import Network, dealt_ms
from optimizer.estimate.categories.optimizer_state import estimate_state, estimate_update_ms
from optimizer.estimate.categories.tensors import TensorList, list_tensors
from optimizer.estimate.categories.weights import (
    estimate_home_bytes,
    estimate_weight_bytes,
    find_brought,
)
from optimizer.estimate.memo import Table
from optimizer.estimate.prediction import MEMORY_MARGIN
from optimizer.estimate.shape.compiled import CompiledShape, compile_plan_shape
from optimizer.estimate.step.exchange import GradientExchange
from optimizer.estimate.step.part_prices import PartPrices
from optimizer.estimate.step.streaming import sum_weights_ms
from optimizer.estimate.step.update import (
    UpdateExchange,
    UpdateTime,
    begins_in_backward,
    list_update_times,
    more_for_leaving_ms,
)
from optimizer.estimate.tasks.change import PartName
from optimizer.estimate.tasks.moments import moments_of
from optimizer.hardware.machine import Machine
from optimizer.hardware.thread_wakeup import count_multithreaded
from optimizer.plan.activations import BlockChoice
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlace
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload

Numbers = NDArray[np.float64]
_ALIKE = 0.05
"""Share by which blocks of one kind may differ: the first and the last block from those between."""
_COMPUTE, _HOST, _DISK = (LANES.index(lane) for lane in ("compute", "host", "disk"))
_BLOCKS: Final[Table[tuple[PartPrices, tuple[Form, ...]], RelaxedBlocks]] = Table()
_LEAST_MS: Final[Table[str, float]] = Table()
"""Least times of a micro-batch, by the device's rates."""
_EXCHANGES: Final[Table[tuple[Plan, int, Network | None, str, bool], tuple[float, float]]] = Table()
"""Least exchanges of a plan, by its network, its kind of device and whether all is trained."""
_OUTSIDE: Final[Table[tuple[PartPrices, tuple[Form, ...], int], RelaxedOutside]] = Table()


def least_compute_ms(profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine) -> float:
    """Time forward and back once in each micro-batch: no plan with this micro-batch and these dtypes is faster.

    plan: of which nothing else is looked at. On a card chunks of the head take no less than the whole, on the CPU device they
    may, since they touch less fresh memory: there the head is left out. Raises as ``estimate_training`` does.
    """
    compiled = compile_plan_shape(profile, plan, workload.sequence_length)
    rates_key = f"{machine.device.kind} {machine.rates.fingerprint}"

    def part_ms(name: PartName) -> float:
        return compiled.part_time(name, machine, rates_key=rates_key).compute_ms

    def sum_parts() -> float:
        templates = compiled.regime.block_templates
        block_ms = {
            template: part_ms(("keep", template, "forward")) + part_ms(("keep", template, "backward_first"))
            for template in set(templates)
        }
        head = ("head", "head_backward_first") if machine.device.kind == "cuda" else ()
        around_ms = sum(part_ms(name) for name in ("prologue", *head, "norm_backward_first"))
        return sum(block_ms[template] for template in templates) + around_ms

    return plan.batch.accumulation_steps * _LEAST_MS.obtain(compiled, rates_key, sum_parts)


def least_exchange_ms(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine, network: Network | None
) -> tuple[float, float]:
    """Time for which compute waits for other ranks in every step of a base's plans, and for which the network is busy; 0 on one
    device.

    plan: of which the layout, the micro-batch and the dtypes are looked at. Gradients are exchanged once a step at least; those
    that every rank keeps hide behind backward on a card. New weights that all ranks read in one home are not sent.
    """
    compiled = compile_plan_shape(profile, plan, workload.sequence_length)
    once = replace(plan, gradients=GradientsPlan(), batch=replace(plan.batch, accumulation_steps=1))
    device_kind, trains_all = machine.device.kind, workload.adapter is None
    sums = estimate_sums(profile, plan, network, sequence_length=workload.sequence_length)

    def sum_everywhere() -> tuple[float, float]:
        places: tuple[WeightsPlace, ...] = ("device", "host")
        everywhere = [
            _sum_exchanges(
                compiled,
                list_tensors(profile),
                plan=replace(once, weights=replace(once.weights, place=place)),
                network=network,
                device_kind=device_kind,
                trains_all=trains_all,
                sums=sums,
                num_micro_batches=plan.batch.accumulation_steps,
            )
            for place in places
        ]
        lane_ms = [sum(found.values()) for found in everywhere]
        waits_ms = [busy_ms - found.get("beside_ms", 0.0) for busy_ms, found in zip(lane_ms, everywhere, strict=True)]
        return min(waits_ms), min(lane_ms)

    num_micro_batches = 1 if sums is None else plan.batch.accumulation_steps
    return _EXCHANGES.obtain(compiled, (once, num_micro_batches, network, device_kind, trains_all), sum_everywhere)


def _sum_exchanges(
    compiled: CompiledShape,
    trained: TensorList,
    *,
    plan: Plan,
    network: Network | None,
    device_kind: str,
    trains_all: bool,
    sums: SumCosts | None,
    num_micro_batches: int,
) -> dict[str, float]:
    """Milliseconds of what ranks exchange in a step, as ``Update`` has them; nothing on one device."""
    # Those that take steps alone exchange nothing in most of them.
    network = None if plan.layout.steps_alone else network
    after = UpdateExchange.of(trained, network=network, plan=plan, device_kind=device_kind, trains_all=trains_all)
    if network is None or after is None:
        return {}
    found = GradientExchange.of(
        compiled, trained, plan=plan, network=network, device_kind=device_kind, rank=0, trains_all=trains_all
    )
    times = plan.batch.accumulation_steps if found.in_each_micro_batch else 1
    return {
        "held_up_ms": times * found.held_up_ms + (0.0 if sums is None else num_micro_batches * sums.least_ms),
        "beside_ms": found.beside_ms,
        "after_ms": after.agreement_ms + after.broadcast_ms,
    }


def relax(
    profile: Profile,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    forms: Sequence[Form],
    chunk_counts: Sequence[int],
    state_is_free: bool,
    network: Network | None = None,
) -> Relaxation:
    """Relax a setting's plans. workload, machine, network: a rank's part of them; of the rank that updates most.

    plan: of which blocks, chunks and blocks fetched ahead are not looked at. state_is_free: any share of the state may leave.
    Raises as ``estimate_training`` does.
    """
    return _Relaxer(profile, plan, workload, machine, forms=tuple(forms), chunk_counts=chunk_counts, network=network).relax(
        state_is_free=state_is_free
    )


def list_kinds(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine, choices: Sequence[BlockChoice]
) -> tuple[int, ...]:
    """One number for each block: the same where blocks hold nearly the same and take nearly as long under every one of the
    choices.

    plan: of which blocks are not looked at. Raises as ``estimate_training`` does.
    """
    forms: tuple[Form, ...] = tuple((choice, "none") for choice in choices)
    found = _Relaxer(profile, plan, workload, machine, forms=forms, chunk_counts=(1,))
    return found.kinds()


class _Relaxer:
    """Relaxes the plans of one setting."""

    def __init__(
        self,
        profile: Profile,
        plan: Plan,
        workload: TrainingWorkload,
        machine: Machine,
        *,
        forms: tuple[Form, ...],
        chunk_counts: Sequence[int],
        network: Network | None = None,
    ) -> None:
        self._profile, self._plan, self._workload, self._machine = profile, plan, workload, machine
        self._compiled = compile_plan_shape(profile, plan, workload.sequence_length)
        self._network, self._trained, layout = network, list_tensors(profile), plan.layout
        rank = self._rank = self._trained.fullest_rank(layout.num_sharing) if layout.shares_state else 0
        self._tensors = self._trained.updated_by(rank, layout)
        self._drops = layout.shares_state
        """Others' gradients go as soon as they are complete; below all do, and what stays or leaves of this rank's is added."""
        self._num_later = plan.batch.accumulation_steps - 1
        self._state = estimate_state(self._tensors, plan, workload=workload, device_kind=machine.device.kind)
        self._brought = find_brought(profile, plan, trains_all=workload.adapter is None, rank=rank)
        self._streamed = self._brought.by_block
        self._input_bytes = estimate_input_bytes(profile, plan.batch, sequence_length=workload.sequence_length)
        moments = moments_of(self._tensors.sizes, bits=plan.optimizer_state.bits, kept=workload.kept_state)
        prices = PartPrices.find(
            self._compiled, plan=plan, machine=machine, moments=moments, drops_all=self._drops
        )
        self._prices = prices
        self._blocks = _BLOCKS.obtain(self._compiled, (prices, forms), lambda: list_relaxed_blocks(prices, forms))
        self._outside = [self._relax_outside(prices, forms, count) for count in chunk_counts]
        self._templates = list(self._compiled.regime.block_templates)

    def _relax_outside(self, prices: PartPrices, forms: tuple[Form, ...], num_chunks: int) -> RelaxedOutside:
        plan = replace(self._plan, logits_and_loss=LogitsAndLossPlan(num_chunks=num_chunks))
        choices = [choice for choice, _ in forms]
        return _OUTSIDE.obtain(
            self._compiled,
            (prices, forms, num_chunks),
            lambda: list_relaxed_outside(self._profile, prices, plan=plan, choices=choices),
        )

    def relax(self, *, state_is_free: bool) -> Relaxation:
        *others, last = self._templates
        kinds = sorted(set(others))
        num_of_kind = np.array([others.count(kind) for kind in kinds], dtype=np.float64)
        block_ms, fixed_ms, state_ms = self._list_sums(state_is_free=state_is_free)
        state_bytes = self._state_bytes() if state_is_free else 0
        resident_bytes, host_bytes, disk_bytes, remote_bytes = self._resident()
        return Relaxation(
            num_of_kind=num_of_kind,
            kind_bytes=self._blocks.held[kinds],
            kind_ms=block_ms[:, kinds],
            last_bytes=np.array([self._blocks.held[last] + self._highest_bytes(outside) for outside in self._outside]),
            last_ms=block_ms[:, last],
            fixed_bytes=resident_bytes + state_bytes,
            end_bytes=np.array([self._end_bytes(outside) for outside in self._outside]),
            fixed_ms=fixed_ms,
            state_bytes=state_bytes,
            state_ms=state_ms,
            host_bytes=host_bytes,
            state_host_bytes=self._state.host_bytes if state_is_free else 0,
            kind_host_bytes=self._blocks.on_host[kinds],
            last_host_bytes=self._blocks.on_host[last],
            disk_bytes=disk_bytes,
            remote_bytes=remote_bytes,
            margin=MEMORY_MARGIN[self._machine.device.kind],
        )

    def kinds(self) -> tuple[int, ...]:
        blocks = self._blocks
        costs = np.concatenate([blocks.held, blocks.forward_ms[..., _COMPUTE], blocks.first_ms[..., _COMPUTE]], axis=1)
        known: list[int] = []
        of_template: list[int] = []
        for template, cost in enumerate(costs):
            alike = (kind for kind, other in enumerate(known) if np.allclose(cost, costs[other], rtol=_ALIKE))
            kind = next(alike, len(known))
            if kind == len(known):
                known.append(template)
            of_template.append(kind)
        return tuple(of_template[template] for template in self._templates)

    # Bytes.

    def _resident(self) -> tuple[int, int, int, int]:
        """Bytes on the device, the host, the disk and in the remote store between steps."""
        plan, state = self._plan, self._state
        gradients = estimate_gradient_bytes(self._tensors, plan, device_kind=self._machine.device.kind)
        device_bytes = estimate_weight_bytes(self._profile, plan.weights) - self._brought.num_bytes
        device_bytes += state.device_bytes + gradients.device
        trains_all = self._workload.adapter is None
        home = estimate_home_bytes(self._profile, plan, trains_all=trains_all, rank=self._rank)
        host_bytes = gradients.host + state.host_bytes + home["host"]
        return device_bytes, host_bytes, state.disk_bytes + home["disk"], state.remote_bytes + home["remote"]

    def _state_bytes(self) -> int:
        """Bytes of all optimizer state on the device, in 32 bits: other widths do not leave."""
        each_bytes = 4 * self._workload.num_moments + self._plan.weights.master_bytes_per_element
        return each_bytes * self._tensors.total_elements

    def _highest_bytes(self, outside: RelaxedOutside) -> Numbers:
        """The highest level until the last block's backward ends, above what all blocks hold; by form of the last block."""
        blocks, last = self._blocks, self._templates[-1]
        weights_bytes = self._streamed[-1] if self._streamed else 0
        forward = blocks.forward_rise[last] - blocks.held[last] + weights_bytes
        first = np.maximum(outside.first_high, outside.first_left + blocks.first_rise[last] + weights_bytes)
        highest = np.maximum(forward, first)
        if self._num_later:
            later = np.maximum(outside.later_high, outside.later_left + blocks.later_rise[last] + weights_bytes)
            highest = np.maximum(highest, self._before_last(outside) + np.maximum(forward, later))
        over: Numbers = self._entered(outside) + highest
        return over

    def _entered(self, outside: RelaxedOutside) -> Numbers:
        """Bytes before the first block, without what blocks share."""
        shared_bytes = sum(self._compiled.shared_bytes(index)[0] for index in range(len(self._compiled.regime.shared)))
        return outside.entered + (self._input_bytes - shared_bytes)

    def _before_last(self, outside: RelaxedOutside) -> Numbers:
        """Bytes that earlier micro-batches have left for the last one: gradients, and inputs where they stay."""
        inputs_bytes = self._num_later * self._input_bytes if inputs_pile_up(self._machine.device) else 0
        if self._drops and self._plan.gradients.choice == "keep":
            return outside.gradients + (inputs_bytes + self._kept_bytes())
        return outside.gradients + (inputs_bytes + float(self._blocks.gradients.min(axis=1)[self._templates].sum()))

    def _kept_bytes(self) -> int:
        """Bytes of gradients from earlier micro-batches that this rank still has when the last block's backward ends in the last:
        of the tensors that it updates, or, where they go in the last alone, of those that come after it in backward.
        """
        tensors, size = self._trained, self._plan.weights.bytes_per_element
        if self._plan.layout.reduces_each_micro_batch:
            return size * self._tensors.total_elements
        behind = zip(tensors.num_elements, tensors.blocks, strict=True)
        return size * sum(number for number, block in behind if block < tensors.num_blocks - 1)

    def _end_bytes(self, outside: RelaxedOutside) -> float:
        """Bytes at the highest point of the first block's backward in the first micro-batch."""
        blocks, (first, *others) = self._blocks, self._templates
        around = float((self._entered(outside) + outside.first_left).min())
        own = float((blocks.held[first] + blocks.first_rise[first]).min()) + (self._streamed[0] if self._streamed else 0)
        return around + own + float(blocks.left.min(axis=1)[others].sum())

    # Time.

    def _list_sums(self, *, state_is_free: bool) -> tuple[Numbers, Numbers, Numbers]:
        """Milliseconds as [sum, template, form] of each block, [sum, chunks] of all else, [sum] where all of the state
        leaves that may.
        """
        blocks = self._blocks
        weights_ms = self._weights_ms()
        head_ms = np.array([outside.head_ms for outside in self._outside])
        around = MicroBatchTimes(
            forward=np.array([outside.enter_ms for outside in self._outside]) + head_ms + weights_ms,
            first=np.array([outside.first_ms for outside in self._outside]) + weights_ms + self._leaving_ms(is_first=True),
            later=np.array([outside.later_ms for outside in self._outside]) + weights_ms + self._leaving_ms(is_first=False),
            num_later=self._num_later,
        )
        inside = MicroBatchTimes(
            forward=blocks.forward_ms, first=blocks.first_ms, later=blocks.later_ms, num_later=self._num_later
        )
        update = self._update(state_is_free=state_is_free)
        list_sums = sums_on_cpu if self._machine.device.kind == "cpu" else sums_on_cuda
        rows = list_sums(inside, around, update, head_ms=head_ms[:, _COMPUTE])
        return tuple(np.array(column) for column in zip(*rows, strict=True))  # type: ignore[return-value]

    def _leaving_ms(self, *, is_first: bool) -> Numbers:
        """Milliseconds by lane of this rank's gradients on their way to the host, where parts count none of them."""
        found = np.zeros(len(LANES))
        if self._drops and self._plan.gradients.choice == "host":
            num_bytes = self._plan.weights.bytes_per_element * self._tensors.total_elements
            num_shared = count_multithreaded(self._tensors.num_elements)
            for lane, lane_ms in self._prices.gradients_legs(num_bytes, num_shared=num_shared, is_first=is_first):
                found[LANES.index(lane)] += lane_ms
        return found

    def _weights_ms(self) -> Numbers:
        """Milliseconds of moving weights by lane: forward brings each block's once, and so does backward."""
        if not self._streamed:
            return np.zeros(len(LANES))
        exchange_ms: tuple[float, ...] = ()
        if self._network is not None:
            exchange_ms = dealt_ms(self._network, self._brought.exchanged, self._brought.owners)
        return sum_weights_ms(
            self._streamed,
            self._brought.tensors,
            plan=self._plan.weights,
            rates=self._machine.rates,
            exchange_ms=exchange_ms,
            exchange_lane="copy_in" if self._machine.device.kind == "cpu" else "network",
        )

    def _update(self, *, state_is_free: bool) -> Update:
        workload, plan, rates = self._workload, self._plan, self._machine.rates
        clip, update = self._update_times
        lanes = np.array([part.time.by_lane for part in (clip, update) if part is not None]).sum(axis=0)
        whole_ms = 0.0
        if state_is_free:
            lanes[_COMPUTE] -= more_for_leaving_ms(len(self._tensors.sizes), rates)
            whole_ms = estimate_update_ms(self._tensors.total_elements, plan, rates, kept=workload.kept_state)
        num_fetched = 0
        if plan.gradients.choice == "host":
            num_fetched = self._tensors.total_elements if state_is_free else self._state.num_staying
        blocks, first = self._blocks, self._templates[0]
        last_ms = max(float(found[first, :, _COMPUTE].max()) for found in (blocks.first_ms, blocks.later_ms))
        return Update(
            lanes=lanes,
            clip_ms=clip.time.compute_ms,
            whole_ms=whole_ms,
            fetched_ms=num_fetched * plan.weights.bytes_per_element / rates.host_to_device_bytes_per_s * 1000,
            is_away=plan.optimizer_state.place != "device",
            is_free=state_is_free,
            behind_ms=self._behind_ms(state_is_free=state_is_free),
            last_ms=last_ms if begins_in_backward(plan, workload) else None,
            **_sum_exchanges(
                self._compiled,
                self._trained,
                plan=plan,
                network=self._network,
                device_kind=self._machine.device.kind,
                trains_all=workload.adapter is None,
                sums=estimate_sums(self._profile, plan, self._network, sequence_length=workload.sequence_length),
                num_micro_batches=plan.batch.accumulation_steps,
            ),
        )


    @cached_property
    def _update_times(self) -> tuple[UpdateTime, UpdateTime | None]:
        return list_update_times(
            self._tensors, self._state, plan=self._plan, workload=self._workload, machine=self._machine
        )

    def _behind_ms(self, *, state_is_free: bool) -> tuple[float, float]:
        """Forward of the blocks behind the last one whose state leaves, which begins when the updates of all that leave are done:
        at least the first number less the second times the share that leaves.

        Tensors leave from the first on, as long as the share has room for them (``split_state``): then of a block that is begun
        and of the one after it some; of those behind only what is small enough to count as nothing but in the host's time.
        """
        if not state_is_free or self._plan.optimizer_state.place == "device":
            return 0.0, 0.0
        tensors = self._tensors
        compute_ms = self._blocks.forward_ms[..., _COMPUTE].min(axis=1)[self._templates]
        elements = np.zeros(len(self._templates) + 2)
        np.add.at(elements, np.array(tensors.blocks, dtype=np.int64) + 1, np.array(tensors.num_elements))
        begun_at = elements.cumsum()[:-2] / elements.sum()
        behind_ms = np.append(compute_ms[::-1].cumsum()[::-1], (0.0, 0.0))[2:]
        whole_ms = float(compute_ms.sum())
        small = sum(size.num_elements for size in tensors.sizes if not size.is_matrix) / elements.sum()
        host_ms = sum(part.time.host_ms for part in self._update_times if part is not None)
        return float((behind_ms + whole_ms * begun_at).min()) - small * host_ms, whole_ms
