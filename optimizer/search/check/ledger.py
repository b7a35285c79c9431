"""An independent ledger of a plan's bytes: every change that a profile lists, in the order of a step, added up one by one.

Shares no arithmetic with the estimator's schedule and simulation: no parts summed up before, no templates of tasks, no arrays. A
chosen plan's peak must be this one to the byte, by category, where both are of the micro-batches; only what comes after them
(clipping, the update) may be higher.

*Not followed*: factored state, gradients that do not stay, state or weights away from the device, 8-bit state, sparse gradients,
the loss in chunks, compressed copies, farther tiers than the host, several micro-batches of ranks that share state, models that
are cut over devices. ``follows`` says whether a plan is without them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from optimizer.base.categories import CATEGORIES
from optimizer.estimate.prediction import Prediction
from optimizer.formats.ownership import assign_owners
from optimizer.hardware.machine import Machine
from optimizer.plan.plan import Plan
from optimizer.profile.extent import traced_choice
from optimizer.profile.ops import Part
from optimizer.profile.profile import BlockTemplate, Profile, Regime, tail_name
from optimizer.profile.sizes import Shape, evaluate
from optimizer.profile.trained import BaseSize
from optimizer.workload import TrainingWorkload

_AFTER_MICRO_BATCHES = ("gradient clipping", "optimizer step")
_FP32_BYTES = 4
_ID_BYTES = 8
_COUNTER_BYTES = 4
"""Bytes of the count of a tensor's updates, where the optimizer keeps one."""
_PACKED_TOGETHER = 64
"""Elements of a matrix in 4 bits that share their scales, of 4 bytes."""
_ROUNDING = 1e-9
"""Tolerance of sums of milliseconds in another order."""


@dataclass(kw_only=True)
class Ledger:
    """Bytes now and at their highest."""

    device: dict[str, int]
    host_bytes: int = 0
    peak: dict[str, int] = field(default_factory=dict)
    """Device bytes by category when there were most."""
    host_peak_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    def add(self, tier: str, category: str, num_bytes: int) -> None:
        if tier == "host":
            self.host_bytes += num_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)
        elif tier == "device":
            self.device[category] += num_bytes
            if sum(self.device.values()) > self.peak_bytes:
                self.peak = dict(self.device)


def audit_plan(
    profile: Profile, *, plan: Plan, prediction: Prediction, workload: TrainingWorkload, machine: Machine
) -> tuple[str, ...]:
    """Contradictions between a prediction and the ledger or the work there is; empty where there are none."""
    wrong = list(_list_impossible_times(plan, prediction, device_kind=machine.device.kind))
    if workload.kept_state.declared.is_factored or not follows(profile, plan):
        return tuple(wrong)
    ranks = range(plan.layout.num_sharing if plan.layout.shares_state else 1)
    ledgers = [replay_plan(profile, plan=plan, workload=workload, machine=machine, rank=rank) for rank in ranks]
    ledger = max(ledgers, key=lambda found: found.peak_bytes)
    predicted = {name: num_bytes for name, num_bytes in prediction.device_bytes_by_category.items() if num_bytes}
    found = {name: num_bytes for name, num_bytes in ledger.peak.items() if num_bytes}
    if prediction.peak_moment in _AFTER_MICRO_BATCHES:
        if ledger.peak_bytes > prediction.device_peak_bytes:
            wrong.append(f"has a peak of {ledger.peak_bytes} bytes by the ledger, above {prediction.device_peak_bytes}")
    elif found != predicted:
        wrong.append(f"has by the ledger {found} at the peak, not {predicted}")
    if ledger.host_peak_bytes != prediction.host_peak_bytes:
        wrong.append(f"takes {ledger.host_peak_bytes} bytes of the host by the ledger, not {prediction.host_peak_bytes}")
    return tuple(wrong)


def follows(profile: Profile, plan: Plan) -> bool:
    """Report whether the ledger knows all that the plan does."""
    state, activations = plan.optimizer_state, plan.activations
    return (
        plan.gradients.choice == "keep"
        and not plan.layout.is_cut
        and state.place == "device"
        and state.bits == 32
        and plan.weights.place == "device"
        and plan.logits_and_loss.num_chunks == 1
        and activations.count("offload_disk", "offload_remote") == 0
        and activations.compress == "none"
        and not profile.has_sparse_gradients
        and not (plan.layout.shares_state and plan.batch.accumulation_steps > 1)
    )


def replay_plan(
    profile: Profile, *, plan: Plan, workload: TrainingWorkload, machine: Machine, rank: int = 0
) -> Ledger:
    """All micro-batches of a rank's steady step, of a plan that the ledger ``follows``."""
    shape = (plan.batch.micro_batch_size, workload.sequence_length)
    ledger = Ledger(device=dict.fromkeys(CATEGORIES, 0))
    trained = profile.tensors.in_order()
    num_trained = sum(size.num_elements for size in trained)
    element_bytes = _FP32_BYTES if plan.weights.dtype == "fp32" else 2
    owners = [rank] * len(trained)
    if plan.layout.shares_state:
        owners = assign_owners([size.num_elements for size in trained], num_ranks=plan.layout.num_sharing)
    is_own = [owner == rank for owner in owners]
    by_bytes: dict[int, list[bool]] = {}
    for size, own in zip(trained, is_own, strict=True):
        by_bytes.setdefault(size.num_elements * element_bytes, []).append(own)
    regime = profile.regime(plan.representation, shape)
    others = _list_others(profile, plan, owners, rank=rank, trains_all=workload.adapter is None)
    replay = _Replay(profile, regime, shape, plan, owned=by_bytes if plan.layout.shares_state else {}, others=others)
    ledger.add("device", "weights", num_trained * element_bytes - sum(others))
    ledger.add("device", "weights", profile.total_frozen_bytes(plan.weights.representation))
    ledger.add("device", "weights", profile.buffer_bytes["fp32" if plan.weights.dtype == "fp32" else "bf16"])
    num_tensors = sum(is_own)
    num_trained = sum(size.num_elements for size, own in zip(trained, is_own, strict=True) if own)
    if workload.kept_state.counts_steps:
        ledger.add("device", "optimizer_state", _COUNTER_BYTES * num_tensors)
    ledger.add("device", "optimizer_state", workload.num_moments * _FP32_BYTES * num_trained)
    ledger.add("device", "optimizer_state", plan.weights.master_bytes_per_element * num_trained)
    input_bytes = _input_bytes(profile, shape)
    for index in range(plan.batch.accumulation_steps):
        ledger.add("device", "temporaries", input_bytes)
        before_bytes = ledger.device["logits_and_loss"]
        replay.micro_batch(ledger, which="first" if index == 0 else "accumulate")
        if index:
            # Its loss has been added to the first one's.
            ledger.add("device", "logits_and_loss", before_bytes - ledger.device["logits_and_loss"])
        if machine.device.kind != "cpu":
            # The CPU device's own batches are there already and count to the step's end.
            ledger.add("device", "temporaries", -input_bytes)
    return ledger


def _list_others(profile: Profile, plan: Plan, owners: list[int], *, rank: int, trains_all: bool) -> list[int]:
    """Bytes of each block's weights that other ranks keep; none unless ranks share weights out. owners: of trained tensors."""
    if not plan.layout.shares_weights:
        return []
    found = [0] * profile.num_blocks
    if trains_all:
        size = _FP32_BYTES if plan.weights.dtype == "fp32" else 2
        for (block, tensor), owner in zip(profile.tensors.placed(), owners, strict=True):
            if 0 <= block < profile.num_blocks and owner != rank:
                found[block] += size * tensor.num_elements
        return found
    held = [0] * plan.layout.num_sharing
    kinds = () if profile.base is None else profile.base.by_block
    for block, kind in enumerate(profile.tensors.block_kinds):
        for num_bytes in sorted((_frozen_bytes(size, plan) for size in kinds[kind]), reverse=True):
            owner = held.index(min(held))
            held[owner] += num_bytes
            found[block] += num_bytes if owner != rank else 0
    return found


def _frozen_bytes(size: BaseSize, plan: Plan) -> int:
    element_bytes = _FP32_BYTES if plan.weights.dtype == "fp32" else 2
    if not size.packs or plan.weights.frozen == "same":
        return element_bytes * size.num_elements
    if plan.weights.frozen == "int8":
        return size.num_elements + element_bytes * size.num_scales
    return -(-size.num_elements // _PACKED_TOGETHER) * (_PACKED_TOGETHER // 2 + _FP32_BYTES)


def _input_bytes(profile: Profile, shape: Shape) -> int:
    batch, sequence = shape
    if profile.input_bytes is not None:
        return batch * profile.input_bytes
    return profile.num_inputs * _ID_BYTES * batch * sequence


class _Replay:
    """Walks through the parts of one micro-batch."""

    def __init__(
        self, profile: Profile, regime: Regime, shape: Shape, plan: Plan, *, owned: dict[int, list[bool]], others: list[int]
    ) -> None:
        """owned: by bytes of a gradient, whether its tensor is this rank's own, in the model's order; backward takes the last
        first. Empty where the rank keeps all. others: bytes of each block that come while it runs; empty where all are there.
        """
        self._others, self._prefetch = others, plan.weights.prefetch
        self._present: set[int] = set()
        self._owned = owned
        self._profile, self._regime, self._shape = profile, regime, shape
        self._choices = plan.activations.per_block
        self._last_uses = self._find_last_uses()
        self._sizes: dict[int, int] = {}
        """Sizes of the profile's changes at this shape, by their index."""

    def micro_batch(self, ledger: Ledger, *, which: str) -> None:
        self._walk(ledger, self._named("prologue"))
        for block in range(len(self._choices)):
            self._bring(ledger, range(block, block + self._prefetch + 1))
            self._walk(ledger, self._profile.parts[self._template(block).forward], self._forward_releases(block))
        self._bring(ledger, range(0))
        for index, shared in enumerate(self._regime.shared):
            if index not in self._last_uses and shared.ends_in < 0:
                self._release(ledger, index)
        self._walk(ledger, self._named("head"))
        self._walk(ledger, self._named(f"head_backward_{which}"))
        self._walk(ledger, self._named(f"norm_backward_{which}"))
        for block in reversed(range(len(self._choices))):
            template = self._template(block)
            part = template.backward_first if which == "first" else template.backward_accumulate
            releases = {index: until for index, (last, until) in self._last_uses.items() if last == block}
            self._bring(ledger, range(block, block - self._prefetch - 1, -1))
            self._walk(ledger, self._profile.parts[part], releases)
        self._bring(ledger, range(0))

    def _bring(self, ledger: Ledger, wanted: range) -> None:
        """Have the weights of these blocks, as far as there are such, and of no others."""
        if not self._others:
            return
        inside = {block for block in wanted if 0 <= block < len(self._others)}
        for block in self._present - inside:
            ledger.add("device", "weights", -self._others[block])
        for block in inside - self._present:
            ledger.add("device", "weights", self._others[block])
        self._present = inside

    def _walk(self, ledger: Ledger, part: Part, releases: dict[int, int] | None = None) -> None:
        """releases: shared storages that go, each after which op."""
        waiting = dict(releases or {})
        for number, op in zip(part.changes, part.changes_at, strict=True):
            for index in [index for index, after in waiting.items() if after < op]:
                self._release(ledger, index)
                del waiting[index]
            change = self._profile.changes[number]
            if number not in self._sizes:
                self._sizes[number] = evaluate(change.num_bytes, self._shape)
            ledger.add(change.tier, change.category, self._sizes[number])
            is_complete = change.category == "gradients" and self._sizes[number] > 0
            if self._owned and is_complete and not self._owned[self._sizes[number]].pop():
                ledger.add(change.tier, change.category, -self._sizes[number])
        for index in waiting:
            self._release(ledger, index)

    def _release(self, ledger: Ledger, index: int) -> None:
        shared = self._regime.shared[index]
        ledger.add("device", shared.category, -evaluate(shared.num_bytes, self._shape))

    def _named(self, name: str) -> Part:
        """The part that follows the last block may depend on that block's choice."""
        tail = tail_name(name, traced_choice(self._choices[-1]))
        return self._profile.parts[self._regime.parts.get(tail, self._regime.parts[name])]

    def _template(self, block: int) -> BlockTemplate:
        return self._regime.templates_of(self._choices[block])[self._regime.block_templates[block]]

    def _find_last_uses(self) -> dict[int, tuple[int, int]]:
        """Ends of shared storages: the block in whose backward each goes, and after which op. The first block that holds
        it is the last to be run backward."""
        found: dict[int, tuple[int, int]] = {}
        for block in range(len(self._choices)):
            for hold in self._template(block).holds:
                found.setdefault(hold.index, (block, hold.until))
        return found

    def _forward_releases(self, block: int) -> dict[int, int]:
        part = self._profile.parts[self._template(block).forward]
        return {
            index: len(part.ops) - 1 - shared.ends_before
            for index, shared in enumerate(self._regime.shared)
            if index not in self._last_uses and shared.ends_in == self._regime.block_templates[block]
        }


def _list_impossible_times(plan: Plan, prediction: Prediction, *, device_kind: str) -> Iterator[str]:
    """No step takes less than its own work on compute; nor, where only activations are copied, than its copies over one link."""
    step_ms, busy_ms = prediction.step_ms * (1 + _ROUNDING), prediction.lane_busy_ms
    if step_ms < busy_ms["compute"]:
        yield f"takes {prediction.step_ms} ms with {busy_ms['compute']} ms of work on compute"
    moves_only_activations = (
        plan.gradients.choice != "host" and plan.optimizer_state.place == "device" and plan.weights.place == "device"
    )
    copied_ms = busy_ms.get("copy_in", 0.0) + busy_ms.get("copy_out", 0.0)
    if moves_only_activations and device_kind == "cuda" and step_ms < copied_ms:
        yield f"takes {prediction.step_ms} ms with {copied_ms} ms of copies over the link"
