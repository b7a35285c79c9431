"""Copies a run to an MLflow tracking server. The library reads its own variables: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN or
_USERNAME and _PASSWORD, MLFLOW_EXPERIMENT_NAME and others.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

# before the import: by itself it tries for minutes
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
# else its use is reported to its makers, whatever server is named
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from worker.mirrors.mirror import Run
from worker.mirrors.scalars import Scalars

_JOB_TAG = "headroom.job"
_STATUSES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
_MAX_METRICS = 1000
_MAX_PARAMS = 100
"""In one call of the server."""

T = TypeVar("T")


class ToMlflow:
    """A run there, found again by a tag with the job's id."""

    def __init__(self, run: Run) -> None:
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if not server:
            raise ValueError("MLFLOW_TRACKING_URI is not set on this worker; it names the tracking server")
        self._client = MlflowClient(tracking_uri=server)
        experiment_id = self._find_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "headroom")
        found = self._client.search_runs([experiment_id], filter_string=f"tags.`{_JOB_TAG}` = '{run.id}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        there = found[0] if found else self._begin(run, experiment_id)
        self._run_id = str(there.info.run_id)
        if not there.data.params:  # they cannot change; a run that an error met just after its beginning has none
            self._describe(run)
        is_web = server.startswith(("http://", "https://"))
        self.url = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs/{self._run_id}" if is_web else ""

    def log(self, events: Sequence[Scalars]) -> None:
        metrics = (
            Metric(name, value, round(time_s * 1000), step)
            for time_s, step, values in events
            for name, value in values.items()
        )
        for batch in _batches(metrics, _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def finish(self, ending: str) -> None:
        if ending:
            self._client.set_terminated(self._run_id, status=_STATUSES[ending])
        else:
            self._client.update_run(self._run_id, status="SCHEDULED")

    def _find_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _begin(self, run: Run, experiment_id: str) -> Any:
        tags = {_JOB_TAG: run.id, "headroom.url": run.url}
        return self._client.create_run(experiment_id, run_name=run.name, tags=tags)

    def _describe(self, run: Run) -> None:
        for batch in _batches((Param(name, str(value)) for name, value in run.config.items()), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=batch)


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
