"""Two devices that work on one model whose weights stream from the host, against one device that does the same.

All is trained, and gradients, optimizer state and weights live on the host. One device streams every block in turn; two share the
micro-batches, or share the blocks: two neighbouring halves (1F1B), or a block at a time that goes around (breadth first). Each
device is a process with one thread, and steps are taken in turn, so that all have the same neighbours.
"""

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common.record import GoalEntry, Row, goal
from benchmarks.parallel.network import start_ranks
from optimizer.base.serialize import to_json
from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.devices.layout import DeviceLayout
from optimizer.plan.gradients import GradientsPlan
from optimizer.plan.optimizer_state import OptimizerStatePlan
from optimizer.plan.plan import Plan
from optimizer.plan.weights import WeightsPlan
from optimizer.workload import TrainingWorkload

_LINEAR: Final = 0.9
_NUM_BLOCKS: Final = 8
_NUM_SEQUENCES: Final = 8
_CONFIG: Final[dict[str, Any]] = {
    "model_type": "headroom_decoder",
    "hidden_size": 512,
    "num_hidden_layers": _NUM_BLOCKS,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "attention_block": 64,
}


@dataclass(frozen=True, kw_only=True)
class _Way:
    """One way to share the model among devices, or not to."""

    layout: DeviceLayout
    steps_ms: list[float]


def time_all(*, is_quick: bool) -> Iterator[Row]:
    """Median steps of each way."""
    halves = DeviceLayout(num_devices=2, stage_blocks=(_NUM_BLOCKS // 2,) * 2)
    around = DeviceLayout(num_devices=2, stage_blocks=(1,) * _NUM_BLOCKS, schedule="breadth_first")
    layouts = {"one device": DeviceLayout(), "batch": DeviceLayout(num_devices=2), "halves": halves, "pooled": around}
    ways = {name: _Way(layout=layout, steps_ms=[]) for name, layout in layouts.items()}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = start_ranks(stack, folder, 2, None)
        for _ in range(1 if is_quick else 5):
            for way in ways.values():
                way.steps_ms.extend(_time(pool, folder, way.layout))
    one_ms = statistics.median(ways["one device"].steps_ms)
    for name, way in ways.items():
        step_ms = statistics.median(way.steps_ms)
        yield {
            "what": "pooled",
            "way": name,
            "num_devices": way.layout.num_devices,
            "step_ms": step_ms,
            "of_linear": one_ms / (way.layout.num_devices * step_ms),
            "all_step_ms": way.steps_ms,
        }


def _time(pool: Any, folder: Path, layout: DeviceLayout) -> list[float]:
    plan = Plan(
        layout=layout,
        batch=BatchPlan(micro_batch_size=1, accumulation_steps=_NUM_SEQUENCES // layout.num_parts),
        activations=ActivationsPlan(per_block=("keep",) * _NUM_BLOCKS),
        weights=WeightsPlan(place="host"),
        gradients=GradientsPlan(choice="host"),
        optimizer_state=OptimizerStatePlan(place="host"),
    )
    workload = TrainingWorkload(sequence_length=256, global_batch_size=_NUM_SEQUENCES, num_steps=1)
    command = {
        "plan": plan.to_json(),
        "workload": to_json(workload),
        "config": _CONFIG,
        "folder": str(folder),
        "num_steps": 3,
    }
    replies = pool.run(command, num_ranks=layout.num_devices, timeout_s=300.0)
    broken = [reply for reply in replies if "answer" not in reply]
    if broken:
        raise RuntimeError(str(broken[0].get("fault", broken[0])))
    return [max(times) for times in zip(*(reply["answer"]["step_ms"] for reply in replies), strict=True)]


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Goal: two devices together are nearly twice as fast as one."""
    found: Mapping[str, float] = {row["way"]: row["of_linear"] for row in rows if row["what"] == "pooled"}
    share = found.get("pooled")
    return {"pooled_share_of_linear": goal(share, f">= {_LINEAR}", met=share is not None and share >= _LINEAR, needs="full size")}
