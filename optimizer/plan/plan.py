"""The plan: one frozen, versioned, JSON-able table that search decides, estimate prices, runtime carries out.

Rows are the categories of tensors, columns the decisions about them (see the modules beside this one). A plan holds no
prediction and no machine; those belong to the estimate made of it.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from optimizer.base.errors import InvalidPlan
from optimizer.base.serialize import from_json, to_json
from optimizer.base.shown import shown_field
from optimizer.optimizers import OPTIMIZERS
from optimizer.plan.activations import COMPILED, NOT_COMPILED, OFFLOADING, ActivationsPlan, KernelsPlan
from optimizer.plan.allocator import AllocatorPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout, RankShare, check_depth
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.techniques import LOSSY, Technique, list_techniques
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import TrainingWorkload

PLAN_VERSION: Final = 2
_OTHER_TIMES: Final = (
    "gives ranks other numbers of micro-batches: their gradients can be summed after the last alone, so keep them on the device, "
    "replicated or with zero1, or give all as many micro-batches of other sizes"
)
_SPARSE_MODEL: Final = "a model with sparse embedding gradients (sparse_embedding_gradients)"


def _list_optimizers(ability: str) -> str:
    """The optimizers with an ability, as people write them."""
    return " and ".join(declared.label for declared in OPTIMIZERS.values() if getattr(declared, ability))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every decision about one job's memory."""

    version: Literal[1, 2] = PLAN_VERSION
    """Version 1 has fewer decisions; a plan of that version takes the defaults of those that came later."""
    layout: DeviceLayout = field(default_factory=DeviceLayout)
    batch: BatchPlan
    weights: WeightsPlan = field(default_factory=WeightsPlan)
    gradients: GradientsPlan = field(default_factory=GradientsPlan)
    optimizer_state: OptimizerStatePlan = field(default_factory=OptimizerStatePlan)
    activations: ActivationsPlan
    logits_and_loss: LogitsAndLossPlan = field(default_factory=LogitsAndLossPlan)
    kernels: KernelsPlan = field(default_factory=KernelsPlan)
    allocator: AllocatorPlan = field(default_factory=AllocatorPlan)

    @property
    def is_lossless(self) -> bool:
        """True if the numbers equal plain fp32 training's; accumulation and chunks change only the order of sums."""
        return not any(technique in LOSSY for technique in self.techniques)

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The techniques that the plan uses on any rank, in the order of ``Technique``."""
        if not self.layout.ranks:
            return list_techniques(self, work="training")
        used = {name for plan in set(self.of_ranks()) for name in list_techniques(plan, work="training")}
        return tuple(name for name in get_args(Technique) if name in used)

    def of_rank(self, rank: int) -> "Plan":
        """The plan as one rank carries it out: its own batch and blocks in the rows, and those of the others in the layout."""
        return self.of_ranks()[rank] if self.layout.ranks else self

    def of_ranks(self) -> "tuple[Plan, ...]":
        """The plan of each rank, in order."""
        if not self.layout.ranks or self.layout.is_cut:
            return (self,) * self.layout.num_devices
        rows = [self._rows_of(share) for share in self.layout.ranks]
        ranks = tuple(
            replace(
                share,
                micro_batch_size=batch.micro_batch_size,
                accumulation_steps=batch.accumulation_steps,
                per_block=activations.per_block,
            )
            for share, (batch, activations) in zip(self.layout.ranks, rows, strict=True)
        )
        layout = replace(self.layout, ranks=ranks)
        return tuple(replace(self, layout=layout, batch=batch, activations=activations) for batch, activations in rows)

    def _rows_of(self, share: RankShare) -> tuple[BatchPlan, ActivationsPlan]:
        """The rows of a rank's own."""
        batch = BatchPlan(
            micro_batch_size=share.micro_batch_size or self.batch.micro_batch_size,
            accumulation_steps=share.accumulation_steps or self.batch.accumulation_steps,
        )
        if share.per_block is None:
            return batch, self.activations
        return batch, replace(self.activations, per_block=share.per_block)

    @property
    def rank_sequences(self) -> tuple[int, ...]:
        """Sequences of a step that each rank takes, in order; one number where all take the same, the whole batch."""
        if not self.layout.ranks or self.layout.is_cut:
            return (self.batch.global_batch_size,) * self.layout.num_parts
        return tuple(plan.batch.global_batch_size for plan in self.of_ranks())

    @property
    def representation(self) -> str:
        """The name of a profile's regime: that of the weights, with ``@compiled`` behind it where blocks run compiled."""
        return self.weights.representation + (COMPILED if self.kernels.blocks == "compiled" else "")

    @property
    def fingerprint(self) -> str:
        """First 16 hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def stretch_of(self, rank: int) -> range:
        """The sequences of a step that a rank takes, counted from 0 through all ranks in order."""
        counts = self.rank_sequences
        if self.layout.sees_whole_batch:
            return range(counts[0])
        return range(sum(counts[:rank]), sum(counts[: rank + 1]))

    def check(
        self,
        *,
        num_blocks: int,
        workload: TrainingWorkload,
        has_sparse_gradients: bool = False,
        has_plain_head: bool = True,
        clamps_fp16: bool = False,
    ) -> None:
        """Raise InvalidPlan if the plan contradicts itself, the model's depth or other properties, or the workload."""
        shares = {f"layout.ranks[{rank}].per_block": share.per_block for rank, share in enumerate(self.layout.ranks)}
        for path, per_block in {"activations.per_block": self.activations.per_block, **shares}.items():
            if per_block is not None and len(per_block) != num_blocks:
                raise InvalidPlan(
                    f"plan.{path} names {len(per_block)} blocks; the model has {num_blocks}",
                    field=f"plan.{path}",
                    value=len(per_block),
                    allowed=num_blocks,
                )
        check_depth(self.layout.stage_blocks, num_blocks)
        num_sequences = sum(self.rank_sequences)
        if num_sequences != workload.global_batch_size:
            on_devices = f" on {self.layout.num_devices} devices" if self.layout.num_devices > 1 else ""
            raise InvalidPlan(
                f"plan.batch makes {num_sequences} sequences per step{on_devices}; "
                f"workload.global_batch_size is {workload.global_batch_size}",
                field="plan.batch",
                value=num_sequences,
                allowed=workload.global_batch_size,
            )
        conflict = self.find_conflict(
            workload,
            has_sparse_gradients=has_sparse_gradients,
            has_plain_head=has_plain_head,
            clamps_fp16=clamps_fp16,
        )
        if conflict is not None:
            raise conflict

    def find_conflict(
        self,
        workload: TrainingWorkload,
        *,
        has_sparse_gradients: bool = False,
        has_plain_head: bool = True,
        clamps_fp16: bool = False,
    ) -> InvalidPlan | None:
        """The first pair of decisions that cannot be carried out together for this workload; None if all of them can.

        has_sparse_gradients: true if some trained embedding's gradient holds only the rows of a batch's tokens.
        has_plain_head: true if the head is one projection of the last hidden state. clamps_fp16: true if the model clamps
        values in fp16 alone (T5, BART), which no profile shows.
        """
        declared = OPTIMIZERS[workload.optimizer]
        if has_sparse_gradients and not declared.updates_rows:
            able = _list_optimizers("updates_rows")
            return InvalidPlan(
                f"workload.optimizer is {workload.optimizer}; {_SPARSE_MODEL} is updated by {able} alone",
                field="workload.optimizer",
                value=workload.optimizer,
                allowed=", ".join(name for name, other in OPTIMIZERS.items() if other.updates_rows),
            )
        consumes = self.gradients.choice == "consume"
        trains_all = workload.adapter is None
        rules: tuple[tuple[bool, str, object, str], ...] = (
            (
                consumes and max(self._step_counts) > 1,
                "gradients.choice",
                "consume",
                "needs one micro-batch per step (1 accumulation step)",
            ),
            (
                consumes and workload.max_grad_norm is not None,
                "gradients.choice",
                "consume",
                "cannot clip to a global norm (set max_grad_norm to null)",
            ),
            (
                consumes and self.weights.scales_loss,
                "gradients.choice",
                "consume",
                "cannot skip a step that overflowed, as fp16 must",
            ),
            (
                consumes and self.optimizer_state.place != "device",
                "gradients.choice",
                "consume",
                "updates on the device; state on the host or disk needs gradients on the host",
            ),
            (
                self.gradients.choice == "keep" and self.optimizer_state.place != "device",
                "gradients.choice",
                "keep",
                "leaves gradients on the device; state on the host or disk needs gradients on the host",
            ),
            (
                trains_all
                and self.weights.place != "device"
                and (self.optimizer_state.place == "device" or self.optimizer_state.fraction < 1),
                "weights.place",
                self.weights.place,
                "streams trained weights, whose state must then be wholly on the host or the disk",
            ),
            (
                self.weights.frozen != "same" and trains_all,
                "weights.frozen",
                self.weights.frozen,
                "applies to weights under adapters (this workload has none: every weight is trained)",
            ),
            (
                self.optimizer_state.bits == 8 and not declared.has_8_bits,
                "optimizer_state.bits",
                8,
                f"is {_list_optimizers('has_8_bits')}'s state (workload.optimizer is {workload.optimizer}, whose state is fp32)",
            ),
            (
                self.optimizer_state.place != "device" and not declared.leaves_device,
                "optimizer_state.place",
                self.optimizer_state.place,
                f"{declared.label}'s state cannot have: its update needs whole tensors, on the device",
            ),
            (
                self.logits_and_loss.num_chunks > 1 and not has_plain_head,
                "logits_and_loss.num_chunks",
                self.logits_and_loss.num_chunks,
                "needs a head that is one projection (Linear) of the last hidden state; this model's is more than that: use 1",
            ),
            (
                self.logits_and_loss.num_chunks > 1 and workload.has_pairs,
                "logits_and_loss.num_chunks",
                self.logits_and_loss.num_chunks,
                f"cuts a mean over tokens; {workload.objective} compares whole answers: use 1",
            ),
            (
                self.weights.dtype == "fp16" and clamps_fp16,
                "weights.dtype",
                "fp16",
                "makes this model's blocks clamp their values; use bf16, or fp32 with autocast",
            ),
            (
                self.layout.data in ("zero1", "zero2") and trains_all and self.weights.place in ("disk", "remote"),
                "layout.data",
                self.layout.data,
                "has one rank update each tensor; off the host each rank has streamed weights of its own: use host or replicated",
            ),
            (
                self._sums_at_other_times,
                "layout.ranks",
                "uneven",
                _OTHER_TIMES,
            ),
            (
                self.layout.shares_weights and self.weights.place != "device",
                "layout.data",
                self.layout.data,
                f"has each weight on one device; those on the {self.weights.place} are there already: use device, or zero2",
            ),
            (
                self.layout.shares_weights and not self.layout.has_like_replicas,
                "layout.data",
                self.layout.data,
                "has a replica's devices run the same blocks at once, so they must be alike and do the same: use zero2",
            ),
            *(self._cut_rules(workload) if self.layout.is_cut else ()),
            *(self._tensor_rules(workload) if self.layout.shares_blocks else ()),
            *(self._local_rules(workload) if self.layout.steps_alone else ()),
            *(self._compiled_rules() if self.kernels.blocks == "compiled" else ()),
            *(self._sparse_rules() if has_sparse_gradients else ()),
        )
        for is_broken, name, value, why in rules:
            if is_broken:
                path = f"plan.{name}"
                return InvalidPlan(f"{shown_field(name)} is {value}, which {why}", field=path, value=value, allowed=why)
        return None

    def shares_homes(self, *, trains_all: bool) -> bool:
        """True if weights that stream are on the host once for all ranks: those that nobody updates, or one rank for all. Ranks
        that each update all have homes of their own, and so have those with a part of the model each.

        trains_all: False under adapters, where what streams is frozen.
        """
        is_on_host = self.layout.num_devices > 1 and self.weights.place == "host"
        has_one_model = is_on_host and not (self.layout.is_cut or self.layout.shares_blocks)
        return has_one_model and (self.layout.shares_state or not trains_all)

    @property
    def _sums_at_other_times(self) -> bool:
        """True if ranks would sum gradients after each micro-batch and some have more of them than others."""
        if self.layout.steps_alone:
            return False
        sums_each = self.layout.reduces_each_micro_batch or self.gradients.choice != "keep"
        return sums_each and len(self._step_counts) > 1

    @property
    def _step_counts(self) -> set[int]:
        """The numbers of micro-batches that ranks have."""
        own = {share.accumulation_steps or self.batch.accumulation_steps for share in self.layout.ranks}
        return own or {self.batch.accumulation_steps}

    @property
    def brings_weights(self) -> bool:
        """True if blocks' weights come to a device for as long as the block runs: from elsewhere, or from another device."""
        return self.weights.place != "device" or self.layout.shares_weights

    def _cut_rules(self, workload: TrainingWorkload) -> tuple[tuple[bool, str, object, str], ...]:
        """Rules against decisions that a model which is cut over devices does not support."""
        cut = ", ".join(map(str, self.layout.stage_blocks))
        offloading = next((choice for choice in OFFLOADING if choice != "offload" and self.activations.count(choice)), "")
        return (
            (
                workload.objective != "next_token",
                "layout.stage_blocks",
                cut,
                f"is carried out for next-token training; {workload.objective} compares answers: use zero3, or one device",
            ),
            (
                self.batch.accumulation_steps < 2,
                "batch.accumulation_steps",
                self.batch.accumulation_steps,
                f"leaves all stages but one idle (layout.stage_blocks is {cut}): use 2 or more, best 4 for each stage",
            ),
            (
                bool(offloading),
                "activations.per_block",
                offloading,
                "is not carried out where the model is cut: use offload, to the host",
            ),
            (
                self.weights.place in ("disk", "remote"),
                "weights.place",
                self.weights.place,
                "is not carried out where the model is cut: use host, or the device",
            ),
            (
                self.optimizer_state.place in ("disk", "remote"),
                "optimizer_state.place",
                self.optimizer_state.place,
                "is not carried out where the model is cut: use host, or the device",
            ),
        )

    def _tensor_rules(self, workload: TrainingWorkload) -> tuple[tuple[bool, str, object, str], ...]:
        """Rules against decisions that ranks which share each block do not support."""
        tensor, declared = self.layout.tensor, OPTIMIZERS[workload.optimizer]
        return (
            (
                declared.is_factored,
                "layout.tensor",
                tensor,
                f"gives each device parts of matrices; {declared.label} sums over whole rows and columns: use another optimizer",
            ),
            (
                workload.objective != "next_token",
                "layout.tensor",
                tensor,
                f"is carried out for next-token training; {workload.objective} compares answers: use zero3, or one device",
            ),
            (
                workload.adapter is not None and workload.adapter.dropout > 0,
                "layout.tensor",
                tensor,
                "needs the same random numbers on all devices; set workload.adapter.dropout to 0, or use another layout",
            ),
            (
                self.optimizer_state.bits == 8,
                "optimizer_state.bits",
                8,
                f"has a scale for every 256 numbers, which a part of a matrix cuts elsewhere (layout.tensor is {tensor}): use 32",
            ),
            (
                self.weights.frozen != "same",
                "weights.frozen",
                self.weights.frozen,
                f"has scales that a part of a matrix would cut elsewhere (layout.tensor is {tensor}): use same",
            ),
        )

    def _local_rules(self, workload: TrainingWorkload) -> tuple[tuple[bool, str, object, str], ...]:
        """Rules against decisions that steps between synchronizations do not support."""
        every, trains_all = self.layout.sync_every, workload.adapter is None
        kept = f"is read whole when ranks synchronize (every {every} steps): use the device or the host"
        return (
            (
                self.weights.scales_loss,
                "weights.dtype",
                "fp16",
                f"scales the loss by what overflowed, on each rank by itself for {every} steps: use bf16 or fp32",
            ),
            (self.optimizer_state.place in ("disk", "remote"), "optimizer_state.place", self.optimizer_state.place, kept),
            (trains_all and self.weights.place in ("disk", "remote"), "weights.place", self.weights.place, kept),
        )

    def _compiled_rules(self) -> tuple[tuple[bool, str, object, str], ...]:
        """Rules against decisions that compiled blocks do not support."""
        found = next((choice for choice in NOT_COMPILED if self.activations.count(choice)), "")
        return (
            (
                bool(found),
                "activations.per_block",
                found,
                "keeps some of a block's results: a compiled block is one op, so use recompute, or run blocks op by op",
            ),
            (
                self.weights.frozen == "nf4",
                "weights.frozen",
                "nf4",
                "a library unpacks that the compiler cannot look into: use int8 or int4, or run blocks op by op",
            ),
            (
                self.layout.num_devices > 1,
                "layout.num_devices",
                self.layout.num_devices,
                "is not carried out with compiled blocks: use one device, or run blocks op by op",
            ),
        )

    def _sparse_rules(self) -> tuple[tuple[bool, str, object, str], ...]:
        """Rules against decisions that an update of embedding rows (``runtime/step/sparse_gradients.py``) does not support."""
        model = _SPARSE_MODEL
        return (
            (
                self.gradients.choice != "keep",
                "gradients.choice",
                self.gradients.choice,
                f"{model} does not support: its gradients are kept on the device",
            ),
            (
                self.optimizer_state.place != "device",
                "optimizer_state.place",
                self.optimizer_state.place,
                f"{model} does not support: its state is on the device",
            ),
            (
                self.optimizer_state.bits != 32,
                "optimizer_state.bits",
                self.optimizer_state.bits,
                f"{model} does not support: its moments have 32 bits",
            ),
            (
                self.weights.dtype != "fp32",
                "weights.dtype",
                self.weights.dtype,
                f"{model} does not support: its weights are fp32, computed with autocast or without",
            ),
            (
                self.layout.num_devices > 1,
                "layout.num_devices",
                self.layout.num_devices,
                f"{model} does not support: each device would have other rows; train it on one device",
            ),
        )

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Any) -> "Plan":
        return from_json(cls, document, path="plan", error=InvalidPlan)
