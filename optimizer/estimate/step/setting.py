"""Everything that plans share which decide the same outside their blocks: made for the first, kept for the others. Torch-free.

A search prices hundreds of plans in a few settings, so what does not depend on the blocks' choices is here, and only putting the
blocks' tasks in order and running them is done for each plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final, NamedTuple

from optimizer.estimate.categories.activations import estimate_packing_bytes, estimate_staging_bytes
from optimizer.estimate.categories.block_sums import SumCosts, estimate_sums
from optimizer.estimate.categories.gradients import estimate_gradient_bytes
from optimizer.estimate.categories.network import (
    Network,
    crossing_ms,
    estimate_staged_bytes,
    exchange_of_dealt,
    notice_ms,
)
from optimizer.estimate.categories.optimizer_state import estimate_state
from optimizer.estimate.categories.outer_step import OuterCosts, estimate_outer
from optimizer.estimate.categories.tensors import TensorList, list_tensors
from optimizer.estimate.categories.weights import (
    estimate_home_bytes,
    estimate_weight_bytes,
    find_brought,
    list_dealt,
    times_brought,
)
from optimizer.estimate.memo import Table
from optimizer.estimate.shape.compiled import CompiledShape, compile_plan_shape
from optimizer.estimate.step.exchange import GradientExchange, list_outer_tasks
from optimizer.estimate.step.pipeline.schedule import run_steady
from optimizer.estimate.step.pipeline.stage_clock import StagesClock
from optimizer.estimate.step.pipeline.stage_costs import check_cut, estimate_stages_weight_bytes, tensors_of_stages
from optimizer.estimate.step.pipeline.stage_layout import StagesLayout
from optimizer.estimate.step.ranks import RankPart, find_part, find_stage_parts
from optimizer.estimate.step.runs import Schedule, TaskRun
from optimizer.estimate.step.schedule import StepLayout
from optimizer.estimate.step.simulate import Highest, Resident
from optimizer.estimate.step.stages.peaks import Stages
from optimizer.estimate.step.update import UpdateExchange
from optimizer.estimate.tasks.parts import Bytes
from optimizer.estimate.tasks.tasks import single
from optimizer.hardware.machine import Machine, Processor
from optimizer.plan.activations import Compression, keep_elsewhere
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.workload import TrainingWorkload


class StepInputs(NamedTuple):
    """All that a prepared step depends on beside the profile and the shape."""

    batch: BatchPlan
    weights: WeightsPlan
    gradients: GradientsPlan
    optimizer_state: OptimizerStatePlan
    logits_and_loss: LogitsAndLossPlan
    compress: Compression
    workload: TrainingWorkload
    processor: Processor
    device_kind: str
    rates_fingerprint: str
    layout: DeviceLayout
    rank: int
    network: Network | None
    own: RankStages | None


_STEPS: Final[Table[StepInputs, "PreparedStep"]] = Table()


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """A plan without its blocks' choices, at one shape on one kind of machine."""

    layout: StepLayout
    stages: Stages
    tensors: TensorList
    """All that are trained."""
    updated: TensorList
    """Those that this rank updates: all on one device."""
    network: Network | None
    """The ranks' network; None on one device."""
    rank_sent_bytes: tuple[int, ...]
    """Bytes that each rank sends in a step, on average, but for sums of hidden states; empty on one device."""
    sums: SumCosts | None
    """Sums of hidden states; None unless ranks share each block."""
    outer: OuterCosts | None
    """Costs of bringing ranks together that take steps alone; None where they share every step."""
    device_kind: str
    always: Resident
    """Bytes that are there between steps, whatever the blocks do."""

    def sent_bytes(self, plan: Plan) -> tuple[float, ...]:
        """Bytes that each rank sends in a step of this plan, sums of hidden states among them; empty on one device."""
        if self.sums is None:
            return self.rank_sent_bytes
        times = plan.batch.accumulation_steps
        summed = self.sums.sent_bytes(plan.activations.per_block)
        return tuple(own + times * each for own, each in zip(self.rank_sent_bytes, summed, strict=True))

    @cached_property
    def bringing_together(self) -> TaskRun:
        """Tasks behind the update by which ranks that take steps alone are brought together; none where they share every step."""
        return TaskRun(() if self.outer is None else list_outer_tasks(self.outer))

    def resident(self, plan: Plan, own: RankStages | None = None) -> Resident:
        """Bytes that are there between steps, with those that moving activations of this plan's blocks takes, or of a rank's."""
        activations = plan.activations
        if own is not None:
            activations = replace(activations, per_block=keep_elsewhere(activations.per_block, own.blocks))
        packing_bytes = estimate_packing_bytes(activations, device_kind=self.device_kind)
        staging_bytes = estimate_staging_bytes(activations, plan.weights)
        if not packing_bytes and not staging_bytes:
            return self.always
        device: Bytes = self.always.device + single("temporaries", packing_bytes)
        return Resident(device=device, host=self.always.host + staging_bytes, disk=self.always.disk, remote=self.always.remote)


def find_setting(
    profile: Profile,
    *,
    plan: Plan,
    workload: TrainingWorkload,
    machine: Machine,
    rank: int = 0,
    network: Network | None = None,
    own: RankStages | None = None,
) -> PreparedStep:
    """The prepared step of a plan that was checked; its blocks' choices are not read. Raises InvalidWorkload beyond the
    positions.

    workload, machine, network: a rank's part of them (``ranks.py``). own: of a model that is cut, the rank's.
    Kept with the profile's compiled shape, so it must not hold the profile.
    """
    compiled = compile_plan_shape(profile, plan, workload.sequence_length)
    key = StepInputs(
        batch=plan.batch,
        weights=plan.weights,
        gradients=plan.gradients,
        optimizer_state=plan.optimizer_state,
        logits_and_loss=plan.logits_and_loss,
        compress=plan.activations.compress,
        workload=workload,
        processor=machine.processor_for(in_fp16=plan.weights.computes_in_fp16),
        device_kind=machine.device.kind,
        rates_fingerprint=machine.rates.fingerprint,
        # A rank does the same wherever the others' stages are cut.
        layout=plan.layout if own is None else replace(plan.layout, stage_blocks=(), ranks=()),
        rank=rank,
        network=network,
        own=own,
    )

    part = RankPart(workload=workload, machine=machine, network=network)
    return _STEPS.obtain(compiled, key, lambda: _make_setting(profile, compiled, plan=plan, part=part, rank=rank, own=own))


def _make_setting(
    profile: Profile, compiled: CompiledShape, *, plan: Plan, part: RankPart, rank: int, own: RankStages | None
) -> PreparedStep:
    workload, machine, network = part.workload, part.machine, part.network
    trained, device_kind = list_tensors(profile), machine.device.kind
    tensors = trained.updated_by(rank, plan.layout) if own is None else tensors_of_stages(trained, compiled, own)
    trains_all = workload.adapter is None
    outer = None
    if network is not None and plan.layout.steps_alone:
        outer = estimate_outer(trained, network=network, plan=plan, rates=machine.rates, trains_all=trains_all)
        # Between synchronizations a rank does what one device does.
        network = None
    exchange = None
    if network is not None and own is None:
        exchange = GradientExchange.of(
            compiled,
            trained,
            plan=plan,
            network=network,
            device_kind=device_kind,
            rank=rank,
            trains_all=trains_all,
            dealt=[
                exchange_of_dealt(num_bytes, owner=owner, times=times_brought(plan, workload))
                for num_bytes, owner in list_dealt(profile, plan, trains_all=trains_all)
            ],
        )
    sums = estimate_sums(profile, plan, network, sequence_length=workload.sequence_length)
    after = UpdateExchange.of(trained, network=network, plan=plan, device_kind=device_kind, trains_all=trains_all)
    state = estimate_state(tensors, plan, workload=workload, device_kind=machine.device.kind)
    brought_bytes = find_brought(profile, plan, trains_all=trains_all, rank=rank, own=own).num_bytes
    gradients = estimate_gradient_bytes(tensors, plan, device_kind=machine.device.kind)
    device = single("weights", estimate_weight_bytes(profile, plan.weights) - brought_bytes)
    if own is not None:
        device = single("weights", estimate_stages_weight_bytes(profile, plan.weights, tensors, own) - brought_bytes)
    device += single("optimizer_state", state.device_bytes)
    device += single("gradients", gradients.device)
    make_layout = StepLayout if own is None else partial(StagesLayout, own=own)
    lay_out_plan = partial(make_layout, profile, compiled, plan=plan, workload=workload, machine=machine, sums=sums)
    lay_out_step = partial(lay_out_plan, tensors=tensors, state=state, exchange=exchange, after=after)
    first = lay_out_step(is_first=True).schedule if plan.gradients.choice == "consume" else None
    home_bytes = estimate_home_bytes(profile, plan, trains_all=trains_all, rank=rank, own=own)
    return PreparedStep(
        layout=lay_out_step(),
        stages=Stages(
            profile,
            compiled,
            plan=plan,
            workload=workload,
            machine=machine,
            tensors=tensors,
            state=state,
            schedule_first=first,
            exchange=after,
            rank=rank,
            own=own,
        ),
        tensors=trained,
        updated=tensors,
        network=part.network,
        rank_sent_bytes=_sent_bytes(profile, trained, exchange, plan=plan, part=part) if outer is None else outer.mean_sent_bytes,
        sums=sums,
        outer=outer,
        device_kind=device_kind,
        always=Resident(
            device=device,
            host=gradients.host + state.host_bytes + home_bytes["host"] + (0 if outer is None else outer.host_bytes),
            disk=state.disk_bytes + home_bytes["disk"],
            remote=state.remote_bytes + home_bytes["remote"],
        ),
    )


def _sent_bytes(
    profile: Profile, trained: TensorList, exchange: GradientExchange | None, *, plan: Plan, part: RankPart
) -> tuple[int, ...]:
    if part.network is not None and plan.layout.is_cut:
        num_tokens = plan.batch.micro_batch_size * part.workload.sequence_length
        return estimate_staged_bytes(
            part.network,
            len(trained.sizes),
            ranks=plan.layout.rank_stages,
            hidden_bytes=num_tokens * profile.hidden_size * plan.weights.bytes_per_element,
            num_micro_batches=plan.batch.accumulation_steps,
        )
    return () if exchange is None else exchange.rank_sent_bytes


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A plan as tasks in order, with what is there all the while."""

    schedule: Schedule
    resident: Resident
    setting: PreparedStep

    rank: int
    workload: TrainingWorkload
    """The rank's part of the workload, and of the machine: both whole on one device."""
    machine: Machine

    @property
    def tensors(self) -> TensorList:
        """All that are trained."""
        return self.setting.tensors

    @property
    def updated(self) -> TensorList:
        """Tensors that this rank updates."""
        return self.setting.updated

    @cached_property
    def synchronizing(self) -> Schedule | None:
        """The step at whose end ranks that take steps alone are brought together; None where they share every step."""
        if self.setting.outer is None:
            return None
        schedule = self.schedule
        return replace(schedule, update=schedule.update + self.setting.bringing_together)

    @cached_property
    def highest(self) -> Highest:
        """The highest moment of a steady step."""
        return Highest(self.schedule, self.resident.device, resident_bytes=self.resident.device_bytes)


def lay_out(profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine) -> LaidOut:
    """The step of the rank with the highest peak, the lowest of such. Raises as ``estimate_training`` does."""
    return highest_of(lay_out_ranks(profile, plan=plan, workload=workload, machine=machine))


def highest_of(ranks: Sequence[LaidOut]) -> LaidOut:
    """The rank with the highest peak, the lowest of such."""
    return ranks[0] if len(ranks) == 1 else max(ranks, key=lambda laid: (laid.highest.num_bytes, -laid.rank))


def check_plan(profile: Profile, plan: Plan, workload: TrainingWorkload) -> None:
    """Raise InvalidPlan where the plan contradicts itself, the model or the workload."""
    plan.check(
        num_blocks=profile.num_blocks,
        workload=workload,
        has_sparse_gradients=profile.has_sparse_gradients,
        has_plain_head=profile.has_plain_head,
        clamps_fp16=profile.clamps_fp16,
    )
    if plan.layout.is_cut:
        check_cut(profile)


def lay_out_ranks(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine
) -> tuple[LaidOut, ...]:
    """The steps of all ranks of a replica, the fullest first; one of them where all are alike. Raises as ``estimate_training``
    does.

    Ranks of a whole model that differ in more than what they own are laid out one by one, as ``estimate/uneven.py`` has them.
    """
    if plan.layout.is_cut:
        stages = lay_out_stages(profile, plan=plan, workload=workload, machine=machine)
        return tuple(sorted(stages, key=lambda laid: (-laid.highest.num_bytes, laid.rank)))
    if plan.layout.ranks:
        raise ValueError("ranks that differ are laid out one by one (list_cases)")
    profile = profile.of_layout(plan.layout)
    check_plan(profile, plan, workload)
    part = find_part(workload, machine, plan.layout)

    def lay_out_rank(rank: int) -> LaidOut:
        setting = find_setting(
            profile, plan=plan, workload=part.workload, machine=part.machine, rank=rank, network=part.network
        )
        return LaidOut(
            schedule=setting.layout.schedule(plan.activations.per_block),
            resident=setting.resident(plan),
            setting=setting,
            rank=rank,
            workload=part.workload,
            machine=part.machine,
        )

    if not plan.layout.shares_state:
        return (lay_out_rank(0),)
    # Those of other replicas do the same.
    num_sharing = plan.layout.num_sharing
    fullest = list_tensors(profile).fullest_rank(num_sharing)
    others = (rank for rank in range(num_sharing) if rank != fullest)
    return lay_out_rank(fullest), *map(lay_out_rank, others)


def find_stages(profile: Profile, plan: Plan, part: RankPart, own: RankStages) -> tuple[PreparedStep, StagesLayout]:
    """The prepared step of one rank of a model that is cut. plan: of which the cut itself is not read."""
    setting = find_setting(
        profile,
        plan=replace(plan, layout=plan.layout.without_ranks),
        workload=part.workload,
        machine=part.machine,
        rank=own.rank,
        network=part.network,
        own=own,
    )
    assert isinstance(setting.layout, StagesLayout)
    return setting, setting.layout


def lay_out_stages(profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine) -> tuple[LaidOut, ...]:
    """The steps of the ranks of a model that is cut, in order, each on its own device, with what it waits for the others. Raises
    as ``estimate_training`` does.
    """
    check_plan(profile, plan, workload)
    machine_parts, ranks = find_stage_parts(workload, machine, plan.layout), plan.layout.rank_stages
    choices, device_kind, network = plan.activations.per_block, machine.device.kind, machine_parts[0].network
    assert network is not None
    settings, layouts = [], []
    for own, part in zip(ranks, machine_parts, strict=True):
        setting, layout = find_stages(profile, plan, part, own)
        settings.append(setting)
        layouts.append(layout)
    parts = [layout.parts(choices) for layout in layouts]
    clocked = zip(parts, layouts, strict=True)
    ran, _ = run_steady(
        [StagesClock(each, layout.update, device_kind=device_kind) for each, layout in clocked],
        ranks=ranks,
        num_micro_batches=plan.batch.accumulation_steps,
        schedule=plan.layout.schedule,
        crossing_ms=crossing_ms(network, layouts[0].hidden_bytes),
        notice_ms=notice_ms(network),
    )
    return tuple(
        LaidOut(
            schedule=layout.schedule_of(of_stage, waited_ms),
            resident=setting.resident(plan, ranks[rank]),
            setting=setting,
            rank=rank,
            workload=part.workload,
            machine=part.machine,
        )
        for rank, (layout, of_stage, setting, waited_ms, part) in enumerate(
            zip(layouts, parts, settings, ran.waited_ms, machine_parts, strict=True)
        )
    )
