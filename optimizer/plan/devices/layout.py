"""Decisions about the devices of a training: how many a plan runs on, and what each of them keeps to itself.

Each device has a process of its own, a rank. All ranks hold the whole model and run the same plan; each takes an equal share of
a step's micro-batches, and their gradients are summed. On unequal devices ``ranks`` says of each which kind of device it runs
on, how much of a step it takes, and what it does with its own activations; all else is decided for all. With ``zero1`` and
``zero2`` every trained tensor has one rank that owns it (``formats/ownership.py``): it alone keeps the tensor's optimizer
state, updates the tensor, and sends the new weights to the others (Rajbhandari et al., ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models, sections 5.1 to 5.3; whole tensors instead of flat shards, so that every format and place
of state works as on one device). With ``zero3`` the tensors of blocks are on their owners' devices alone between uses, those
that are not trained too. Weights that stream from the host are there once for all ranks (``Plan.shares_homes``), so an owner
has nobody to send them to; where every rank updates them, each has its own.

With several ``replicas`` all of that is there several times, each time among neighbouring ranks, such as those of one machine
(hybrid sharding: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023, section 3.2.2). An owner's
gradient is then summed with those of the owners of the same tensor in other replicas, once a step where gradients stay on the
device; a slow link between machines carries nothing else of weights and gradients.

Or the model is cut (``stages.py``): each rank has some neighbouring blocks and all that belongs to them, and a step's
micro-batches go through all ranks, one after the other. Then every rank sees the whole batch, and on unequal devices ``ranks``
says on which kind each rank's stages run; what its blocks do with activations is what the plan says of these blocks. With more
stages than ranks, micro-batches come round several times, and each rank has as many runs of neighbouring blocks. With
``breadth_first`` it does all micro-batches of a stage before it goes on to its next, so weights that stream from the host come
once for all of them: the ranks are then a pool that works on what the host keeps, each with a stage or two at a time.

Or ranks share each block (``tensor``, Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, 2019, section 3): each has some heads of every attention and some neurons of every MLP, with their weights, gradients
and state, and sees the whole batch; what the parts add to the hidden state is summed twice in each block. What belongs to no
block, and norms, are on all of them. So each rank runs the same architecture with narrower blocks (``formats/shared_blocks.py``).

Or ranks exchange no gradients at all: each takes ``sync_every`` steps alone, with an optimizer of its own on its own share of
each step, and then all of them go on from the mean of their weights (Stich, Local SGD Converges Fast and Communicates Little,
2018), or from what an outer step of momentum makes of their differences (Douillard et al., DiLoCo: Distributed Low-Communication
Training of Language Models, 2023, algorithm 1). That is another training, not the same one with another order of sums, so it is
used only where losses of quality are allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from optimizer.base.categories import BlockChoice
from optimizer.base.errors import InvalidPlan
from optimizer.base.limits import MAX_DEVICES, MAX_STAGES, find_stages_fault
from optimizer.plan.devices.stages import PipelineSchedule, RankStages, StageOfModel, deal_stages, list_stages

DataParallel = Literal["replicated", "zero1", "zero2", "zero3"]
SyncFormat = Literal["fp32", "bf16", "int8"]
"""Numbers in which differences of weights cross between ranks; int8 with a scale for every 256 of them."""
SyncRule = Literal["average", "nesterov"]
"""Common weights from the ranks' differences: the mean of their weights, or DiLoCo's outer step, whose momentum goes further than
the mean. The longer ranks are alone, the more that is worth; over few steps it overshoots (docs/experiments.md)."""
MAX_SYNC_EVERY: Final = 10_000
MAX_INT8_RANKS: Final = 8
"""Most ranks whose whole numbers can be added up in 8 bits: each has a part of them."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Decisions of one rank that differ from the plan's rows, where devices are unequal. None keeps what the row says."""

    device: str = ""
    """Name of the kind of device that it runs on, as the machine has it; empty for the machine's first kind."""
    micro_batch_size: int | None = None
    """Sequences of each of its micro-batches, 1 or more."""
    accumulation_steps: int | None = None
    """Its micro-batches in a step, 1 or more."""
    per_block: tuple[BlockChoice, ...] | None = None
    """Its blocks' ways with the activations that they save, first to last."""

    def check(self, rank: int) -> None:
        """Raise InvalidPlan for numbers below 1."""
        for name in ("micro_batch_size", "accumulation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                field = f"plan.layout.ranks[{rank}].{name}"
                raise InvalidPlan(
                    f"{field} is {value}; allowed: 1 or more", field=field, value=value, allowed={"minimum": 1}
                )


_EVERY_MICRO_BATCH: Final = "every micro-batch goes through all ranks: leave it out, plan.batch is of all"
_OF_ALL_STAGES: Final = {
    "micro_batch_size": _EVERY_MICRO_BATCH,
    "accumulation_steps": _EVERY_MICRO_BATCH,
    "per_block": "each block is on one rank: leave it out, plan.activations.per_block says what it does there",
}
"""Decisions of ranks that are one for all where the model is cut, each with why."""


@dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """The devices that share a step.

    replicated  every rank sums all gradients and updates all weights.
    zero1       a tensor's gradient is summed on its owner once a step, after the last micro-batch; the others then drop theirs.
    zero2       the same after each micro-batch, so that a rank never holds whole gradients of tensors that it does not own.
    zero3       zero2, and each weight of a block is on its owner's device alone: the others get it for the block's forward and
                backward, ``weights.prefetch`` blocks ahead, and drop it after. What belongs to no block is on every device.
    """

    num_devices: int = 1
    """Ranks, 1 to 64; each takes ``workload.global_batch_size / num_devices`` sequences of a step, unless ``ranks`` says
    otherwise."""
    data: DataParallel = "replicated"
    """``replicated`` on one device."""
    replicas: int = 1
    """Times that what ranks share is there, each time among as many neighbouring ranks: what ``data`` shares out, and homes of
    weights that stream. 1, or a divisor of ``num_devices``."""
    ranks: tuple[RankShare, ...] = ()
    """One for each rank, in order; empty where all do the same on the machine's first kind of device. Where the model is cut they
    say the device alone."""
    stage_blocks: tuple[int, ...] = ()
    """Number of blocks of each stage in the order of the model; empty if the model is not cut. As many stages as devices, or a
    multiple, which are dealt out to the devices in turn."""
    schedule: PipelineSchedule = "1f1b"
    """Order of a cut model's micro-batches: 1f1b begins backward as early as it can, so that few are under way at once; gpipe has
    all forward first; breadth_first, which several stages on a device need, has all micro-batches through a stage before the
    next, and brings what streams once for them."""
    tensor: int = 1
    """Ranks that share each block's heads and neurons: 1, or all of ``num_devices``, which must then be like devices that have no
    other way to share."""
    sync_every: int = 1
    """Steps that each rank takes alone between two synchronizations, 1 to 10,000; with 1 ranks share every step. More only where
    every rank has the whole model and all of its state (``replicated``)."""
    sync_format: SyncFormat = "fp32"
    """Number format of the differences that are sent; of no effect where ranks share every step."""
    sync_rule: SyncRule = "average"
    """The way to common weights; of no effect where ranks share every step."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MAX_DEVICES:
            raise InvalidPlan(
                f"plan.layout.num_devices is {self.num_devices}; allowed: 1 to {MAX_DEVICES}",
                field="plan.layout.num_devices",
                value=self.num_devices,
                allowed={"minimum": 1, "maximum": MAX_DEVICES},
            )
        if self.num_devices == 1 and self.data != "replicated":
            raise InvalidPlan(
                f"plan.layout.data is {self.data} on one device, which has nobody to share with; allowed: replicated",
                field="plan.layout.data",
                value=self.data,
                allowed=["replicated"],
            )
        if len(self.ranks) not in (0, self.num_devices):
            raise InvalidPlan(
                f"plan.layout.ranks names {len(self.ranks)} ranks; plan.layout.num_devices is {self.num_devices}",
                field="plan.layout.ranks",
                value=len(self.ranks),
                allowed=[0, self.num_devices],
            )
        for rank, share in enumerate(self.ranks):
            share.check(rank)
        if self.stage_blocks:
            self._check_cut()
        self._check_replicas()
        self._check_tensor()
        self._check_local_steps()

    def _check_replicas(self) -> None:
        if self.replicas == 1:
            return
        least = 2 if self.shares_state else 1
        is_whole = self.replicas >= 1 and self.num_devices % self.replicas == 0 and self.num_sharing >= least
        shown, several = f"plan.layout.num_devices is {self.num_devices}", f"plan.layout.replicas is {self.replicas}"
        for name, is_broken, value, why in (
            ("replicas", not is_whole, self.replicas, f"{shown}, dealt out evenly with {least} or more for each"),
            ("tensor", self.shares_blocks, self.tensor, f"{several}: use 1 of one of them"),
            ("stage_blocks", self.is_cut, ", ".join(map(str, self.stage_blocks)), f"{several}, of a whole model: leave it out"),
        ):
            if is_broken:
                field = f"plan.layout.{name}"
                raise InvalidPlan(f"{field} is {value}; {why}", field=field, value=value, allowed=why)

    def _check_tensor(self) -> None:
        if self.tensor == 1:
            return
        num_devices = self.num_devices
        for name, is_broken, value, why in (
            ("tensor", self.tensor != num_devices, self.tensor, f"plan.layout.num_devices is {num_devices}: use all, or 1"),
            ("data", self.shares_state, self.data, "each block is shared, and its state with it: use replicated"),
            ("stage_blocks", self.is_cut, ", ".join(map(str, self.stage_blocks)), "all devices run every block: leave it out"),
            ("sync_every", self.steps_alone, self.sync_every, "devices that share each block share every step: use 1"),
            ("ranks", bool(self.ranks), len(self.ranks), "devices that share each block are alike: leave it out"),
        ):
            if is_broken:
                field = f"plan.layout.{name}"
                raise InvalidPlan(f"{field} is {value}; {why}", field=field, value=value, allowed=why)

    def _check_local_steps(self) -> None:
        if not 1 <= self.sync_every <= MAX_SYNC_EVERY:
            raise InvalidPlan(
                f"plan.layout.sync_every is {self.sync_every}; allowed: 1 to {MAX_SYNC_EVERY}",
                field="plan.layout.sync_every",
                value=self.sync_every,
                allowed={"minimum": 1, "maximum": MAX_SYNC_EVERY},
            )
        if not self.steps_alone:
            return
        for name, is_broken, value, why in (
            ("num_devices", self.num_devices == 1, self.num_devices, "steps between synchronizations of several devices: use 1"),
            ("data", self.shares_state, self.data, "steps with all of the state on every device: use replicated"),
            ("stage_blocks", self.is_cut, ", ".join(map(str, self.stage_blocks)), "steps of a whole model: leave it out"),
            (
                "sync_format",
                self.sync_format == "int8" and self.num_devices > MAX_INT8_RANKS,
                "int8",
                f"steps of {self.num_devices} devices; at most {MAX_INT8_RANKS} add up in 8 bits: use bf16",
            ),
        ):
            if is_broken:
                raise InvalidPlan(
                    f"plan.layout.{name} is {value}; plan.layout.sync_every is {self.sync_every}, {why}",
                    field=f"plan.layout.{name}",
                    value=value,
                    allowed=why,
                )

    def _check_cut(self) -> None:
        shown = ", ".join(map(str, self.stage_blocks))
        if fault := find_stages_fault(self.stage_blocks, most=MAX_STAGES):
            raise _refused_cut(shown, fault)
        num_stages = len(self.stage_blocks)
        deals_out = self.num_devices > 1 and num_stages % self.num_devices == 0
        for name, is_broken, value, why in (
            ("num_devices", not deals_out, self.num_devices, "one device for each, or as many stages for every device"),
            ("data", self.data != "replicated", self.data, "which leave nothing to share out: use replicated"),
            (
                "schedule",
                self.num_rounds > 1 and self.schedule != "breadth_first",
                self.schedule,
                f"{num_stages} stages on {self.num_devices} devices: use breadth_first, or a stage for each device",
            ),
        ):
            if is_broken:
                raise InvalidPlan(
                    f"plan.layout.{name} is {value}; plan.layout.stage_blocks is {shown}, {why}",
                    field=f"plan.layout.{name}",
                    value=value,
                    allowed=why,
                )

        for rank, share in enumerate(self.ranks):
            for name, why in _OF_ALL_STAGES.items():
                if (value := getattr(share, name)) is not None:
                    path = f"plan.layout.ranks[{rank}].{name}"
                    raise InvalidPlan(
                        f"{path} is {value}; plan.layout.stage_blocks is {shown}, and {why}", field=path, value=value, allowed=why
                    )

    def share_of(self, rank: int) -> RankShare:
        """The decisions of a rank's own; none of them where all are alike."""
        return self.ranks[rank] if self.ranks else ALIKE

    @property
    def without_ranks(self) -> "DeviceLayout":
        """The decisions that all ranks have in common."""
        return replace(self, ranks=()) if self.ranks else self

    @property
    def is_cut(self) -> bool:
        """True if each rank has a part of the model alone, and sees the whole batch."""
        return bool(self.stage_blocks)

    @property
    def shares_blocks(self) -> bool:
        """True if each rank has a part of every block, and sees the whole batch."""
        return self.tensor > 1

    @property
    def sees_whole_batch(self) -> bool:
        """True if no rank has sequences of its own."""
        return self.is_cut or self.shares_blocks

    @property
    def stages(self) -> tuple[StageOfModel, ...]:
        """All stages in order; none where the model is not cut."""
        return list_stages(self.stage_blocks)

    @property
    def rank_stages(self) -> tuple[RankStages, ...]:
        """The stages of each rank; none where the model is not cut."""
        return deal_stages(self.stage_blocks, self.num_devices)

    @property
    def num_rounds(self) -> int:
        """The times that a micro-batch comes to each device of a model that is cut; 1 where it is not."""
        return max(1, len(self.stage_blocks) // self.num_devices)

    @property
    def keeps_streamed(self) -> bool:
        """True if weights that stream stay on the device until all micro-batches have used them."""
        return self.is_cut and self.schedule == "breadth_first"

    @property
    def num_parts(self) -> int:
        """The parts that a batch is dealt out in: one for each rank, one for all where every rank sees all of it."""
        return 1 if self.sees_whole_batch else self.num_devices

    @property
    def shares_state(self) -> bool:
        """True if each trained tensor's optimizer state is on one rank alone."""
        return self.data != "replicated"

    @property
    def reduces_each_micro_batch(self) -> bool:
        return self.data in ("zero2", "zero3")

    @property
    def shares_weights(self) -> bool:
        """True if each weight of a block is on one rank alone between uses."""
        return self.data == "zero3"

    @property
    def num_sharing(self) -> int:
        """The ranks that share one replica."""
        return self.num_devices // self.replicas

    def place_of(self, rank: int) -> int:
        """A rank's place in its replica, from 0; ranks at the same place own the same."""
        return rank % self.num_sharing

    @property
    def has_like_replicas(self) -> bool:
        """True if the ranks of each replica are on like devices and decide alike."""
        starts = range(0, len(self.ranks), self.num_sharing)
        return all(len(set(self.ranks[start : start + self.num_sharing])) == 1 for start in starts)

    @property
    def steps_alone(self) -> bool:
        """True if ranks take several steps without each other between synchronizations."""
        return self.sync_every > 1


@dataclass(frozen=True, kw_only=True)
class LayoutPins:
    """Decisions of ``DeviceLayout`` that are made beforehand; None leaves one free."""

    num_devices: int | None = None
    data: DataParallel | None = None
    replicas: int | None = None
    stage_blocks: tuple[int, ...] | None = None
    schedule: PipelineSchedule | None = None
    tensor: int | None = None
    sync_every: int | None = None
    sync_format: SyncFormat | None = None
    sync_rule: SyncRule | None = None


def check_depth(stage_blocks: Sequence[int], num_blocks: int) -> None:
    """Raise InvalidPlan if the stages are not the blocks of a model of this depth."""
    if stage_blocks and sum(stage_blocks) != num_blocks:
        shown = ", ".join(map(str, stage_blocks))
        raise _refused_cut(shown, f"{sum(stage_blocks)} blocks in all; this model has {num_blocks}")


def _refused_cut(shown: str, why: str) -> InvalidPlan:
    path = "plan.layout.stage_blocks"
    return InvalidPlan(f"{path} is {shown}; {why}", field=path, value=shown, allowed=why)


ALIKE: Final = RankShare()
ONE_DEVICE: Final = DeviceLayout()
DATA_PARALLEL: Final[tuple[DataParallel, ...]] = get_args(DataParallel)
