"""Files of a finished training run, as an export writes them, handed in with the run's result."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from optimizer.data.bundled import TOKENIZER_FILE
from tests.webapp.attempts.attempts import DONE
from webapp.attempts.claiming import claim_job
from webapp.attempts.outcome import finish_attempt
from webapp.attempts.records import record_started
from webapp.jobs.models import Job

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "dtype": "float32",
    "use_cache": True,
}


def weights_file(value: int = 0) -> bytes:
    """One small tensor, as safetensors says."""
    header = json.dumps({"wte.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes([value]) * 32


MODEL: dict[str, Any] = {
    "config.json": json.dumps(CONFIG).encode(),
    "generation_config.json": b"{}",
    "model.safetensors": weights_file(),
    "tokenizer.json": TOKENIZER_FILE.read_bytes(),
    "tokenizer_config.json": b'{"eos_token": "x"}',
}
ADAPTER: dict[str, Any] = {"adapter_config.json": b"{}", "adapter_model.safetensors": weights_file()}


def write_files(
    job_id: str, home: Path, *, model: dict[str, bytes] = MODEL, adapter: Any = None
) -> list[dict[str, Any]]:
    """Into the job's folder, by name; what its result says of them."""
    folder = home / "jobs" / job_id / "artifacts"
    artifacts = []
    for kind, files in (("model", model), ("adapter", adapter)):
        for name, content in (files or {}).items():
            path = folder / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            named = {"kind": kind, "name": name, "file": f"artifacts/{kind}/{name}"}
            artifacts.append({**named, "num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    return artifacts


def leave(job: Job, home: Path, **files: Any) -> Job:
    """Run a queued job to its end."""
    artifacts = write_files(job.pk, home, **files)
    attempt = claim_job(worker="w", machine=job.machine, job_id=job.pk)
    assert attempt is not None
    assert record_started(attempt, pid=1)
    assert finish_attempt(attempt, result={**DONE, "artifacts": artifacts}, exit_code=0) == "succeeded"
    return Job.objects.get(pk=job.pk)
