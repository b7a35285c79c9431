"""What a step costs beside its kernels: the runtime's own step of a model so small that nothing else is left.

Its time over its ops is what one op costs in Python and autograd; what a technique adds beyond its ops is its own Python. Steps
are not counted by the meter, as most of a job's are not.
Nearly the same for every architecture, because it is the dispatch that costs, of views as of others.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from optimizer.hardware.probe import clock
from optimizer.hardware.probe.tiny import SEQUENCE_LENGTH, tiny_spec
from optimizer.models.build import build_model
from optimizer.models.spec import ModelSpec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsChoice, GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.runtime.measure import make_synthetic_batches
from optimizer.runtime.meter import Meter
from optimizer.runtime.step import Trainer
from optimizer.workload import TrainingWorkload

_NUM_BLOCKS, _MORE_BLOCKS = 2, 6
_NUM_WARM_UP = 2
_MAX_STEPS = 30
_UPDATE_PHASES = ("gradient clipping", "optimizer step")


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds beside kernels (``Rates``)."""

    forward_dispatch_s: float
    backward_dispatch_s: float
    python_s: dict[str, float]


def probe_steps(device: torch.device, *, max_s: float) -> StepCosts:
    share = clock.Share(max_s)
    wanted = _list_plans()
    found: dict[str, _Step] = {}
    for done, (name, plan) in enumerate(wanted.items()):
        spec = tiny_spec(len(plan.activations.per_block))
        found[name] = _measure(spec, plan, device, max_s=share.of(len(wanted) - done))
    keep = found["keep"]
    forward_s, backward_s = keep.phase_s("forward") / keep.num("forward"), keep.phase_s("backward") / keep.num("backward")

    def beyond_ops_s(name: str) -> float:
        step = found[name]
        num_again = step.num("backward") - keep.num("backward") if name in ("recompute", "selective") else 0
        num_forward = step.num("forward") - keep.num("forward") + num_again
        num_backward = step.num("backward") - keep.num("backward") - num_again
        return max(0.0, step.total_s - keep.total_s - num_forward * forward_s - num_backward * backward_s)

    more = found["more"]
    tensor_s = max(0.0, (more.update_s - keep.update_s) / (more.num_tensors - keep.num_tensors))

    def each_tensor_s(name: str, beyond: str) -> float:
        return max(0.0, found[name].total_s - found[beyond].total_s) / keep.num_tensors

    state, streamed = found["state"], found["weights"]
    num_comings = streamed.num_copies - state.num_copies
    python_s = {
        "recompute": beyond_ops_s("recompute") / _NUM_BLOCKS,
        "selective": beyond_ops_s("selective") / _NUM_BLOCKS,
        "offload": beyond_ops_s("offload") / max(1, found["offload"].num_copies - keep.num_copies),
        "step": max(0.0, keep.update_s - keep.num_tensors * tensor_s),
        "update many": tensor_s,
        "update one": tensor_s + each_tensor_s("consume", "keep"),
        "gradients": tensor_s + each_tensor_s("gradients", "keep"),
        "state": tensor_s + each_tensor_s("state", "keep"),
        "weights": max(0.0, streamed.total_s - state.total_s) / max(1, num_comings),
    }
    return StepCosts(forward_dispatch_s=forward_s, backward_dispatch_s=backward_s, python_s=python_s)


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
    """By phase as the runtime marks it."""
    ops: Counter[str]
    num_copies: int
    num_tensors: int

    def phase_s(self, phase: str) -> float:
        return self.seconds[phase]

    def num(self, phase: str) -> int:
        return self.ops[phase]

    @property
    def update_s(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in _UPDATE_PHASES)


class _PhaseMeter(Meter):  # type: ignore[no-untyped-call]
    """A meter that notes when each phase begins, and counts ops when told to."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device=device)
        self.marks: list[tuple[str, float]] = []

    def mark(self, phase: str, *, block_index: int = -1) -> None:
        super().mark(phase, block_index=block_index)
        if self._is_cuda:
            torch.cuda.synchronize(self.device)
        self.marks.append((phase, clock.now_s()))

    def take_phases(self) -> dict[str, float]:
        marks, self.marks = [*self.marks, ("", clock.now_s())], []
        seconds: dict[str, float] = {}
        for (phase, begin_s), (_, end_s) in itertools.pairwise(marks):
            seconds[phase] = seconds.get(phase, 0.0) + end_s - begin_s
        return seconds


class _CountingMeter(_PhaseMeter):  # type: ignore[no-untyped-call]
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.counts: Counter[str] = Counter()
        self.num_copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[self._phase] += 1
        self.num_copies += func is torch.ops.aten.copy_.default
        return super().__torch_dispatch__(func, types, args, kwargs)


def _measure(spec: ModelSpec, plan: Plan, device: torch.device, *, max_s: float) -> _Step:
    max_grad_norm = None if plan.gradients.choice == "consume" else 1.0
    workload = TrainingWorkload(sequence_length=SEQUENCE_LENGTH, global_batch_size=1, max_grad_norm=max_grad_norm)
    timed = _run(spec, plan, workload, _PhaseMeter(device), max_s=max_s)
    counting = _CountingMeter(device)
    _run(spec, plan, workload, counting, max_s=0.0)
    return _Step(
        total_s=min(sum(phases.values()) for phases in timed),
        seconds={phase: min(phases.get(phase, 0.0) for phases in timed) for phase in timed[0]},
        ops=counting.counts,
        num_copies=counting.num_copies,
        num_tensors=_num_tensors(spec),
    )


def _run(
    spec: ModelSpec, plan: Plan, workload: TrainingWorkload, meter: _PhaseMeter, *, max_s: float
) -> list[dict[str, float]]:
    """Phases of each step after the first ones; a counting meter counts the last alone."""
    model = build_model(spec, device=meter.device)
    trainer = Trainer(model, plan=plan, workload=workload, device=meter.device, meter=meter)
    share = clock.Share(max_s)
    timed: list[dict[str, float]] = []
    try:
        while len(timed) < _NUM_WARM_UP + 1 or (share.left_s and len(timed) < _MAX_STEPS):
            if isinstance(meter, _CountingMeter):
                meter.counts.clear()
                meter.num_copies = 0
            batches = make_synthetic_batches(model, plan=plan, workload=workload)
            meter.marks.clear()
            is_counted = isinstance(meter, _CountingMeter) or len(timed) < _NUM_WARM_UP
            trainer.step(batches, learning_rate=0.0, is_counted=is_counted)
            timed.append(meter.take_phases())
    finally:
        trainer.close()
    return timed[_NUM_WARM_UP:]


def _num_tensors(spec: ModelSpec) -> int:
    return len(list(build_model(spec, device="meta").parameters()))
