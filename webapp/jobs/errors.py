"""Requests that a job's present state does not allow.

HeadroomError
└── JobConflict        the API answers 409
    ├── WrongState     the job's state does not allow the request
    ├── NoModelLeft    the job left no whole model
    ├── NoCheckpoint   the job has none of that step on the disk
    ├── FilesLost      what the job left is gone from the disk, or is not what it was
    └── PlanDoesNotFit the plan was priced over its budget, and the caller did not insist
"""

from optimizer.base.errors import HeadroomError


class JobConflict(HeadroomError):
    """The request is well formed; the present state of the job or plan forbids it."""

    code = "conflict"


class WrongState(JobConflict):
    """Names the request, the state and the states that allow it."""

    code = "wrong_state"

    def __init__(self, request: str, *, job_id: str, state: str, allowed: str) -> None:
        super().__init__(
            f"cannot {request} job {job_id}: it is {state}; allowed: {allowed}",
            hint="Read the job again; it may have moved on.",
            job_id=job_id,
            state=state,
            allowed=allowed,
        )


class NoModelLeft(JobConflict):
    """Nothing among its files is a model by itself."""

    code = "no_model"


class NoCheckpoint(JobConflict):
    """Names the steps of those that are there."""

    code = "no_checkpoint"


class FilesLost(JobConflict):
    """Names the file."""

    code = "files_lost"

    def __init__(self, message: str, *, job_id: str, name: str) -> None:
        hint = "What is left can be downloaded; for the rest train it again: clone the job."
        super().__init__(message, hint=hint, job_id=job_id, name=name)


class PlanDoesNotFit(JobConflict):
    """The plan's predicted peak is over the budget."""

    code = "does_not_fit"
