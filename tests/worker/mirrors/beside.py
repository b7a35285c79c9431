"""A mirror's process as a worker starts it, beside an attempt that is only its files."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from worker.mirroring import mirror_environment
from worker.run.child import isolated_command

BRIEF = {
    "job_id": "job_1",
    "attempt": 1,
    "kind": "train",
    "device": "cpu",
    "workload": {"num_steps": 4, "adapter": {"rank": 8}, "targets": ["q", "k"]},
    "goal": None,
    "prediction": {"device_peak_bytes": 100},
    "mirrored": {"name": "tiny on kjv", "url": "http://127.0.0.1:8400/jobs/job_1/", "config": {"model": "tiny", "dataset": None}},
}


def write_attempt(job_folder: Path, number: int = 1, *, steps: range = range(1, 5)) -> Path:
    """The attempt's folder, with the measurements of these steps."""
    folder = job_folder / "attempts" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attempt.json").write_text(json.dumps({**BRIEF, "attempt": number}))
    lines = [
        {"kind": "step", "step": step, "time_s": 1_000.0 + step, "loss": 5.0 - step, "device_bytes": {"weights": 7}}
        for step in steps
    ]
    lines.append({"kind": "timeline", "step": steps.stop, "time_s": 2_000.0})
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    return folder


def run_mirror(name: str, folder: Path, *, environment: dict[str, str], ending: str = "succeeded") -> list[dict[str, Any]]:
    """Everything that it said, from its start to its end."""
    home = folder.parent.parent / "mirrors"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        isolated_command("worker.mirrors.program", name, str(folder)),
        input=f"{ending}\n".encode(),
        capture_output=True,
        env=mirror_environment({**os.environ, **environment}, name=name, home=home),
        start_new_session=True,
        timeout=100,
        check=True,
    )
    assert done.stderr == b""
    return [json.loads(line) for line in done.stdout.splitlines()]
