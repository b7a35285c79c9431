"""Telemetry records as named scalars: the same names in TensorBoard's file, W&B and MLflow. Torch-free."""

import json
import math
from collections.abc import Mapping
from typing import Any

Scalars = tuple[float, int, Mapping[str, float]]
"""Unix seconds, step, value by tag."""
KINDS = ("step", "eval", "generate")
_TAGS = {
    "loss": "loss/training",
    "validation_loss": "loss/validation",
    "learning_rate": "optimizer/learning_rate",
    "grad_norm": "optimizer/grad_norm",
    "reward_accuracy": "rewards/accuracy",
    "reward_margin": "rewards/margin",
    "step_ms": "speed/step_ms",
    "tokens_per_s": "speed/tokens_per_s",
    "prompts_done": "progress/prompts_done",
    "device_peak_bytes": "memory/device_peak_bytes",
    "host_bytes": "memory/host_bytes",
}


def read_record(line: bytes) -> dict[str, Any] | None:
    """One line of ``samples.jsonl``; None for a line that was cut short by a kill, or holds no measurement."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.get("kind") in KINDS else None


def scalars_of(record: Mapping[str, Any]) -> Scalars:
    """Finite numbers alone."""
    found = {tag: record.get(key) for key, tag in _TAGS.items()}
    for category, num_bytes in (record.get("device_bytes") or {}).items():
        found[f"memory/{category}_bytes"] = num_bytes
    values = {
        tag: float(value) for tag, value in found.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    return float(record["time_s"]), int(record["step"]), values
