"""The fresh process of one attempt: ``python -I -m worker.run.runner FOLDER``. Reads a file, writes a folder, talks on a pipe.

An attempt on several devices it leads (``ranks/leader.py``), and each of its ranks is this program with the rank's number behind
the folder.

Exit codes: 0 done, 75 stopped as asked with a checkpoint, 74 the disk took no result, 1 failed, 2 called wrongly. What happened
is in ``result.json``; a traceback only in the log. It knows nothing of Django, the database or the broker.
"""

import contextlib
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from optimizer.base.errors import (
    BlockNotCompiled,
    DiskFull,
    HeadroomError,
    InvalidDataset,
    InvalidModel,
    InvalidPlan,
    MachineFault,
    RankLost,
)
from optimizer.plan.devices.generation_layout import count_devices
from worker.run.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_FAILED, EXIT_NO_ROOM, EXIT_USAGE
from worker.run.exporting import export_attempt
from worker.run.pipe import PipeWriter
from worker.run.profiling import profile_to_file
from worker.run.ranks.leader import lead_ranks
from worker.run.ranks.rank import (
    brief_of_rank,
    die_with_leader,
    leave_stopping_to_first,
    reporter_of_rank,
    shared_folder,
)
from worker.run.reporter import Reporter, read_json
from worker.run.tensorboard.leave import leave_event_file
from worker.run.watch.lifeline import die_with_supervisor, end_when_silent

REASONS = frozenset(
    {
        "out_of_device_memory",
        "out_of_host_memory",
        "disk_full",
        "machine_fault",
        "loss_not_finite",
        "bad_dataset",
        "bad_model",
        "plan_stale",
        "missing_extra",
        "remote_store_full",
        "remote_store_lost",
    }
)
"""Error codes that are a job's reason as they are (``webapp.jobs.models.Reason``)."""


class StopFlag:
    """Raised by TERM, read by the training loop at each step boundary."""

    def __init__(self) -> None:
        self._is_raised = False

    def __call__(self) -> bool:
        return self._is_raised

    def raise_on_term(self) -> None:
        signal.signal(signal.SIGTERM, self._raise)

    def _raise(self, *_: Any) -> None:
        self._is_raised = True


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print("usage: python -m worker.run.runner ATTEMPT_FOLDER [RANK]", file=sys.stderr)
        return EXIT_USAGE
    rank = int(sys.argv[2]) if len(sys.argv) == 3 else None
    if rank is not None:
        die_with_leader()
    should_stop = StopFlag()
    should_stop.raise_on_term()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the weights and the data
    if lifeline := os.environ.get("HEADROOM_LIFELINE_FD"):
        die_with_supervisor(int(lifeline))
    beat = os.environ.get("HEADROOM_BEAT_FD")
    check_lease = end_when_silent(int(beat)) if beat else None
    folder = Path(sys.argv[1])
    pipe_fd = os.environ.get("HEADROOM_PIPE_FD")
    attempt = read_json(folder / "attempt.json")
    if rank is None and count_devices(attempt.get("plan")) > 1:
        return lead_ranks(attempt, folder=folder, should_stop=should_stop)
    pipe = PipeWriter(int(pipe_fd)) if pipe_fd else None
    if rank is not None:
        leave_stopping_to_first(rank)
        reporter = reporter_of_rank(shared_folder(attempt, folder), rank=rank, pipe=pipe, check_lease=check_lease)
        return run_attempt(brief_of_rank(attempt, folder=folder, rank=rank), reporter=reporter, should_stop=should_stop)
    reporter = Reporter(folder, pipe=pipe, check_lease=check_lease)
    return run_attempt(attempt, reporter=reporter, should_stop=should_stop)


def run_attempt(attempt: dict[str, Any], *, reporter: Reporter, should_stop: StopFlag) -> int:
    """Do the work and leave ``result.json``; the exit code."""
    try:
        result = _WORK[attempt["kind"]](attempt, reporter=reporter, should_stop=should_stop)
    except Exception as error:
        _print_traceback()
        result = failure(error, step=reporter.step, machine=attempt.get("machine", ""))
    if result["outcome"] != "drained" and not reporter.is_silent:
        result = {**result, "artifacts": [*result.get("artifacts", []), *_event_file(attempt, reporter)]}
    try:
        reporter.result(result)
        reporter.close()
    except OSError as error:
        if DiskFull.behind(error) is None:
            raise
        return EXIT_NO_ROOM
    return {"succeeded": EXIT_DONE, "drained": EXIT_DRAINED}.get(result["outcome"], EXIT_FAILED)


def _event_file(attempt: dict[str, Any], reporter: Reporter) -> list[dict[str, Any]]:
    """Write the measurements for TensorBoard. A failure here must not cost the attempt its result."""
    try:
        return leave_event_file(reporter.folder, attempt_number=attempt["attempt"], fence=attempt["fence"])
    except Exception:
        _print_traceback()
        return []


def _print_traceback() -> None:
    """To the log; that may lie on the very disk that is full."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def profile(attempt: dict[str, Any], *, reporter: Reporter, should_stop: StopFlag) -> dict[str, Any]:
    """Trace the model for pricing. Seconds; a stop that comes meanwhile is answered after the end."""
    reporter({"type": "started", "resumed_from_step": 0})
    reporter.phase("profiling")
    profile_to_file(
        attempt["config"],
        Path(attempt["profile_file"]),
        adapter=attempt.get("adapter"),
        generates=attempt.get("generates", False),
        is_packed=attempt.get("packed", False),
        objective=attempt.get("objective", "next_token"),
        compiled=attempt.get("compiled", ()),
        sharing=attempt.get("sharing", 1),
    )
    return {"outcome": "succeeded", "reason": "done", "message": "", "error": None, "step": 0}


def train(attempt: dict[str, Any], *, reporter: Reporter, should_stop: StopFlag) -> dict[str, Any]:
    from worker.run.training import train_attempt

    return train_attempt(attempt, reporter=reporter, should_stop=should_stop)


def generate(attempt: dict[str, Any], *, reporter: Reporter, should_stop: StopFlag) -> dict[str, Any]:
    from worker.run.generation import generate_attempt

    return generate_attempt(attempt, reporter=reporter, should_stop=should_stop)


def serve(attempt: dict[str, Any], *, reporter: Reporter, should_stop: StopFlag) -> dict[str, Any]:
    from worker.run.serving.session import serve_attempt

    return serve_attempt(attempt, reporter=reporter, should_stop=should_stop)


def export(attempt: dict[str, Any], *, reporter: Reporter, should_stop: StopFlag) -> dict[str, Any]:
    return export_attempt(attempt, reporter=reporter, should_stop=should_stop)


_WORK = {"train": train, "profile": profile, "generate": generate, "serve": serve, "export": export}


def failure(error: Exception, *, step: int, machine: str = "") -> dict[str, Any]:
    """The message of the job's row. An error outside the tree is a fault of the program; its text stays in the log.

    machine: its name, for messages.
    """
    known = _as_headroom_error(error, machine=machine)
    if isinstance(known, DiskFull):
        known.fields.setdefault("cause", "disk")
    if known is None:
        message = "A fault of the program ended the job; its log has the traceback."
        return {"outcome": "failed", "reason": "internal", "message": message, "error": None, "step": step}
    return {
        "outcome": "failed",
        "reason": reason_of(known),
        "message": str(known),
        "error": known.to_json(),
        "step": step,
    }


def reason_of(error: HeadroomError) -> str:
    """The closest entry of the closed list of reasons."""
    if error.code in REASONS:
        return error.code
    if isinstance(error, RankLost):
        return "worker_lost"  # a process that hangs or is gone, and no fault of the job's own
    if isinstance(error, InvalidModel | BlockNotCompiled):
        return "bad_model"
    if isinstance(error, InvalidPlan):
        return "plan_stale"
    return "bad_dataset" if isinstance(error, InvalidDataset) else "internal"


def _as_headroom_error(error: Exception, *, machine: str) -> HeadroomError | None:
    if isinstance(error, HeadroomError):
        return error
    return DiskFull.behind(error) or MachineFault.behind_device(error, machine=machine)


if __name__ == "__main__":
    sys.exit(main())
