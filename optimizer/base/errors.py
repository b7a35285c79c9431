"""The errors a user can cause or meet. A fault of the program itself stands outside this tree.

HeadroomError
├── InvalidInput              a field of the request is wrong; names the field, the value, what is allowed
│   ├── InvalidModel          config, weights or tokenizer
│   │   └── UnsupportedModelType
│   ├── InvalidDataset
│   ├── InvalidWorkload
│   └── InvalidPlan
├── NoFeasiblePlan            nothing fits; carries the smallest budget that would
├── NotProfiled               a partial profile lacks the part that is asked for
├── ProfilingFailed           the process that traces a model ended without an answer
├── PlanStale                 the plan no longer holds on this machine
├── MissingExtra              an optional package is needed
├── OutOfMemory
│   ├── OutOfDeviceMemory     carries the bytes by category at that moment
│   └── OutOfHostMemory
├── DiskFull
├── MachineFault              a card, its driver or the system fails, whatever the job does
├── RemoteStoreFull
├── RemoteStoreLost           gone, restarted or refusing
├── RankLost                  another process of the same run ended, or does not answer
├── RanksDiffer               processes of one run that do not do the same
├── SharedMemoryRefused       the system gives processes no memory in common
├── LossNotFinite
├── CheckpointInvalid
└── ExportInvalid             what was written is not what was trained

Each error has a ``code`` (stable, snake case, also the job's ``reason`` where one exists), ``fields`` (JSON-able facts)
and a ``hint`` (what to do). The message says what was asked, what was found, and the limit.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, ClassVar

from optimizer.base.units import format_bytes

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_SYSTEM_ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE)
_NO_THREAD = "can't start new thread"
_DEVICE_FAULTS = (
    # the CUDA runtime's, by cudaGetErrorString. Not those that a kernel causes: illegal accesses, asserts, launch failures.
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "no CUDA-capable device is detected",
    "busy or unavailable",
    "invalid device ordinal",
    "CUDA error: unknown error",
    "CUDA error: initialization error",
    "CUDA driver version is insufficient for CUDA runtime version",
    "system not yet initialized",
    "system has unsupported display driver / cuda driver combination",
    "forward compatibility was attempted on non supported HW",
    "MPS client failed to connect",
    # torch's own, c10/cuda/CUDAFunctions.cpp and torch/csrc/cuda/Module.cpp
    "CUDA unknown error",
    "CUDA driver initialization failed",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver on your system",
    "The NVIDIA driver on your system is too old",
    "Unexpected error from cudaGetDeviceCount()",
)


class HeadroomError(Exception):
    """Base of the tree. ``str(error)`` is the message for people, without the hint."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, hint: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields: dict[str, Any] = fields

    def to_json(self) -> dict[str, Any]:
        """JSON-able form that crosses processes: code, message, hint, fields."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "fields": self.fields}


class InvalidInput(HeadroomError):
    """One field of what was submitted is wrong."""

    code = "invalid_input"

    def __init__(self, message: str, *, field: str, value: Any = None, allowed: Any = None, hint: str = "") -> None:
        super().__init__(message, hint=hint, field=field, value=value, allowed=allowed)


class InvalidModel(InvalidInput):
    """A model's config, weights or tokenizer cannot be used."""

    code = "bad_model"


class UnsupportedModelType(InvalidModel):
    """The config names an architecture that is not supported."""

    code = "unsupported_model_type"

    def __init__(self, model_type: str, *, supported: Sequence[str]) -> None:
        super().__init__(
            f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(supported))}",
            field="model_type",
            value=model_type,
            allowed=sorted(supported),
            hint="Submit a config.json with one of the supported model types.",
        )


class InvalidDataset(InvalidInput):
    """A dataset file cannot be read as text."""

    code = "bad_dataset"


class InvalidWorkload(InvalidInput):
    """A number of the workload or goal is out of range."""

    code = "invalid_workload"


class InvalidPlan(InvalidInput):
    """A plan contradicts itself, the model or the workload."""

    code = "invalid_plan"


class NoFeasiblePlan(HeadroomError):
    """Nothing that may be decided makes the job fit."""

    code = "no_feasible_plan"

    def __init__(
        self,
        *,
        budget_bytes: int,
        smallest_feasible_bytes: int,
        bytes_by_category: Mapping[str, int],
        hint: str = "",
        short_of: Sequence[str] = (),
    ) -> None:
        """short_of: sentences on what else is too small; with room on the device the message is about these."""
        parts = sorted(bytes_by_category.items(), key=lambda item: -item[1])[:3]
        listed = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts)
        message, raised = (
            f"memory budget {format_bytes(budget_bytes)} is under the smallest feasible peak "
            f"{format_bytes(smallest_feasible_bytes)} ({listed})"
        ), "the budget"
        if is_elsewhere := smallest_feasible_bytes <= budget_bytes and bool(short_of):
            message, raised = f"the device has room, but {'; '.join(short_of)}", "the budget that is too small"
        super().__init__(
            message,
            hint=hint or f"Raise {raised}, shorten the sequence, or allow more techniques.",
            budget_bytes=budget_bytes,
            smallest_feasible_bytes=smallest_feasible_bytes,
            bytes_by_category=dict(bytes_by_category),
            short_of=list(short_of) if is_elsewhere else [],
        )

    @property
    def in_short(self) -> str:
        """Words for one way among several that nothing fits in."""
        if self.fields["short_of"]:
            return f"nothing fits: {self.message}"
        return f"nothing fits; the smallest peak is {format_bytes(int(self.fields['smallest_feasible_bytes']))}"


class NotProfiled(HeadroomError):
    """A partial profile does not hold the part that is asked for."""

    code = "not_profiled"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"this profile is partial and does not hold {what}",
            hint="Profile the model again with a larger extent, or without an extent to cover everything.",
            what=what,
        )


class ProfilingFailed(HeadroomError):
    """The process that traces a model was killed, or broke."""

    code = "profiling_failed"

    def __init__(self, *, exit_code: int, last_line: str) -> None:
        how = f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with code {exit_code}"
        super().__init__(
            f"the process that traces the model {how}{f': {last_line[:300]}' if last_line else ''}",
            hint="Signal 9 usually means that memory ran out. Otherwise check that torch and transformers can be imported.",
            exit_code=exit_code,
        )


class PlanStale(HeadroomError):
    """The plan was made for a model, machine or version that has changed since."""

    code = "plan_stale"


class MissingExtra(HeadroomError):
    """A plan needs an optional package that is not installed."""

    code = "missing_extra"

    def __init__(self, package: str, *, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed",
            hint=f"pip install 'headroom[{package}]'",
            package=package,
        )


class BlockNotCompiled(HeadroomError):
    """A plan compiles the model's blocks, and one of them cannot be."""

    code = "block_not_compiled"

    def __init__(self, block: str, why: str) -> None:
        super().__init__(
            f"the plan compiles the model's blocks, and {block} cannot be compiled: {why}",
            hint="Choose kernels.blocks=memory_saving, which compiles nothing; on the CPU compiling needs a C++ compiler (g++).",
            block=block,
        )


class OutOfMemory(HeadroomError):
    """A tier has no room for the requested bytes."""

    code = "out_of_memory"
    tier: ClassVar[str] = "memory"

    def __init__(
        self,
        *,
        requested_bytes: int,
        in_use_bytes: int,
        budget_bytes: int,
        bytes_by_category: Mapping[str, int],
        moment: str = "",
        category: str = "temporaries",
        slack_bytes: int = 0,
        moments: Mapping[str, int] | None = None,
        hint: str = "",
    ) -> None:
        """category: of the request. slack_bytes: that the allocator had taken of the tier and that nobody used. moments: most
        bytes at the moments that came just before.
        """
        listed = ", ".join(
            f"{name.replace('_', ' ')} {format_bytes(size)}"
            for name, size in sorted(bytes_by_category.items(), key=lambda item: -item[1])
            if size
        )
        when = f" {moment}" if moment else ""
        over_bytes = in_use_bytes + requested_bytes - budget_bytes
        super().__init__(
            f"{self.tier} memory ran out{when}: {format_bytes(requested_bytes)} more were needed, "
            f"{format_bytes(in_use_bytes)} of {format_bytes(budget_bytes)} were in use{f' ({listed})' if listed else ''}; "
            f"{format_bytes(over_bytes)} too little",
            hint=hint or "Choose a plan that fits, raise the budget, or lower the micro-batch.",
            tier=self.tier,
            requested_bytes=requested_bytes,
            in_use_bytes=in_use_bytes,
            budget_bytes=budget_bytes,
            bytes_by_category=dict(bytes_by_category),
            moment=moment,
            category=category,
            slack_bytes=slack_bytes,
            moments=dict(moments or {}),
        )


class OutOfDeviceMemory(OutOfMemory):
    """The device tier is full: the cap on the CPU device, the card or its cap on CUDA."""

    code = "out_of_device_memory"
    tier = "device"


class OutOfHostMemory(OutOfMemory):
    """The host tier is full."""

    code = "out_of_host_memory"
    tier = "host"


class DiskFull(HeadroomError):
    """A write found no room, or a disk that fails; nothing half-written is left behind."""

    code = "disk_full"

    @classmethod
    def behind(cls, error: BaseException) -> "DiskFull | None":
        """Makes one of a file system's error where the disk is to blame; None for any other error. Names no folder."""
        if not isinstance(error, OSError) or error.errno not in _DISK_ERRORS:
            return None
        name = PurePath(error.filename).name if isinstance(error.filename, str) else ""
        hint = "The job goes on from its checkpoint once the disk can be written."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return cls("the disk is full: no room" + (f" for {name}" if name else ""), hint=hint)
        return cls("the disk fails" + (f" at {name}" if name else "") + f": {os.strerror(error.errno)}", hint=hint)


class MachineFault(HeadroomError):
    """The machine fails, and would fail any other job; ``fields`` name it."""

    code = "machine_fault"

    def __init__(self, what: str, *, machine: str, look_at: str) -> None:
        super().__init__(
            f"a fault of {machine or 'the machine'} and not of the job: {what}; look at {look_at} there",
            hint="The job is tried again by itself, from its checkpoint, ever more seldom until the machine works again.",
            machine=machine,
        )

    @classmethod
    def behind_device(cls, error: BaseException, *, machine: str) -> "MachineFault | None":
        """Makes one of an error of CUDA where the card or its driver is to blame, and None of one that a kernel caused."""
        # torch.AcceleratorError is a RuntimeError, and the other is raised where CUDA is initialized late
        if not isinstance(error, RuntimeError) and type(error).__name__ != "DeferredCudaCallError":
            return None
        text = str(error)
        found = next((fault for fault in _DEVICE_FAULTS if fault in text), None)
        if found is None:
            return None
        what = f"its card or the driver fails ({found.removeprefix('CUDA error: ')})"
        return cls(what, machine=machine, look_at="nvidia-smi and the kernel's log")

    @classmethod
    def behind_system(cls, error: BaseException, *, machine: str) -> "MachineFault | None":
        """Makes one of what the system refuses to the process that looks after jobs; None for any other error."""
        look_at = "the limits of processes and open files, the memory and the folder HEADROOM_HOME"
        if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
            return cls("it starts no more threads", machine=machine, look_at=look_at)
        if not isinstance(error, OSError) or error.errno not in _SYSTEM_ERRORS:
            return None
        return cls(f"it starts no process or opens no file ({os.strerror(error.errno)})", machine=machine, look_at=look_at)


class RemoteStoreFull(HeadroomError):
    """The store of the remote tier takes no more."""

    code = "remote_store_full"


class RemoteStoreLost(HeadroomError):
    """The store of the remote tier does not answer, refuses, or has lost what was written to it."""

    code = "remote_store_lost"


class RankLost(HeadroomError):
    """Another rank of the same run ended, or did not answer in time; its own error says why."""

    code = "rank_lost"

    def __init__(self, *, rank: int, num_ranks: int, waiting_for: str, waited_s: float, cause: str) -> None:
        """rank: the one that noticed. cause: the library's own words, shortened."""
        super().__init__(
            f"another rank was lost: rank {rank} of {num_ranks} waited {waited_s:.1f} s for {waiting_for}, "
            f"which needs all of them ({cause[:300]})",
            hint="Look at the error of the rank that ended first; the job goes on from its last checkpoint.",
            rank=rank,
            num_ranks=num_ranks,
            waiting_for=waiting_for,
            waited_s=waited_s,
        )


class RanksDiffer(HeadroomError):
    """The ranks of a run do not do the same, so that what they send each other would not belong together."""

    code = "ranks_differ"


class SharedMemoryRefused(HeadroomError):
    """The ranks of a run cannot have one copy of the weights that stream: the system refuses memory that processes share."""

    code = "shared_memory_refused"


class LossNotFinite(HeadroomError):
    """The loss became NaN or infinite."""

    code = "loss_not_finite"


class CheckpointInvalid(HeadroomError):
    """A checkpoint's manifest does not verify."""

    code = "checkpoint_invalid"


class ExportInvalid(HeadroomError):
    """An exported file, read again, is not what was trained."""

    code = "export_invalid"
