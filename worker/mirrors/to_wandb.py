"""Copies a run to Weights & Biases. The library reads its own variables: WANDB_API_KEY, WANDB_BASE_URL, WANDB_ENTITY,
WANDB_PROJECT, WANDB_MODE and others.

Nothing of the machine goes out beside the measurements: no console, no code, no git, no statistics of the system.
"""

import os
from collections.abc import Sequence

# before the import: else faults of the library are reported to its makers, whatever server is named
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from worker.mirrors.mirror import Run
from worker.mirrors.scalars import Scalars

OPEN_WITHIN_S = 30
FINISH_WITHIN_S = 45
_EXIT_CODES = {"succeeded": 0, "failed": 1, "cancelled": 255}
_STEP = "step"


class ToWandb:
    """A run there, named by the job's id."""

    def __init__(self, run: Run) -> None:
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            finish_timeout=FINISH_WITHIN_S,
            finish_timeout_raises=True,
            init_timeout=OPEN_WITHIN_S,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "headroom",
                id=run.id,
                name=run.name,
                notes=run.url,
                config=dict(run.config),
                dir=run.folder,
                resume="allow",
                settings=settings,
            )
        except Exception:
            wandb.teardown()  # its helper process else holds the run's id, and refuses every later try with "is in use"
            raise
        # its own counter only grows, and an attempt that resumes measures steps again
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        self.url = str(self._run.url or "")

    def log(self, events: Sequence[Scalars]) -> None:
        """Handed to a process of the library, which sends and tries again by itself."""
        for time_s, step, values in events:
            self._run.log({**values, _STEP: step, "_timestamp": time_s})

    def finish(self, ending: str) -> None:
        if not ending:
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES.get(ending, 1))
