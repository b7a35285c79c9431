"""The problem that a search is given: the goal, the freedom it leaves, and a function that prices one plan.

The core knows no model and no machine, only ``price``; ``search.py`` binds it to the estimator. So the solver can be
tested against any function, and what it optimizes is by construction what the estimator predicts.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Final, Literal, Protocol, Self, get_args

from optimizer.base.errors import InvalidPlan
from optimizer.estimate.bounds.lower_bounds import Form, Relaxation
from optimizer.estimate.prediction import Prediction
from optimizer.estimate.step.pipeline.schedule import RankPrice
from optimizer.goal import Goal
from optimizer.plan.activations import (
    COMPILED,
    NOT_COMPILED,
    ActivationsPlan,
    BlockChoice,
    BlockKernels,
    Compression,
    KernelsPlan,
)
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import ONE_DEVICE, DeviceLayout
from optimizer.plan.devices.stages import RankStages
from optimizer.plan.gradients import GradientsChoice, GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan, StatePlace
from optimizer.plan.pins.training import Pins
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import Technique
from optimizer.plan.weights import Autocast, FrozenFormat, MasterFormat, WeightsDtype, WeightsPlace, WeightsPlan
from optimizer.search.arrangements import PerBlock, keep_everything
from optimizer.search.budgeted import Budgeted, Priced
from optimizer.workload import TrainingWorkload

Price = Callable[[Plan], Prediction]
PricedPlan = Priced[Plan, Prediction]
OUTER_FIELDS: Final[dict[str, str]] = {
    "batch.micro_batch_size": "micro_batch_size",
    "batch.accumulation_steps": "accumulation_steps",
    "weights.dtype": "dtype",
    "weights.master": "master",
    "weights.autocast": "autocast",
    "weights.frozen": "frozen",
    "optimizer_state.bits": "bits",
    "logits_and_loss.num_chunks": "num_chunks",
    "gradients.choice": "gradients",
    "optimizer_state.place": "state_place",
    "optimizer_state.fraction": "state_fraction",
    "weights.place": "weights_place",
    "weights.prefetch": "prefetch",
    "activations.compress": "compress",
    "kernels.blocks": "kernels",
    "allocator.expandable_segments": "expandable_segments",
}
"""By path, the field of ``OuterPlan`` that holds the knob's value."""
_GETTERS: Final = tuple((name, attrgetter(path)) for path, name in OUTER_FIELDS.items())
StateBits = Literal[32, 8]


@dataclass(frozen=True, kw_only=True)
class OuterPlan:
    """The discrete choices outside the blocks, flat. The defaults are plain training's."""

    micro_batch_size: int
    accumulation_steps: int
    dtype: WeightsDtype = "fp32"
    master: MasterFormat = "fp32"
    autocast: Autocast = "off"
    frozen: FrozenFormat = "same"
    bits: StateBits = 32
    num_chunks: int = 1
    gradients: GradientsChoice = "keep"
    state_place: StatePlace = "device"
    state_fraction: float = 1.0
    weights_place: WeightsPlace = "device"
    prefetch: int = 1
    compress: Compression = "none"
    """Compression of offloaded blocks; a plan without any is written down without compression."""
    kernels: BlockKernels = "memory_saving"
    expandable_segments: bool = False
    layout: DeviceLayout = ONE_DEVICE

    def plan(self, per_block: tuple[BlockChoice, ...]) -> Plan:
        activations = ActivationsPlan(per_block=per_block, compress=self.compress)
        return Plan(
            layout=self.layout,
            batch=BatchPlan(micro_batch_size=self.micro_batch_size, accumulation_steps=self.accumulation_steps),
            weights=WeightsPlan(
                dtype=self.dtype,
                master=self.master,
                autocast=self.autocast,
                frozen=self.frozen,
                place=self.weights_place,
                prefetch=self.prefetch if self.brings_weights else 1,
            ),
            gradients=GradientsPlan(choice=self.gradients),
            optimizer_state=OptimizerStatePlan(
                bits=self.bits,
                place=self.state_place,
                fraction=self.state_fraction if self.state_place != "device" else 1.0,
            ),
            activations=activations if activations.num_offloaded else ActivationsPlan(per_block=per_block),
            logits_and_loss=LogitsAndLossPlan(num_chunks=self.num_chunks),
            kernels=KernelsPlan(blocks=self.kernels),
            allocator=AllocatorPlan(expandable_segments=self.expandable_segments),
        )

    @classmethod
    def of(cls, plan: Plan) -> "OuterPlan":
        """Read what a plan decides outside its blocks."""
        return cls(layout=plan.layout, **{name: get(plan) for name, get in _GETTERS})

    @property
    def brings_weights(self) -> bool:
        """True if blocks' weights come to a device for as long as the block runs."""
        return self.weights_place != "device" or self.layout.shares_weights

    @property
    def base(self) -> "OuterPlan":
        """Its devices, micro-batch and representation alone."""
        return OuterPlan(
            micro_batch_size=self.micro_batch_size,
            accumulation_steps=self.accumulation_steps,
            dtype=self.dtype,
            master=self.master,
            autocast=self.autocast,
            frozen=self.frozen,
            bits=self.bits,
            kernels=self.kernels,
            layout=self.layout,
        )

    @property
    def home(self) -> "OuterPlan":
        """The same with one count of chunks, and as little on the device as may be there."""
        return replace(self, num_chunks=1, state_fraction=1.0, prefetch=1, compress="none", expandable_segments=False)


class RankPrices(Protocol):
    """Prices of single ranks of a model that is cut (``rank_pricer.py``)."""

    @property
    def device_kind(self) -> str: ...

    def limits_bytes(self, budget_bytes: int) -> tuple[int, ...]:
        """By rank, the most that it may take under a budget of every device."""

    def whole_ms(self, plan: Plan) -> list[float]:
        """By rank, the least time in which its device would do all blocks' work on a step."""

    def least_ms(self, plan: Plan) -> float:
        """No cut of the plan over its devices is faster."""

    def price_rank(self, plan: Plan, own: RankStages) -> RankPrice:
        """plan: of which the cut itself is not read."""

    def step_ms(self, plan: Plan, ranks: Sequence[RankStages], prices: Sequence[RankPrice]) -> float:
        """Milliseconds of a step of ranks that were priced one by one."""


class Relax(Protocol):
    """Lower bounds on plans, without a price."""

    def base_ms(self, base: OuterPlan) -> float:
        """No plan of the base is faster."""

    def compute_ms(self, base: OuterPlan) -> float:
        """A step of the base's plans computes for no less."""

    def exchange_ms(self, base: OuterPlan) -> tuple[float, float]:
        """Compute waits for other ranks for no less than the first, the network is busy for no less than the second."""

    def setting(
        self, setting: OuterPlan, *, forms: tuple[Form, ...], chunk_counts: tuple[int, ...], state_is_free: bool
    ) -> Relaxation:
        """state_is_free: any share of the state may leave. The setting's own count of chunks is not looked at."""

    def kinds(self, base: OuterPlan, *, choices: tuple[BlockChoice, ...]) -> tuple[int, ...]:
        """A number for each block: the same where blocks take nearly the same bytes and time for doing the same."""


@dataclass(frozen=True, kw_only=True)
class SearchProblem(Budgeted[Plan, Prediction, Goal]):
    """Everything the solver may know."""

    num_blocks: int
    workload: TrainingWorkload
    """The part of the work that each rank of the layout does: all of it on one device."""
    layout: DeviceLayout = ONE_DEVICE
    """The devices of every plan; ``questions/layouts.py`` searches several."""
    has_sparse_gradients: bool = False
    """A fact of the model (``Plan.find_conflict``), as are the next two."""
    has_plain_head: bool = True
    clamps_fp16: bool = False
    micro_batch_size: int | None = None
    """Only this one; None for every divisor of the batch."""
    price_afresh: Price | None = None
    """``price`` without the memory of a search (``pricebook.remembering``); None where it has none."""
    audit: Callable[[Plan, Prediction], tuple[str, ...]] | None = None
    """Finds faults in a plan's prediction by an independent replay; asked for the chosen plan alone."""
    file_bytes: Callable[[Plan], int] | None = None
    """Most bytes in the job's own files, which follow from the number formats alone; None where they are not looked at."""
    rank_prices: RankPrices | None = None
    """Prices of single ranks; of layouts that cut the model."""
    relax: Relax | None = None
    """Lower bounds on a setting's plans; asked where there are too many to try them all."""
    names_ways: bool = True
    """If nothing fits, the error names what else could be allowed; false for a caller that prices ways out itself."""

    def allows(self, technique: Technique) -> bool:
        """Report whether the goal, the machine, the workload and the model permit it."""
        if technique == "quantize_frozen" and self.workload.adapter is None:
            return False
        if technique == "chunked_loss" and (self.workload.has_pairs or not self.has_plain_head):
            return False
        return super().allows(technique)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each block: those of one kind cost nearly the same for doing the same. All alike where that is unknown."""
        if self.relax is None or not self.settings():
            return (0,) * self.num_blocks
        return self.relax.kinds(self.settings()[0], choices=("keep", *self.rebuilding))

    @property
    def choices(self) -> tuple[BlockChoice, ...]:
        """The choices that a block may take."""
        return ("keep", *self.rebuilding, *self.offloading)

    @property
    def rebuilding(self) -> tuple[BlockChoice, ...]:
        """The choices that run ops again, lightest first."""
        if not self.allows("recompute"):
            return ()
        choices: tuple[BlockChoice, ...] = ("recompute", "selective")
        is_compiled = self.goal.pins.kernels.blocks == "compiled"
        return tuple(choice for choice in choices if not is_compiled or choice not in NOT_COMPILED)

    @property
    def offloading(self) -> tuple[BlockChoice, ...]:
        """The choices that move bytes away, nearest first."""
        if not self.allows("offload"):
            return ()
        places: tuple[tuple[BlockChoice, bool], ...] = (
            ("offload", True),
            ("offload_remote", self.allows("remote")),
            ("offload_disk", self.allows("disk")),
        )
        return tuple(choice for choice, is_allowed in places if is_allowed)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The choices, those that move bytes with every packing that is allowed."""
        pinned = self.pinned_levers.get("compress")
        packings: tuple[Compression, ...] = get_args(Compression) if self.allows("compress") else ("none",)
        if pinned is not None:
            packings = (pinned,)
        moved = [(choice, packing) for choice in self.offloading for packing in packings]
        kept: list[Form] = [(choice, "none") for choice in ("keep", *self.rebuilding)]
        return (*kept, *moved)

    @property
    def pinned_blocks(self) -> PerBlock | None:
        """The choice of every block, where the goal pins it."""
        return self.goal.pins.blocks(self.num_blocks)

    @property
    def pinned_levers(self) -> dict[str, Any]:
        """Fields of ``OuterPlan`` that the goal pins and that belong neither to a base nor to a home (``solver/levers.py``)."""
        pins = self.goal.pins
        pinned: dict[str, Any] = {
            "num_chunks": pins.logits_and_loss.num_chunks,
            "prefetch": pins.weights.prefetch,
            "compress": pins.activations.compress,
            "state_fraction": pins.optimizer_state.fraction,
            "expandable_segments": pins.allocator.expandable_segments,
            "kernels": pins.kernels.blocks,
        }
        return {name: value for name, value in pinned.items() if value is not None}

    @cached_property
    def whole_workload(self) -> TrainingWorkload:
        """The work of all ranks."""
        if self.layout.num_parts == 1:
            return self.workload
        return replace(self.workload, global_batch_size=self.workload.global_batch_size * self.layout.num_parts)

    def permits(self, plan: Plan) -> bool:
        """Report whether every technique of the plan is allowed, all together can be carried out, and every pin is kept."""
        if self.micro_batch_size not in (None, plan.batch.micro_batch_size) or self.goal.pins.broken_by(plan):
            return False
        allowed = all(self.allows(technique) for technique in plan.techniques)
        return allowed and self.find_conflict(plan) is None

    def find_conflict(self, plan: Plan) -> InvalidPlan | None:
        """The decisions of the plan that cannot be carried out together for this workload and this model."""
        return plan.find_conflict(
            self.workload,
            has_sparse_gradients=self.has_sparse_gradients,
            has_plain_head=self.has_plain_head,
            clamps_fp16=self.clamps_fp16,
        )

    def check(self, plan: Plan) -> None:
        """Raise InvalidPlan where the plan suits neither this workload nor this model."""
        plan.check(
            num_blocks=self.num_blocks,
            workload=self.whole_workload,
            has_sparse_gradients=self.has_sparse_gradients,
            has_plain_head=self.has_plain_head,
            clamps_fp16=self.clamps_fp16,
        )

    def permits_setting(self, setting: OuterPlan) -> bool:
        """The same for what is decided outside the blocks; False also where that contradicts itself."""
        known = self._permitted.get(setting)
        if known is None:
            known = self._permitted[setting] = self._finds_permitted(setting)
        return known

    @cached_property
    def _permitted(self) -> dict[OuterPlan, bool]:
        return {}

    def with_budget(self, device_budget_bytes: int) -> Self:
        """The same problem under another budget of the device, which permits the same plans."""
        other = super().with_budget(device_budget_bytes)
        other.__dict__["_permitted"], other.__dict__["_file_bytes"] = self._permitted, self._file_bytes
        return other

    def _finds_permitted(self, setting: OuterPlan) -> bool:
        # What cannot go together does not depend on how many blocks there are.
        per_block = self.pinned_blocks or keep_everything(1)
        try:
            return self.permits(setting.plan(per_block))
        except InvalidPlan:
            return False

    def settings(self) -> tuple[OuterPlan, ...]:
        """Micro-batches and representations, from lossless to smallest, and in each the micro-batch from small to large.

        Those whose files the disk has no room for are left out, unless it has room for none. All else in them is as pinned or as
        in plain training; ``solver/levers.py`` says what can be added. Where gradients, state and weights are pinned to live is
        left to it too.
        """
        return self._settings

    @cached_property
    def _settings(self) -> tuple[OuterPlan, ...]:
        free = replace(self, goal=replace(self.goal, pins=_without_homes(self.goal.pins)))
        total = self.workload.global_batch_size
        sizes = divisors(total) if self.allows("accumulate") else [total]
        if self.micro_batch_size is not None:
            sizes = [size for size in sizes if size == self.micro_batch_size]
        found = [
            replace(
                representation,
                micro_batch_size=size,
                accumulation_steps=total // size,
                layout=self.layout,
                **self.pinned_levers,
            )
            for representation in _REPRESENTATIONS
            for size in sizes
        ]
        permitted = tuple(setting for setting in found if self._is_known(setting) and free.permits_setting(setting))
        return tuple(filter(self._has_disk_for, permitted)) or permitted

    @property
    def lacks_disk(self) -> bool:
        """True where the disk has no room for the job's files in any of the settings."""
        return bool(self.settings()) and not self._has_disk_for(self.settings()[0])

    def _has_disk_for(self, setting: OuterPlan) -> bool:
        if self.file_bytes is None or not self.disk_budget_bytes:
            return True
        formats = (setting.dtype, setting.master, setting.frozen, setting.bits)
        needed_bytes = self._file_bytes.get(formats)
        if needed_bytes is None:
            needed_bytes = self._file_bytes[formats] = self.file_bytes(setting.plan(keep_everything(self.num_blocks)))
        return needed_bytes <= self.disk_budget_bytes * self.num_sharing

    @cached_property
    def _file_bytes(self) -> dict[Hashable, int]:
        """Most bytes in the job's own files, by number formats."""
        return {}

    def _is_known(self, setting: OuterPlan) -> bool:
        weights = WeightsPlan(dtype=setting.dtype, autocast=setting.autocast, frozen=setting.frozen)
        return self.is_known(weights.representation + (COMPILED if setting.kernels == "compiled" else ""))


_PLAIN: Final = OuterPlan(micro_batch_size=1, accumulation_steps=1)
_DTYPES: Final = (
    _PLAIN,
    replace(_PLAIN, autocast="bf16"),
    replace(_PLAIN, autocast="fp16"),
    replace(_PLAIN, dtype="bf16"),
    replace(_PLAIN, dtype="bf16", master="none"),
    replace(_PLAIN, dtype="fp16"),
)
_FROZEN: Final[tuple[FrozenFormat, ...]] = get_args(FrozenFormat)
_BITS: Final[tuple[StateBits, ...]] = (32, 8)
_REPRESENTATIONS: Final = tuple(
    replace(setting, frozen=frozen, bits=bits) for setting in _DTYPES for frozen in _FROZEN for bits in _BITS
)


def _without_homes(pins: Pins) -> Pins:
    return replace(
        pins,
        gradients=replace(pins.gradients, choice=None),
        optimizer_state=replace(pins.optimizer_state, place=None),
        weights=replace(pins.weights, place=None),
    )


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
