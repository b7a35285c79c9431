"""Does the replay of predicted allocations reserve what the replay of real ones does? Needs no GPU.

Real steps run on the CPU device under a meter that writes down every storage as it comes and goes; the estimate spells out the
same steps from a profile. Both go through one model of torch's CUDA allocator (``estimate/card/allocator.py``), so what
differs is the order and identity of allocations, which is what fragmentation hangs on. The models are small, so that a
case takes seconds; sizes are multiplied on their way into the allocator, else everything would fit in a few segments.
What the model of the allocator itself is worth, ``benchmarks/gpu_check.py`` shows on a card.

    python -m benchmarks.reserved [--quick] [--json FILE]
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.machines import make_cpu_machine
from benchmarks.common.record import GoalEntry, Record, describe_machine, goal
from optimizer.estimate.card.allocations import Allocations
from optimizer.estimate.card.allocator import AllocatorSettings, Replay, Request, replay
from optimizer.estimate.card.training_memory import list_training_allocations
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.activations import ActivationsPlan, BlockChoice
from optimizer.plan.batch import BatchPlan
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.logits_and_loss import LogitsAndLossPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.profile.profile import Profile
from optimizer.profile.trace.trace import profile_model
from optimizer.runtime.job.measure import make_synthetic_batches
from optimizer.runtime.job.prepare import build_prepared
from optimizer.runtime.meter.ledger import NUM_CATEGORIES
from optimizer.runtime.meter.meter import Meter
from optimizer.runtime.step.step import Trainer
from optimizer.workload import TrainingWorkload

CPU = torch.device("cpu")
SCALES = (256, 4096)
"""Bytes of a large model that one byte of a small one stands for."""
MEDIAN_GOAL = 0.01
_CHOICES: tuple[BlockChoice, ...] = ("keep", "recompute", "selective", "offload")
_SIZES = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 6, "vocab_size": 512}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SIZES, **_HEADS},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 512, "n_positions": 256},
    "opt": {
        "model_type": "opt",
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 512,
        "max_position_embeddings": 256,
    },
    "qwen3": {"model_type": "qwen3", **_SIZES, **_HEADS, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **_SIZES, **_HEADS, "head_dim": 16, "sliding_window": 64},
    "mixtral": {
        "model_type": "mixtral",
        **_SIZES,
        **_HEADS,
        "intermediate_size": 192,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


class AllocationLog(Meter):  # type: ignore[no-untyped-call]
    """A meter that also notes every storage of the device as it comes and goes, by a number of its own."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._numbers: dict[int, int] = {}
        self._num_seen = 0
        super().__init__(device=CPU)

    def take_requests(self) -> list[Request]:
        """Return and forget the requests since the last call."""
        requests, self._requests = self._requests, []
        return requests

    def _see(self, tensor: torch.Tensor, slot: int) -> None:
        if tensor.is_sparse:
            super()._see(tensor, slot)
            return
        key = tensor.untyped_storage()._cdata
        is_known = key in self._live
        super()._see(tensor, slot)
        if not is_known and slot < NUM_CATEGORIES and key in self._live:
            self._num_seen += 1
            self._numbers[key] = self._num_seen
            if self._live[key].num_bytes:
                self._requests.append((self._num_seen, self._live[key].num_bytes))

    def _gone(self, reference: Any) -> None:
        number = self._numbers.pop(reference.key, None)
        if number is not None:
            self._requests.append((number, 0))
        super()._gone(reference)


def log_steps(
    spec: ModelSpec, *, plan: Plan, workload: TrainingWorkload, scratch: Path | None = None
) -> tuple[list[list[Request]], int]:
    """Requests of loading and of two real steps on the CPU device, and the second one's peak as the meter counts it."""
    log = AllocationLog()
    model = build_prepared(spec, weights=plan.weights, workload=workload, device=CPU)
    trainer = Trainer(model, plan=plan, workload=workload, device=CPU, meter=log, scratch=scratch)
    try:
        phases = [log.take_requests()]
        for _ in range(2):
            batches = make_synthetic_batches(trainer.model, plan=plan, workload=workload)
            trainer.step(batches, learning_rate=1e-4)
            trainer.join()
            phases.append(log.take_requests())
        return phases, log.peak().device_bytes
    finally:
        trainer.close(keep_weights=False)


def predict_steps(profile: Profile, *, plan: Plan, workload: TrainingWorkload) -> Allocations:
    return list_training_allocations(profile, plan=plan, workload=workload, machine=make_cpu_machine())


def replay_scaled(
    phases: Sequence[Sequence[Request]], scale: int, settings: AllocatorSettings | None = None
) -> Replay:
    """Replay the requests with every byte standing for ``scale`` bytes."""
    return replay(([(key, num_bytes * scale) for key, num_bytes in phase] for phase in phases), settings=settings)


def draw_plan(rng: random.Random, num_blocks: int) -> Plan:
    per_block = tuple(rng.choice(_CHOICES) for _ in range(num_blocks))
    if rng.random() < 0.5:
        per_block = (rng.choice(_CHOICES),) * num_blocks
    gradients = rng.choice(["keep", "keep", "keep", "consume", "host"])
    return Plan(
        batch=BatchPlan(micro_batch_size=rng.choice([1, 2, 4]), accumulation_steps=rng.choice([1, 1, 2, 3])),
        logits_and_loss=LogitsAndLossPlan(num_chunks=rng.choice([1, 1, 2, 4])),
        activations=ActivationsPlan(per_block=per_block),
        gradients=GradientsPlan(choice=gradients),  # type: ignore[arg-type]
        optimizer_state=OptimizerStatePlan(place=rng.choice(["device", "host"]) if gradients == "host" else "device"),
        weights=WeightsPlan(dtype=rng.choice(["fp32", "fp32", "bf16"])),
    )


def run(num_plans: int, scratch: Path) -> Iterator[dict[str, Any]]:
    rng = random.Random(4)
    for name, config in MODELS.items():
        spec = read_model_spec(config)
        profile = profile_model(spec)
        for _ in range(num_plans):
            plan = draw_plan(rng, spec.num_blocks)
            workload = TrainingWorkload(
                sequence_length=rng.choice([32, 48, 128]),
                global_batch_size=plan.batch.global_batch_size,
                max_grad_norm=None if plan.gradients.choice == "consume" else 1.0,
            )
            if plan.find_conflict(workload) is not None:
                continue
            real, peak_bytes = log_steps(spec, plan=plan, workload=workload, scratch=scratch)
            predicted = predict_steps(profile, plan=plan, workload=workload)
            for scale in SCALES:
                for expandable in (False, True):
                    settings = AllocatorSettings(expandable_segments=expandable)
                    found, expected = (replay_scaled(p, scale, settings) for p in (real, predicted.phases))
                    yield {
                        "model": name,
                        "plan": plan.to_json(),
                        "sequence_length": workload.sequence_length,
                        "scale": scale,
                        "expandable_segments": expandable,
                        "peak_difference_bytes": predicted.peak_bytes - peak_bytes,
                        "real_reserved_bytes": found.reserved_peak_bytes,
                        "predicted_reserved_bytes": expected.reserved_peak_bytes,
                        "real_fragmentation": round(found.fragmentation, 4),
                        "error": round(expected.reserved_peak_bytes / found.reserved_peak_bytes - 1, 5),
                        "naive_error": round(expected.allocated_peak_bytes / found.reserved_peak_bytes - 1, 5),
                    }


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, GoalEntry]:
    """Errors by kind of segments. naive: the error of taking allocated bytes for reserved ones."""
    found: dict[str, GoalEntry] = {}
    for name, expandable in (("segments of fixed size", False), ("segments that grow", True)):
        errors = [abs(row["error"]) for row in rows if row["expandable_segments"] == expandable]
        naive = [abs(row["naive_error"]) for row in rows if row["expandable_segments"] == expandable]
        value = {
            "replays": len(errors),
            "median": statistics.median(errors),
            "p90": sorted(errors)[int(0.9 * len(errors))],
            "worst": max(errors),
            "naive_median": statistics.median(naive),
            "naive_worst": max(naive),
        }
        found[name] = goal(value, f"median <= {MEDIAN_GOAL}", met=value["median"] <= MEDIAN_GOAL)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two plans for each model instead of ten")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    arguments = parser.parse_args()
    record = Record(file=arguments.json, machine=describe_machine(CPU), is_quick=arguments.quick)
    with tempfile.TemporaryDirectory() as scratch:
        for row in run(2 if arguments.quick else 10, Path(scratch)):
            record.add(row)
    return record.finish(summarize(record.rows))


if __name__ == "__main__":
    raise SystemExit(main())
