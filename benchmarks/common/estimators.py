"""Other ways to say how many bytes training takes, asked about the same cases as ours.

- torch's ``MemTracker`` under fake tensors, of an ordinary training loop with the case's model, batch, checkpointing and
  adapters; held against a real run of that same loop under the profiler, so that it answers for itself alone.
- accelerate's ``estimate-memory``: its own function.
- DeepSpeed's ``estimate_zero3_model_states_mem_needs`` for one device, as arithmetic (deepspeed/runtime/zero/stage3.py).
- Four times the weights, the rule of thumb for Adam.

The last three know parameters alone, neither batch nor sequence; they are held against what the case took.
"""

import gc
import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.accuracy.cases import Case
from benchmarks.accuracy.meter import AllocationProfile
from benchmarks.common.record import Row
from optimizer.models.adapters import attach_adapters
from optimizer.models.anatomy import find_anatomy
from optimizer.models.build import build_model
from optimizer.plan.plan import Plan
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.workload import TrainingWorkload

EXPRESSIBLE = frozenset({"recompute", "accumulate", "unclipped", "autocast", "lora", "sgd", "sgd-plain"})
"""Techniques that an ordinary loop has, so that MemTracker can be asked about them."""


class NoAnswer(Exception):
    """This way cannot estimate the case; says why in two words."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One estimator's answer for a case, beside the measured bytes."""

    predicted_bytes: int
    measured_bytes: int
    took_ms: float


def ask_all(case: Case, *, measured_bytes: int) -> Iterator[Row]:
    """A row for each way to estimate. measured_bytes: what a step of the case's plan took."""
    for name, ask in ESTIMATORS.items():
        row: Row = {"what": "estimator", "case": case.name, "estimator": name, "why_not": None, "error": None}
        try:
            answer = ask(case, measured_bytes)
        except NoAnswer as error:
            yield {**row, "why_not": str(error), "because": str(error.__cause__ or "")[:300]}
            continue
        yield {
            **row,
            "predicted_bytes": answer.predicted_bytes,
            "measured_bytes": answer.measured_bytes,
            "error": answer.predicted_bytes / answer.measured_bytes - 1,
            "took_ms": round(answer.took_ms, 3),
        }


def ask_mem_tracker(case: Case, measured_bytes: int) -> Answer:
    """Traced and run for real: both the same ordinary loop, whatever ours took."""
    if not EXPRESSIBLE.issuperset(case.techniques):
        raise NoAnswer("not expressible")
    started_s = time.perf_counter()
    try:
        predicted_bytes = track_step(case)
    except Exception as error:
        # Whatever stops a trace of this private module is an answer of its own.
        raise NoAnswer("not traceable") from error
    took_ms = (time.perf_counter() - started_s) * 1000
    gc.collect()
    with AllocationProfile() as profiled:
        loop = Loop(case)
        loop.step()
        with profiled.steady_step():
            loop.step()
    return Answer(predicted_bytes=predicted_bytes, measured_bytes=profiled.peak.device_bytes, took_ms=took_ms)


def track_step(case: Case) -> int:
    """Peak bytes of a steady step by MemTracker under fake tensors."""
    tracker_type: Any = importlib.import_module("torch.distributed._tools.mem_tracker").MemTracker
    with FakeTensorMode():
        loop = Loop(case)
        tracker = tracker_type()
        tracker.track_external(loop.model, loop.optimizer, *(tensor for batch in loop.batches for tensor in batch))
        with tracker as tracked:
            loop.step()
            tracked.reset_mod_stats()
            loop.step()
        snapshot = tracker.get_tracker_snapshot("peak")
    return int(next(iter(snapshot.values()))["Total"])


def ask_accelerate(case: Case, measured_bytes: int) -> Answer:
    try:
        module: Any = importlib.import_module("accelerate.commands.estimate")
    except ImportError as error:
        raise NoAnswer("not installed") from error
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    weights = case.plan.weights
    computed = weights.dtype if weights.autocast == "off" else weights.autocast
    started_s = time.perf_counter()
    usage = module.estimate_training_usage(4 * case.spec.num_parameters, names[computed])
    return _answered(max(usage.values()), measured_bytes, started_s)


def ask_deepspeed(case: Case, measured_bytes: int) -> Answer:
    """18 bytes a parameter, 2 with the optimizer offloaded, none with parameters too; and 4 for the largest layer's."""
    started_s = time.perf_counter()
    spec, plan = case.spec, case.plan
    assert isinstance(plan, Plan)
    has_state, has_weights = plan.optimizer_state.place == "device", plan.weights.place == "device"
    bytes_per_parameter = {(True, True): 18, (False, True): 2, (False, False): 0, (True, False): 16}
    predicted_bytes = bytes_per_parameter[has_state, has_weights] * spec.num_parameters + 4 * _largest_layer(case)
    return _answered(predicted_bytes, measured_bytes, started_s)


def ask_four_weights(case: Case, measured_bytes: int) -> Answer:
    started_s = time.perf_counter()
    predicted_bytes = 4 * case.plan.weights.bytes_per_element * case.spec.num_parameters
    return _answered(predicted_bytes, measured_bytes, started_s)


ESTIMATORS: Mapping[str, Callable[[Case, int], Answer]] = {
    "torch MemTracker": ask_mem_tracker,
    "accelerate estimate-memory": ask_accelerate,
    "DeepSpeed ZeRO-3 formula": ask_deepspeed,
    "4 x weights": ask_four_weights,
}


class Loop:
    """An ordinary training loop of the case's model, on whatever tensors are made where it is built."""

    def __init__(self, case: Case) -> None:
        workload, plan = case.workload, case.plan
        assert isinstance(workload, TrainingWorkload)
        assert isinstance(plan, Plan)
        self.model = build_model(case.spec, seed=workload.seed)
        if workload.adapter is not None:
            attach_adapters(self.model, workload.adapter, seed=workload.seed)
        if "recompute" in plan.activations.per_block:
            for block in find_anatomy(self.model).blocks:
                block.forward = _checkpointed(block.forward)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer: torch.optim.Optimizer
        if workload.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(trained, lr=workload.learning_rate, momentum=workload.momentum)
        else:
            self.optimizer = torch.optim.AdamW(trained, lr=workload.learning_rate)
        self.batches = make_synthetic_batches(self.model, plan=plan, workload=workload)
        self._anatomy = find_anatomy(self.model)
        self._max_norm = workload.max_grad_norm
        self._autocasts = plan.weights.autocast != "off"

    def step(self) -> None:
        for ids, labels in self.batches:
            with self._autocast():
                result = self._anatomy.run(ids, labels=labels, masks={}, at_hidden=_pass)
                logits = self._anatomy.compute_logits(result)
            loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            (loss / len(self.batches)).backward()  # type: ignore[no-untyped-call]
            del result, logits, loss
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self._autocasts else nullcontext()


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _pass(hidden: torch.Tensor) -> None:
    """Nothing is to be done at the last hidden state."""


def _largest_layer(case: Case) -> int:
    """Parameters of the largest module that has some of its own, as DeepSpeed counts them."""
    model = build_model(case.spec, device="meta")
    return max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())


def _answered(predicted_bytes: int, measured_bytes: int, started_s: float) -> Answer:
    took_ms = (time.perf_counter() - started_s) * 1000
    return Answer(predicted_bytes=predicted_bytes, measured_bytes=measured_bytes, took_ms=took_ms)
