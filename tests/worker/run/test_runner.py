"""The attempt's own process: results, exit codes, signals."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.base.errors import (
    DiskFull,
    HeadroomError,
    InvalidDataset,
    InvalidPlan,
    LossNotFinite,
    MachineFault,
    MissingExtra,
    OutOfDeviceMemory,
    RankLost,
    RemoteStoreFull,
    RemoteStoreLost,
    UnsupportedModelType,
)
from tests.disks import small_disk
from webapp.jobs.models import Reason
from worker.attempt import EXIT_DRAINED as SUPERVISOR_EXIT_DRAINED
from worker.attempt import EXIT_NO_ROOM as SUPERVISOR_EXIT_NO_ROOM
from worker.attempt import judge_end, read_result
from worker.run.child import child_environment, isolated_command
from worker.run.exit_codes import EXIT_DRAINED, EXIT_FAILED, EXIT_NO_ROOM
from worker.run.pipe import PipeReader, PipeWriter
from worker.run.reporter import Reporter
from worker.run.runner import REASONS, failure, reason_of

ROOT = Path(__file__).parents[3]


def out_of_device_memory() -> OutOfDeviceMemory:
    return OutOfDeviceMemory(
        requested_bytes=10, in_use_bytes=95, budget_bytes=100, bytes_by_category={"weights": 60, "activations": 35}
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (out_of_device_memory(), "out_of_device_memory"),
        (LossNotFinite("x"), "loss_not_finite"),
        (DiskFull("x"), "disk_full"),
        (MachineFault("x", machine="box", look_at="y"), "machine_fault"),
        (InvalidDataset("x", field="file"), "bad_dataset"),
        (UnsupportedModelType("x", supported=["llama"]), "bad_model"),
        (InvalidPlan("x", field="plan"), "plan_stale"),
        (MissingExtra("peft", needed_for="adapters"), "missing_extra"),
        (RemoteStoreFull("x"), "remote_store_full"),
        (RemoteStoreLost("x"), "remote_store_lost"),
        (RankLost(rank=0, num_ranks=2, waiting_for="a sum", waited_s=300.0, cause="timeout"), "worker_lost"),
        (HeadroomError("x"), "internal"),
    ],
)
def test_each_error_has_a_reason_of_the_closed_list(error: HeadroomError, reason: str) -> None:
    assert reason_of(error) == reason
    assert reason in Reason.values


def test_codes_taken_over_as_they_are_are_reasons() -> None:
    assert set(Reason.values) >= REASONS


def test_both_ends_mean_the_same_by_the_exit_code_of_a_drained_attempt() -> None:
    assert SUPERVISOR_EXIT_DRAINED == EXIT_DRAINED


def test_a_memory_error_keeps_its_sizes_by_category() -> None:
    result = failure(out_of_device_memory(), step=3)
    assert result["reason"] == "out_of_device_memory"
    assert result["step"] == 3
    assert result["error"]["fields"]["bytes_by_category"] == {"weights": 60, "activations": 35}


def test_a_full_disk_is_named_whoever_met_it() -> None:
    result = failure(OSError(errno.ENOSPC, "No space left on device", "/secret/place/model.safetensors"), step=0)
    assert result["reason"] == "disk_full"
    assert result["message"] == "the disk is full: no room for model.safetensors"


def test_a_disk_that_fails_is_named_as_one() -> None:
    result = failure(OSError(errno.EIO, "Input/output error", "/secret/place/model.safetensors"), step=0)
    assert (result["reason"], result["message"]) == ("disk_full", "the disk fails at model.safetensors: Input/output error")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable' in https://docs.nvidia.com/",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA error: no CUDA-capable device is detected",
        "CUDA error: unknown error",
        "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable",
        "No CUDA GPUs are available",
        "Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
    ],
)
def test_a_card_or_driver_that_fails_is_a_fault_of_the_machine_by_name(text: str) -> None:
    for error in (torch.AcceleratorError(text), RuntimeError(text)):
        result = failure(error, step=3, machine="office")
        assert (result["reason"], result["error"]["fields"]) == ("machine_fault", {"machine": "office"})
        assert result["message"].startswith("a fault of office and not of the job: its card or the driver fails (")
        assert result["message"].endswith("); look at nvidia-smi and the kernel's log there")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "CUDA error: unspecified launch failure",
        "CUDA error: misaligned address",
    ],
)
def test_what_a_kernel_does_is_no_fault_of_the_machine(text: str) -> None:
    assert failure(torch.AcceleratorError(text), step=3, machine="office")["reason"] == "internal"


def test_on_a_full_disk_the_end_is_known_though_neither_result_nor_log_can_be_written(tmp_path: Path) -> None:
    attempt = {"job_id": "job_1", "attempt": 1, "fence": 1, "kind": "profile", "device": "cpu"}
    attempt |= {"config": {"model_type": "mystery"}, "profile_file": str(tmp_path / "profile.json")}
    with small_disk(tmp_path / "disk") as disk:
        (disk.folder / "attempt.json").write_text(json.dumps(attempt))
        disk.fill()
        with (disk.folder / "log.txt").open("ab") as log:
            ended = subprocess.run(
                isolated_command("worker.run.runner", str(disk.folder)),
                env=child_environment({}, folder=disk.folder),
                stdout=log,
                stderr=log,
                check=False,
            )
        assert ended.returncode == EXIT_NO_ROOM == SUPERVISOR_EXIT_NO_ROOM
        judged = judge_end(disk.folder, exit_code=ended.returncode, was_asked_to_stop=False)
    assert judged is not None
    assert (judged["outcome"], judged["reason"]) == ("failed", "disk_full")


def test_a_fault_of_the_program_does_not_leak_its_text() -> None:
    result = failure(RuntimeError("secret /path"), step=0)
    assert result["reason"] == "internal"
    assert "secret" not in json.dumps(result)


def run_in_folder(folder: Path, attempt: dict[str, Any]) -> subprocess.CompletedProcess[Any]:
    (folder / "attempt.json").write_text(json.dumps(attempt))
    return subprocess.run(
        isolated_command("worker.run.runner", str(folder)),
        cwd=folder,
        env=child_environment({}, folder=folder),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_that_is_not_supported_ends_the_attempt_with_its_name(tmp_path: Path) -> None:
    attempt = {"job_id": "job_1", "attempt": 1, "fence": 1, "kind": "profile", "device": "cpu"}
    config = {"model_type": "mystery"}
    ended = run_in_folder(tmp_path, {**attempt, "config": config, "profile_file": str(tmp_path / "profile.json")})
    result = read_result(tmp_path)
    assert ended.returncode == EXIT_FAILED
    assert (result["outcome"], result["reason"]) == ("failed", "bad_model")
    assert "mystery" in result["message"]
    assert not (tmp_path / "profile.json").exists()


def test_a_kind_of_job_that_is_not_known_is_a_fault_with_its_traceback_in_the_log_only(tmp_path: Path) -> None:
    ended = run_in_folder(tmp_path, {"job_id": "job_1", "attempt": 1, "fence": 1, "kind": "dance"})
    assert ended.returncode == EXIT_FAILED
    assert read_result(tmp_path)["reason"] == "internal"
    assert "KeyError: 'dance'" in ended.stderr


def test_called_without_a_folder_it_says_how_it_is_called(tmp_path: Path) -> None:
    ended = subprocess.run(
        isolated_command("worker.run.runner"), cwd=tmp_path, env={}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == "usage: python -m worker.run.runner ATTEMPT_FOLDER [RANK]\n"


def test_a_record_is_in_the_file_before_the_pipe_mentions_it(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    reporter = Reporter(tmp_path, pipe=PipeWriter(write_fd))
    reporter({"type": "sample", "kind": "step", "step": 12, "loss": float("nan")})
    kept = json.loads((tmp_path / "samples.jsonl").read_text())
    [heard] = PipeReader(read_fd).read(timeout_s=1)
    assert heard == {"type": "sample"}
    assert kept == {"kind": "step", "step": 12, "loss": None}
    reporter.close()
    os.close(read_fd)
    os.close(write_fd)


def test_a_torn_result_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"outcome": "succ')
    assert read_result(tmp_path) is None


def test_the_worker_process_never_imports_torch() -> None:
    program = (
        "import os, sys, django; os.environ['DJANGO_SETTINGS_MODULE'] = 'webapp.settings'; django.setup();"
        "import worker.app, worker.tasks, worker.supervisor, worker.reconciler;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_nothing_is_written_once_another_may_have_the_job(tmp_path: Path) -> None:
    class LeaseOver(Exception):
        """Stands for the end of the process."""

    def end() -> None:
        raise LeaseOver

    reporter = Reporter(tmp_path, pipe=None, check_lease=end)
    with pytest.raises(LeaseOver):
        reporter({"type": "sample", "kind": "step", "attempt": 1, "step": 1, "time_s": 0.0, "loss": 1.0})
    with pytest.raises(LeaseOver):
        reporter.result({"outcome": "succeeded"})
    reporter.close()
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("samples.jsonl", 0)]
