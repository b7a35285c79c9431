"""Cost of a step beside its kernels: the runtime's own step of a model so small that nothing else is left.

What more blocks take longer, over their ops, is what one op costs in Python and autograd, and what is left is a micro-batch's
own; what a technique adds beyond its ops is its own Python. Steps are not counted by the meter, as most of a job's are not.
Nearly the same for every architecture, because it is the dispatch that costs, of views as of others.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.hardware.probe import clock
from optimizer.hardware.probe.thread_wakeup import alone
from optimizer.hardware.probe.tiny import SEQUENCE_LENGTH, tiny_spec
from optimizer.hardware.rates import PythonWork
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsChoice, GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload

_NUM_BLOCKS, _MORE_BLOCKS = 2, 6
_NUM_WARM_UP = 2
_MAX_ROUNDS = 60
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
"""Ops that tensors go from tier to tier by (``runtime/tiers``)."""
_UPDATE_PHASES = ("gradient clipping", "optimizer step")


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds beside kernels (``Rates``)."""

    forward_dispatch_s: float
    backward_dispatch_s: float
    python_s: dict[PythonWork, float]


def probe_steps(device: torch.device, *, max_s: float) -> StepCosts:
    """Time ops on one thread, since waking the others is priced by itself (``thread_wakeup.py``); what is done to each
    tensor of an update is timed as it runs.
    """
    by_one, by_all = _measure(_list_plans(), device, max_s=max_s)
    forward_s, backward_s = (_each_op_s(by_one, phase) for phase in ("forward", "backward"))
    return StepCosts(
        forward_dispatch_s=forward_s,
        backward_dispatch_s=backward_s,
        python_s=_python_of_ops(by_one, forward_s, backward_s) | _python_of_updates(by_all),
    )


def _each_op_s(found: Mapping[str, "_Step"], phase: str) -> float:
    keep, more = found["keep"], found["more"]
    # Noise can make the difference of a hasty probe nothing; an op never costs that.
    longer_s = max(more.phase_s(phase) - keep.phase_s(phase), more.phase_s(phase) / 20)
    return longer_s / (more.num(phase) - keep.num(phase))


def _python_of_ops(found: Mapping[str, "_Step"], forward_s: float, backward_s: float) -> dict[PythonWork, float]:
    keep = found["keep"]
    once_s = keep.phase_s("forward") - keep.num("forward") * forward_s
    once_s += keep.phase_s("backward") - keep.num("backward") * backward_s

    def offload_s() -> float:
        step = found["offload"]
        num_forward, num_backward = (step.num(phase) - keep.num(phase) for phase in ("forward", "backward"))
        beyond_s = step.total_s - keep.total_s - num_forward * forward_s - num_backward * backward_s
        return max(0.0, beyond_s) / max(1, step.copies.total() - keep.copies.total())

    def rebuilding_s(name: str) -> float:
        step = found[name]
        num_again = step.num("backward") - keep.num("backward")
        num_more = step.num("forward") - keep.num("forward") + num_again
        return max(0.0, step.total_s - keep.total_s - num_more * forward_s) / (step.num("forward") + num_again)

    return {
        "recompute op": rebuilding_s("recompute"),
        "selective op": rebuilding_s("selective"),
        "offload": offload_s(),
        "micro-batch": max(0.0, once_s),
    }


def _python_of_updates(found: Mapping[str, "_Step"]) -> dict[PythonWork, float]:
    keep, more = found["keep"], found["more"]
    tensor_s = max(0.0, (more.update_s - keep.update_s) / (more.num_tensors - keep.num_tensors))

    def each_tensor_s(name: str, beyond: str) -> float:
        return max(0.0, found[name].total_s - found[beyond].total_s) / keep.num_tensors

    state, streamed = found["state"], found["weights"]
    state_s = tensor_s + each_tensor_s("state", "keep")
    # Streamed weights are updated where they are, so that no copy follows; they come with their blocks instead.
    num_streamed = max(1, state.update_copies - streamed.update_copies)
    num_comings = max(1, streamed.copies.total() - state.copies.total() + num_streamed)
    saved_s = state.update_s - streamed.update_s
    return {
        "step": max(0.0, keep.update_s - keep.num_tensors * tensor_s),
        "update many": tensor_s,
        "update one": tensor_s + each_tensor_s("consume", "keep"),
        "gradients": tensor_s + each_tensor_s("gradients", "keep"),
        "state": state_s,
        "state at home": max(0.0, state_s - saved_s / num_streamed),
        "weights": max(0.0, streamed.total_s - state.total_s + saved_s) / num_comings,
    }


def _list_plans() -> dict[str, Plan]:
    def plan(
        choice: BlockChoice = "keep",
        *,
        num_blocks: int = _NUM_BLOCKS,
        gradients: GradientsChoice = "keep",
        **more: Any,
    ) -> Plan:
        return Plan(
            batch=BatchPlan(micro_batch_size=1, accumulation_steps=1),
            activations=ActivationsPlan(per_block=(choice,) * num_blocks),
            gradients=GradientsPlan(choice=gradients),
            **more,
        )

    away = OptimizerStatePlan(place="host")
    return {
        "keep": plan(),
        "more": plan(num_blocks=_MORE_BLOCKS),
        "recompute": plan("recompute"),
        "selective": plan("selective"),
        "offload": plan("offload"),
        "consume": plan(gradients="consume"),
        "gradients": plan(gradients="host"),
        "state": plan(gradients="host", optimizer_state=away),
        "weights": plan(gradients="host", optimizer_state=away, weights=WeightsPlan(place="host")),
    }


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One plan's step; the least of many, since differences between steps are taken, which noise would drown."""

    total_s: float
    seconds: dict[str, float]
    """Seconds by phase as the runtime marks it."""
    ops: Counter[str]
    copies: Counter[str]
    """Ops among these that copy, between tiers or not."""
    num_tensors: int

    def phase_s(self, phase: str) -> float:
        return self.seconds[phase]

    def num(self, phase: str) -> int:
        return self.ops[phase]

    @property
    def update_s(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in _UPDATE_PHASES)

    @property
    def update_copies(self) -> int:
        return sum(self.copies[phase] for phase in _UPDATE_PHASES)


class _PhaseMeter(Meter):  # type: ignore[no-untyped-call]
    """A meter that notes when each phase begins."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)
        self.marks: list[tuple[str, float]] = []

    def mark(self, phase: str, *, block_index: int = -1) -> None:
        super().mark(phase, block_index=block_index)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.marks.append((phase, clock.now_s()))

    @property
    def phase(self) -> str:
        return self._phase

    def take_phases(self) -> dict[str, float]:
        marks, self.marks = [*self.marks, ("", clock.now_s())], []
        seconds: dict[str, float] = {}
        for (phase, begin_s), (_, end_s) in itertools.pairwise(marks):
            seconds[phase] = seconds.get(phase, 0.0) + end_s - begin_s
        return seconds


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered around a meter, counts what that sends on: all ops, by the meter's phase."""

    def __init__(self, meter: _PhaseMeter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self.counts: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[self._meter.phase] += 1
        self.copies[self._meter.phase] += func in COPIES
        return func(*args, **(kwargs or {}))


_BY_ONE = ("keep", "more", "recompute", "selective", "offload")
_BY_ALL = ("keep", "more", "consume", "gradients", "state", "weights")


def _measure(
    plans: Mapping[str, Plan], device: torch.device, *, max_s: float
) -> tuple[dict[str, _Step], dict[str, _Step]]:
    """Measure steps by one thread, and by all; they are taken in turn, so that a slow moment of the machine is not one
    plan's alone.
    """
    share = clock.TimeShare(max_s)
    runs = {name: _Run(plan, _PhaseMeter(device)) for name, plan in plans.items()}
    by_one: dict[str, list[dict[str, float]]] = {name: [] for name in _BY_ONE}
    by_all: dict[str, list[dict[str, float]]] = {name: [] for name in _BY_ALL}
    try:
        counted = {name: run.count_step() for name, run in runs.items()}
        while not by_one["keep"] or (share.left_s and len(by_one["keep"]) < _MAX_ROUNDS):
            with alone(device):
                for name, times in by_one.items():
                    times.append(runs[name].take_step())
            for name, times in by_all.items():
                times.append(runs[name].take_step())
    finally:
        for run in runs.values():
            run.trainer.close()
    of_one, of_all = (
        {name: _make_step(each, counted[name], plans[name]) for name, each in timed.items()} for timed in (by_one, by_all)
    )
    return of_one, of_all


def _make_step(timed: list[dict[str, float]], counted: _Counter, plan: Plan) -> _Step:
    return _Step(
        total_s=min(sum(phases.values()) for phases in timed),
        seconds={phase: min(phases.get(phase, 0.0) for phases in timed) for phase in timed[0]},
        ops=counted.counts,
        copies=counted.copies,
        num_tensors=len(list(build_model(_spec_of(plan), device="meta").parameters())),
    )


class _Run:
    """A tiny model under a plan."""

    def __init__(self, plan: Plan, meter: _PhaseMeter) -> None:
        max_grad_norm = None if plan.gradients.choice == "consume" else 1.0
        self._workload = TrainingWorkload(
            sequence_length=SEQUENCE_LENGTH, global_batch_size=1, max_grad_norm=max_grad_norm
        )
        self._meter = meter
        model = build_model(_spec_of(plan), device=meter.device)
        self.trainer = Trainer(model, plan=plan, workload=self._workload, device=meter.device, meter=meter)

    def count_step(self) -> _Counter:
        """Count the ops of a step after the first ones."""
        for _ in range(_NUM_WARM_UP):
            self.take_step(is_counted=True)
        counter = _Counter(self._meter)
        with counter:
            self.take_step()
        return counter

    def take_step(self, *, is_counted: bool = False) -> dict[str, float]:
        """Seconds by phase."""
        trainer = self.trainer
        batches = make_synthetic_batches(trainer.model, plan=trainer.plan, workload=self._workload)
        self._meter.marks.clear()
        trainer.step(batches, learning_rate=0.0, is_counted=is_counted)
        return self._meter.take_phases()


def _spec_of(plan: Plan) -> ModelSpec:
    return tiny_spec(len(plan.activations.per_block))
