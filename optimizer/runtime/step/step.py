"""One optimizer step as a plan says: the code that ``train`` repeats and ``measure_step`` runs alone.

A step is: for each micro-batch forward, loss, backward into ``param.grad``; then clip, update, drop the gradients. The order
of these, and which memory category each part counts as, is the schedule that the estimator simulates.

Where states live between uses is the business of ``weights.py`` (blocks' weights come and go), ``gradients.py`` (each leaves or
is used up as it appears) and ``optimizer_state.py`` with ``host_update.py`` (updates on the host). With a thread for these,
which CUDA has, updates run beside backward where nothing is clipped, else beside the next forward, each block waiting for its
own; whatever reads weights outside of a forward waits for all.

One rank of several (``runtime/ranks/``) does the same with its share of the micro-batches: gradients are summed over the ranks as
they are complete, loss and norm are those of all, and where state is shared new weights come from the tensors' owners, or are
read where the owners have written them, in the one home on the host that all ranks have. Where the model is cut each has all
micro-batches, and its own blocks. Where ranks take steps alone (``runtime/ranks/outer_step.py``), a step is one device's, of this
rank's share, with its own loss and norm; every ``sync_every`` of them the weights are brought together at its end.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from optimizer.base.errors import InvalidPlan, LossNotFinite
from optimizer.models.anatomy import Anatomy, find_anatomy
from optimizer.plan.activations import ActivationsPlan, keep_elsewhere
from optimizer.plan.plan import Plan
from optimizer.runtime.compiled.blocks import compile_blocks
from optimizer.runtime.device.backends import backend_of
from optimizer.runtime.layers.grouped_attention import watch_attention
from optimizer.runtime.layers.matmul_dispatch import watch_products
from optimizer.runtime.layers.memory_saving_layers import use_memory_saving_layers
from optimizer.runtime.meter.meter import Meter, check_peak, count_allocations, mark_phase, set_region
from optimizer.runtime.ranks.dealt_weights import DealtWeights
from optimizer.runtime.ranks.group import Ranks
from optimizer.runtime.ranks.outer_step import OuterStep
from optimizer.runtime.ranks.pipeline.keepers import StageWeights
from optimizer.runtime.ranks.pipeline.stage import PipelineStages
from optimizer.runtime.ranks.reduction import GradientReducer
from optimizer.runtime.ranks.replicas import find_replica
from optimizer.runtime.ranks.shared_homes import SharedHomes
from optimizer.runtime.ranks.shared_step import SharedStep
from optimizer.runtime.ranks.tensor.blocks import SharedBlocks
from optimizer.runtime.step.activations import apply_activations
from optimizer.runtime.step.forward import HEAD_BACKWARD, Forward
from optimizer.runtime.step.gradients import ConsumedGradients, Gradients, HostGradients
from optimizer.runtime.step.host_update import MASTER
from optimizer.runtime.step.micro_batch import MicroBatch, count_labels, shares_of_labels
from optimizer.runtime.step.optimizer_state import Optimizer
from optimizer.runtime.step.precision import Precision
from optimizer.runtime.step.preference import Preference, Rewards, summarize_margins
from optimizer.runtime.step.sparse_gradients import SparseGradients, find_sparse
from optimizer.runtime.step.weights import StreamedWeights
from optimizer.runtime.tiers.background_thread import BackgroundThread
from optimizer.runtime.tiers.base_homes import BaseHomes, BasePlace
from optimizer.runtime.tiers.homes import HomeTensor
from optimizer.runtime.tiers.tiers import Tiers
from optimizer.workload import TrainingWorkload


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The record of one optimizer step."""

    loss: float
    """Mean over the step's tokens; of this rank's alone where ranks take steps alone, as the norm is."""
    grad_norm: float
    """Global norm before clipping."""
    step_ms: float
    loss_scale: float = 1.0
    """Factor that backward started from; other than 1 only with fp16."""
    is_left_out: bool = False
    """The gradients overflowed fp16: the weights were not touched."""
    rewards: Rewards | None = None
    """None but in preference training."""


class Trainer:
    """A model, its optimizer and its plan, ready to step. Call ``close`` to leave the model as it was.

    meter: None runs without counting and without a cap; with activations all kept, nothing at all is then wrapped.
    scratch: folder of the disk tier's file; the system's temporary folder unless given. anatomy: the model's parts, where
    they are not those that ``find_anatomy`` finds. ranks: the others that a plan for several devices runs on, all with the same
    model, plan and workload; steps and evaluations are then to be asked for on each, in the same order.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        workload: TrainingWorkload,
        device: torch.device,
        meter: Meter | None,
        scratch: Path | None = None,
        updates_on_thread: bool | None = None,
        anatomy: Anatomy | None = None,
        is_trace: bool = False,
        ranks: Ranks | None = None,
        base: BasePlace | None = None,
    ) -> None:
        """is_trace: True where tensors have no numbers and the step is written down: the reference of preference training is
        zeros then, and its forward left out, which is priced by an evaluation's. base: where frozen weights that stream from the
        host are shared with other jobs; of effect on one device.
        """
        self.anatomy = anatomy or find_anatomy(model)
        blocks = self.anatomy.blocks
        self._sparse = find_sparse(model)
        plan.check(
            num_blocks=len(blocks),
            workload=workload,
            has_sparse_gradients=bool(self._sparse),
            has_plain_head=self.anatomy.is_chunkable,
        )
        _check_ranks(plan, ranks)
        plan = plan.of_rank(0 if ranks is None else ranks.rank)
        self.model = model
        self.plan = plan
        """The plan as this rank carries it out."""
        self.workload = workload
        self.device = device
        self.meter = meter
        self.precision = Precision(plan.weights, device=device)
        self.ranks = ranks
        self._shared: SharedStep | None = None
        """The steps with others; None where this rank takes them alone."""
        self._evaluated: SharedStep | None = None
        """The evaluations with others."""
        self._reducer: GradientReducer | None = None
        self.outer: OuterStep | None = None
        """The synchronizations of ranks that take steps alone."""
        self.preference = Preference(workload, keeps_rewards=not is_trace) if workload.has_pairs else None
        self.tiers = Tiers(device=device, meter=meter, scratch=scratch)
        self.forward = Forward(
            model,
            anatomy=self.anatomy,
            plan=plan,
            workload=workload,
            device=device,
            meter=meter,
            precision=self.precision,
            preference=self.preference,
            tiers=self.tiers,
            is_trace=is_trace,
        )
        is_threaded = backend_of(device).is_asynchronous if updates_on_thread is None else updates_on_thread
        self._worker = BackgroundThread(
            name="host-update", device=device, is_threaded=is_threaded, lanes=self.tiers.lanes
        )
        self._undo: list[Callable[[], None]] = []
        """Functions that take the plan's and the runtime's own forwards off the model's modules."""
        self._handles: list[RemovableHandle] = []
        self._has_failed = self._is_closed = False
        shared_homes: SharedHomes | BaseHomes | None = None
        self.base_homes = BaseHomes(base, self.tiers) if base is not None and _streams_base(plan, workload) else None
        if ranks is None:
            shared_homes = self.base_homes
        else:
            ranks.lanes = self.tiers.lanes
            self._replica = find_replica(ranks, plan.layout)
            if plan.shares_homes(trains_all=workload.adapter is None):
                shared_homes = SharedHomes(self._replica.ranks, self.tiers)
        dealt: DealtWeights | StageWeights | None = None
        self._pipeline: PipelineStages | None = None
        self.parts: SharedBlocks | None = None
        """This rank's part of every block, where ranks share each; it then decides no step with others, but norms."""
        if ranks is not None and plan.layout.shares_weights:
            dealt = DealtWeights(self._replica.ranks, layout=plan.layout, tiers=self.tiers)
        if ranks is not None and plan.layout.is_cut:
            dealt = StageWeights(ranks, layout=plan.layout, tiers=self.tiers)
            self._pipeline = PipelineStages(
                ranks,
                layout=plan.layout,
                num_micro_batches=plan.batch.accumulation_steps,
                anatomy=self.anatomy,
                meter=meter,
            )
        self.weights = StreamedWeights(self.tiers, plan=plan.weights, shared=shared_homes, dealt=dealt)
        try:
            self._prepare(blocks)
        except BaseException:
            self._has_failed = True
            self.close()
            raise

    def _prepare(self, blocks: Sequence[nn.Module]) -> None:
        """Send away what does not stay on the device, count what does, and hook in. Raises DiskFull, OutOfHostMemory and
        OutOfDeviceMemory: what the plan needs between steps is taken here, not in the midst of the run.
        """
        model, plan, workload = self.model, self.plan, self.workload
        self.weights.send_home(model, blocks=blocks, trains_all=workload.adapter is None)
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if self.meter is not None:
            self.meter.assign_module(model)
            self._handles += self.meter.watch_gradients(named.values())
            self._handles += self.meter.watch_blocks(blocks)
        if self.ranks is not None and plan.layout.shares_blocks:
            self.parts = SharedBlocks(self.ranks, model=model, blocks=blocks, plan=plan)
            self._reducer = self.parts.reducer
            self._handles += self.parts.watch()
        elif self.ranks is not None:
            self._evaluated = SharedStep(
                self.ranks,
                replica=self._replica,
                named=named,
                plan=plan,
                at_home=self.weights.shared_names,
                dealt=self.weights.dealt_names,
                owners=self.weights.owners if self._pipeline is not None else None,
            )
            self._shared = None if plan.layout.steps_alone else self._evaluated
        if self.ranks is not None and self._shared is not None and self._pipeline is None:
            self._reducer = GradientReducer(
                named, ranks=self.ranks, replica=self._replica, ownership=self._shared.ownership, plan=plan
            )
            self._handles += self._reducer.watch()
        with self.metered():
            self.optimizer = Optimizer(
                model,
                plan=plan.optimizer_state,
                workload=workload,
                weights=plan.weights,
                tiers=self.tiers,
                home_of=self.weights.home_of,
                worker=self._worker,
                is_owned=self.owns,
            )
        self.assign_optimizer_state()
        if self.ranks is not None and plan.layout.steps_alone:
            self.outer = OuterStep(
                named,
                plan=plan,
                ranks=self.ranks,
                tiers=self.tiers,
                read=self._read_updated,
                write=self._write_updated,
            )
        self.gradients = self._make_gradients(named)
        self._handles += self.gradients.watch()
        self._undo.append(use_memory_saving_layers(model))
        self._undo.append(watch_products(model) if self.device.type == "cpu" else watch_attention(self.device))
        if plan.kernels.blocks == "compiled":
            self._undo.append(compile_blocks(blocks))
        firsts = [stage.first_block for stage in plan.layout.stages] or [0]
        self._undo.append(apply_activations(blocks, self._own_activations(), self.tiers, firsts=firsts))
        self._handles += self.weights.watch(self.anatomy.backbone, blocks, updates=self.optimizer)
        runs = None if self._pipeline is None else self._pipeline.runs
        self._handles += self.optimizer.watch(model, blocks=blocks, backbone=self.anatomy.backbone, runs=runs)
        if self._pipeline is not None:
            handles, undo = self._pipeline.watch(leaving=self._leave_forward, visits=self.weights)
            self._handles += handles
            self._undo.append(undo)

    def _leave_forward(self) -> None:
        """Let go of what the end of the backbone lets go of, on a stage that does not come to it."""
        self.tiers.settle()
        self.weights.end_pass()

    def _own_activations(self) -> ActivationsPlan:
        """The activations row for the blocks that run here; where the model is cut the others do nothing."""
        if self._pipeline is None:
            return self.plan.activations
        activations = self.plan.activations
        return replace(activations, per_block=keep_elsewhere(activations.per_block, self._pipeline.own.blocks))

    def _make_gradients(self, named: Mapping[str, nn.Parameter]) -> Gradients:
        all_norms = None if self._shared is None else self._shared.all_norms
        if self.parts is not None:
            all_norms = self.parts.all_norms
        if self.plan.gradients.choice == "keep":
            sparse = SparseGradients(self._sparse, meter=self.meter) if self._sparse else None
            return Gradients(list(named.values()), sparse=sparse, names=list(named), all_norms=all_norms)
        owned = {name: parameter for name, parameter in named.items() if self.owns(name)}
        if self.plan.gradients.choice == "consume":
            return ConsumedGradients(owned, tiers=self.tiers, step_one=self.optimizer.step_one, all_norms=all_norms)
        # Clipping needs all gradients first, and so does leaving out a step that overflowed. Ranks find out together at the end
        # of backward whether all numbers are finite.
        in_backward = (
            self._worker.is_threaded
            and self.workload.max_grad_norm is None
            and not self.precision.scales_loss
            and all_norms is None
        )
        return HostGradients(
            owned,
            tiers=self.tiers,
            worker=self._worker,
            accumulates=self.plan.batch.accumulation_steps > 1,
            waits_for_last=self.plan.layout.keeps_streamed,
            begin_update=self.optimizer.begin_update if in_backward else None,
            update=self.optimizer.update,
            all_norms=all_norms,
        )

    @contextmanager
    def running_alone(self, read: Callable[[str], torch.Tensor]) -> Iterator[None]:
        """Inside, this rank runs the model alone; ``read`` gives what other ranks keep, by name, on the host."""
        with self.weights.read_from(read), nullcontext() if self._pipeline is None else self._pipeline.alone():
            yield

    @property
    def rank(self) -> int:
        """0 on one device."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def shares_state(self) -> bool:
        """True if optimizer state of some tensors is on other ranks alone."""
        return self._shared is not None and self._shared.ownership.is_shared

    @property
    def is_in_first_replica(self) -> bool:
        """False on ranks that keep what a rank before them keeps, too (``ranks/replicas.py``)."""
        return self.rank < self.plan.layout.num_sharing

    def owns(self, name: str) -> bool:
        """Report whether a trained tensor's state is here: always, but on a rank that shares state with others."""
        return self._shared is None or self._shared.ownership.owns(name)

    def metered(self, *, is_counted: bool = True) -> AbstractContextManager[None]:
        """Count what is allocated inside, under the cap; does nothing without a meter.

        is_counted: False leaves the counting out, which costs Python for every op, and with it the CPU device's cap; torch's own
        counters and its cap on CUDA stay.
        """
        return count_allocations(self.meter, is_counted=is_counted)

    def close(self, *, keep_weights: bool = True) -> None:
        """Take the wrapping and the hooks off the model, and end threads and scratch.

        keep_weights: weights that streamed become the model's again, in host memory; else they are gone. Raises what an
        update that was still under way met. Of no effect the second time.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if keep_weights and not self._has_failed:
                self.join()
        finally:
            self._worker.close()
            while self._undo:
                self._undo.pop()()
            for handle in self._handles:
                handle.remove()
            try:
                # What is dealt out is read by all ranks together, which those that lost one cannot do.
                if keep_weights and not (self._has_failed and self.weights.dealt_names):
                    self.weights.bind_homes()
            finally:
                if self.base_homes is not None:
                    self.base_homes.close()
                self.tiers.close()

    def join(self) -> None:
        """Wait until the last step's updates are done, wherever they run. ``step`` and ``evaluate`` wait by themselves."""
        self.optimizer.join()

    def named_weights(self) -> dict[str, torch.Tensor | HomeTensor]:
        """The trained tensors as they are after the last step, the live ones; those that stream are read when asked for, and
        those that ranks share out by all of them together, in this order.
        """
        self.join()
        return {
            name: self.weights.home_tensor(name) or parameter.detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def held_weights(self) -> dict[str, torch.Tensor | HomeTensor]:
        """Those of ``named_weights`` that this rank can read alone: all but those that others keep."""
        here = self.dealt_weights()
        return {
            name: here.get(name, held) for name, held in self.named_weights().items() if not self.weights.is_elsewhere(name)
        }

    def dealt_weights(self) -> dict[str, torch.Tensor | HomeTensor]:
        """The tensors that this rank alone keeps, trained or not; none unless ranks share weights out."""
        self.join()
        here = [name for name in self.weights.dealt_names if not self.weights.is_elsewhere(name)]
        return {name: self.weights.own_tensor(name) or self.model.get_parameter(name).detach() for name in here}

    def read_weight(self, name: str) -> torch.Tensor:
        """One parameter, trained or not, wherever it lives; on the host where it streams. Not to be written to. What ranks share
        out is for all of them to read together.
        """
        self.optimizer.require(name)
        home = self.weights.home_tensor(name)
        return home.load() if home is not None else self.model.get_parameter(name).detach()

    def read_whole(self, name: str) -> torch.Tensor:
        """The same of a tensor of which ranks have a part each, joined on the host; asked for by all of them together."""
        held = self.read_weight(name)
        return held if self.parts is None else self.parts.join(name, held, tiers=self.tiers)

    def list_held(self) -> dict[str, torch.Tensor | HomeTensor]:
        """Every parameter of this rank's model, trained or not, to be read one by one."""
        self.join()
        return {name: self.weights.home_tensor(name) or each.detach() for name, each in self.model.named_parameters()}

    @torch.no_grad()
    def set_weights(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Replace trained tensors by name, wherever they live; state that goes with them follows by ``import_state``."""
        self.join()
        for name, parameter in self.model.named_parameters():
            if name in stored and not self.weights.is_elsewhere(name):
                if self.weights.home_of(name) is None:
                    parameter.copy_(stored[name])
                else:
                    self.weights.write(name, stored[name])
                self.optimizer.set_weight(name, stored[name])

    @property
    def is_in_step(self) -> bool:
        """True if all ranks have the same weights: always, but for those that have taken steps alone."""
        return self.outer is None or self.outer.steps_alone == 0

    def synchronize(self) -> None:
        """Bring the weights of ranks together now, where they have taken steps alone since they last were. Of all ranks together,
        after as many steps on each. Raises RankLost.
        """
        if self.outer is not None and not self.is_in_step:
            with self.metered():
                self._synchronize(self.outer)

    def _synchronize(self, outer: OuterStep) -> None:
        mark_phase(self.meter, "synchronization")
        outer.synchronize()

    def _read_updated(self) -> dict[str, torch.Tensor | HomeTensor]:
        """The trained weights as updates leave them: masters, where there are any."""
        masters, _ = self.optimizer.export_state()
        return {name: masters.get(f"{name}//{MASTER}", held) for name, held in self.named_weights().items()}

    def _write_updated(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replace trained weights and their masters."""
        self.set_weights(values)
        known, _ = self.optimizer.export_state()
        masters = {f"{name}//{MASTER}": value for name, value in values.items() if f"{name}//{MASTER}" in known}
        self.optimizer.import_state(masters, {})

    def assign_optimizer_state(self) -> None:
        """Report to the meter which tensors are optimizer state; they come to be in the first step or from a checkpoint."""
        if self.meter is not None:
            for tensor in self.optimizer.state_tensors():
                self.meter.assign(tensor, "optimizer_state")

    def step(
        self, micro_batches: Sequence[MicroBatch], *, learning_rate: float, is_counted: bool = True
    ) -> StepResult:
        """One optimizer step over ``plan.batch.accumulation_steps`` micro-batches.

        is_counted: as of ``metered``. Steps are alike, so what one has shown holds for the next; on the CPU device the meter's
        peak is then still that of the last one counted. The first two are to be counted: in them state comes to be.
        Raises LossNotFinite before the weights are touched, OutOfDeviceMemory over the cap.
        """
        start_s = time.perf_counter()
        if self.meter is not None:
            self.meter.reset_peak(is_counted=is_counted)
        # Until it is done, so that ``close`` after an error does not wait for what met it.
        self._has_failed = True
        shares = self._shares(micro_batches)
        if self.preference is not None:
            self.preference.begin()
        with self.metered(is_counted=is_counted):
            self.optimizer.learning_rate = learning_rate
            loss = self.accumulate(micro_batches, shares=shares)
            updated = self.update(loss, learning_rate=learning_rate)
            if self.outer is not None:
                self.outer.steps_alone += 1
                if self.outer.is_due:
                    self._synchronize(self.outer)
        backend_of(self.device).synchronize()
        check_peak(self.meter)
        self._has_failed = False
        return replace(updated, rewards=self._rewards(), step_ms=(time.perf_counter() - start_s) * 1000)

    def _shares(self, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """Each micro-batch's share in the mean over a step; empty where all weigh the same, as those of as many pairs do."""
        if self._shared is None or self._pipeline is not None:
            return [] if self.preference is not None else shares_of_labels(micro_batches)
        if self.preference is not None:
            return self._shared.share_sequences(len(micro_batches))
        return self._shared.share_labels(count_labels(micro_batches), num_micro_batches=len(micro_batches))

    def _rewards(self) -> Rewards | None:
        if self.preference is None:
            return None
        margins = self.preference.margins
        return summarize_margins(margins if self._shared is None else self._shared.all_margins(margins))

    def update(self, loss: torch.Tensor, *, learning_rate: float) -> StepResult:
        """Clip, update and drop the gradients, once backward is done; ``step_ms`` is left at 0.

        loss: the mean over the step's tokens, for the result and for the check that it is finite.
        """
        mark_phase(self.meter, "gradient clipping")
        loss_scale = self.precision.scale
        if self._reducer is not None:
            self._reducer.settle()
        if self.shares_state and self.weights.shared_names:
            # Once norms are exchanged the owners write to homes that this rank has read from.
            self.tiers.finish_copies()
        clipped = self.gradients.clip_(self.workload.max_grad_norm, loss_scale=loss_scale)
        result_loss, result_norm = self._total_of(loss), float(clipped.norm)
        is_left_out = self._is_left_out(result_loss, result_norm)
        if not is_left_out:
            mark_phase(self.meter, "optimizer step")
            self._update(learning_rate, clipped.factor)
        self.optimizer.zero_grad()
        self.gradients.clear()
        self.assign_optimizer_state()
        return StepResult(
            loss=result_loss, grad_norm=result_norm, step_ms=0.0, loss_scale=loss_scale, is_left_out=is_left_out
        )

    def _update(self, learning_rate: float, factor: torch.Tensor | None) -> None:
        on_host = self.gradients if isinstance(self.gradients, HostGradients) else None
        if self.plan.gradients.choice != "consume":
            self.optimizer.step(learning_rate, grad_factor=factor, host_gradients=on_host)
        if self._shared is not None and self.shares_state and self._pipeline is None:
            # What is still under way would be sent as it was. Stages of a model that is cut send no weights.
            self.optimizer.join()
            self._shared.bring_weights()

    def _total_of(self, loss: torch.Tensor) -> float:
        """A step's loss, from what this rank's micro-batches add to it."""
        if self.parts is not None:
            return self.parts.of_all(float(loss))
        return float(loss) if self._shared is None else self._shared.total_of(loss)

    def _is_left_out(self, loss: float, grad_norm: float) -> bool:
        """Report whether fp16 overflowed in this step. Without a loss scale numbers that are not finite end the run."""
        if not self.precision.scales_loss:
            _check_finite(loss, grad_norm=grad_norm)
            return False
        overflowed = not (math.isfinite(loss) and math.isfinite(grad_norm))
        self.precision.update(overflowed=overflowed)
        return overflowed

    def accumulate(self, micro_batches: Sequence[MicroBatch], *, shares: Sequence[float] = ()) -> torch.Tensor:
        """Forward and backward of each micro-batch into ``param.grad``; returns the mean loss, a scalar tensor; of several ranks
        what this one's micro-batches add to the mean.

        shares: each micro-batch's share in the mean (``shares_of_labels``); empty where all weigh the same.
        """
        if self._pipeline is not None:
            return self._accumulate_staged(self._pipeline, micro_batches, shares)
        total: torch.Tensor | None = None
        num_micro_batches = len(micro_batches) if self._shared is None else self._shared.count_all(len(micro_batches))
        for index, micro_batch in enumerate(micro_batches):
            loss = self.forward.loss_of(micro_batch)
            loss = loss * shares[index] if shares else loss / num_micro_batches
            if self.plan.gradients.choice == "consume":
                # Backward changes weights.
                _check_finite(self._total_of(loss.detach()), grad_norm=0.0)
            self.begin_backward(is_last=index == len(micro_batches) - 1)
            self.precision.backward(loss)
            self.end_backward()
            # In place, and the micro-batch's own loss dropped, so that every later micro-batch leaves what the first did.
            total = loss.detach() if total is None else total.add_(loss.detach())
            del loss
        if total is None:
            raise ValueError("a step needs at least one micro-batch")
        return total

    def _accumulate_staged(
        self, pipeline: PipelineStages, micro_batches: Sequence[MicroBatch], shares: Sequence[float]
    ) -> torch.Tensor:
        """The same of one stage of a model that is cut."""

        def weigh(loss: torch.Tensor, index: int) -> torch.Tensor:
            return loss * shares[index] if shares else loss / len(micro_batches)

        return pipeline.run_step(
            micro_batches,
            loss_of=self.forward.loss_of,
            backward=self.precision.backward,
            begin_backward=self.begin_backward,
            end_backward=self.end_backward,
            weigh=weigh,
        )

    def begin_backward(self, *, is_last: bool) -> None:
        """Before the backward of each micro-batch of a step."""
        self.gradients.begin_micro_batch(is_last=is_last)
        if self._reducer is not None:
            self._reducer.begin_micro_batch(is_last=is_last)
        mark_phase(self.meter, HEAD_BACKWARD)

    def end_backward(self) -> None:
        """After it."""
        if self._reducer is not None:
            self._reducer.end_micro_batch()
        self.weights.end_pass()
        set_region(self.meter, "temporaries")

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], *, is_counted: bool = True) -> float:
        """Mean loss without dropout or gradients; lower in memory than a training step of the same micro-batch.

        is_counted: as of ``metered``. Of several ranks each gives its part of as many steps, and the mean is over all; where they
        have taken steps alone since they were last brought together, each is of its own weights. Raises OutOfDeviceMemory
        over the cap.
        """
        self.model.eval()
        try:
            with self.metered(is_counted=is_counted):
                mark_phase(self.meter, "evaluation")
                if self._pipeline is not None:
                    losses = self._pipeline.evaluate(micro_batches, loss_of=self.forward.loss_of)
                else:
                    losses = [float(self.forward.loss_of(micro_batch)) for micro_batch in micro_batches]
        finally:
            self.model.train()
        check_peak(self.meter)
        if self._evaluated is not None and self._pipeline is None:
            num_labels = None if self.preference is not None else count_labels(micro_batches)
            return self._evaluated.mean_loss(losses, num_labels)
        shares = self._shares(micro_batches)
        if shares:
            return math.fsum(loss * share for loss, share in zip(losses, shares, strict=True))
        return math.fsum(losses) / len(losses)


def _check_ranks(plan: Plan, ranks: Ranks | None) -> None:
    """Raise InvalidPlan where a plan is for another number of devices than there are ranks: it would train on a part."""
    num_ranks = 1 if ranks is None else ranks.num_ranks
    if plan.layout.num_devices != num_ranks:
        raise InvalidPlan(
            f"plan.layout.num_devices is {plan.layout.num_devices}; this process trains with {num_ranks} of them",
            field="plan.layout.num_devices",
            value=plan.layout.num_devices,
            allowed=num_ranks,
            hint="Start one process for each device, or plan for as many devices as there are processes.",
        )


def _streams_base(plan: Plan, workload: TrainingWorkload) -> bool:
    """Report whether what streams from the host is frozen, and belongs to this process alone."""
    return plan.weights.place == "host" and workload.adapter is not None and plan.layout.num_devices == 1


def _check_finite(loss: float, *, grad_norm: float) -> None:
    if not math.isfinite(loss):
        raise LossNotFinite(
            f"the loss became {loss}", hint="Lower the learning rate or clip gradients.", loss=str(loss)
        )
    if not math.isfinite(grad_norm):
        raise LossNotFinite(
            f"the gradient norm became {grad_norm} while the loss was {loss:.4g}",
            hint="Lower the learning rate; clipping cannot help here.",
            loss=loss,
        )
