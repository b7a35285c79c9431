"""A training job that takes no time: a chain of hashes for weights, everything else as a real one does it.

It reports, checkpoints, resumes, drains and leaves an artifact through the program's own code, so what disturbs a real job
disturbs it, and its right end is known beforehand.
"""

import hashlib
import time
from pathlib import Path
from typing import Any

from optimizer.base.serialize import to_json
from optimizer.runtime.job.checkpoint import find_resumable, hash_file, write_checkpoint
from optimizer.runtime.job.export.place import artifacts_place
from worker.run.reporter import Reporter
from worker.run.runner import StopFlag

NUM_STEPS = 20
CHECKPOINT_EVERY = 4
STEP_S = {"quick": 0.005, "slow": 0.3}
"""By the beginning of the job's name, up to the first hyphen."""
_FINGERPRINT = "a chain of hashes"


def kind_of(name: str) -> str:
    return name.partition("-")[0]


def weights_after(num_steps: int) -> str:
    """sha256 in hex of the chain's so many steps."""
    state = "the beginning"
    for step in range(1, num_steps + 1):
        state = _next(state, step)
    return hashlib.sha256(state.encode()).hexdigest()


def train(attempt: dict[str, Any], *, reporter: Reporter, should_stop: StopFlag) -> dict[str, Any]:
    """The content of ``result.json``."""
    job_folder, step_s = Path(attempt["job_folder"]), STEP_S[kind_of(attempt["model_name"])]
    found = find_resumable(job_folder) if attempt["resume_from"] else None
    step, state = (found.manifest.step, found.facts["state"]) if found else (0, "the beginning")
    reporter({"type": "started", "resumed_from_step": step})
    reporter.phase("training")
    saved = step

    def save() -> None:
        written = write_checkpoint(
            job_folder, step=step, fence=attempt["fence"], plan_fingerprint=_FINGERPRINT, tensors={}, facts={"state": state}
        )
        reporter({"type": "checkpoint", **to_json(written)})

    while step < NUM_STEPS:
        if should_stop():
            if step > saved:
                save()
            message = f"Stopped as asked after step {step}."
            return {"outcome": "drained", "reason": "", "message": message, "error": None, "step": step}
        time.sleep(step_s)
        step += 1
        state = _next(state, step)
        record = {"kind": "step", "attempt": attempt["attempt"], "step": step, "time_s": time.time()}
        reporter({"type": "sample", **record, "loss": 1 / step, "tokens_per_s": 100.0, "device_peak_bytes": 1 << 20})
        if step % CHECKPOINT_EVERY == 0:
            save()
            saved = step
    summary = {"loss": 1 / step, "weights_sha256": weights_sha256(state)}
    artifacts = [_leave(state, job_folder, fence=attempt["fence"])]
    done = {"outcome": "succeeded", "reason": "done", "message": f"Hashed {step} steps.", "error": None, "step": step}
    return {**done, "summary": summary, "artifacts": artifacts}


def weights_sha256(state: str) -> str:
    return hashlib.sha256(state.encode()).hexdigest()


def _next(state: str, step: int) -> str:
    return hashlib.sha256(f"{state} {step}".encode()).hexdigest()


def _leave(state: str, job_folder: Path, *, fence: int) -> dict[str, Any]:
    file = job_folder / artifacts_place(fence) / "model" / "state.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    staged = file.with_name(".state.txt")
    staged.write_text(state)
    staged.replace(file)
    place = str(file.relative_to(job_folder))
    return {"kind": "model", "name": file.name, "file": place, "num_bytes": len(state), "sha256": hash_file(file)}
