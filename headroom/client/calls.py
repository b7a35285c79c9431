"""The client's calls about models, datasets, machines, plans and jobs; with the others' it is the whole client."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

import httpx

from headroom.client import types
from headroom.client.access import AccessCalls
from headroom.client.chat import ChatCalls
from headroom.client.connection import (
    LONGEST_RETRY_S,
    ApiProblem,
    Row,
    ServiceUnreachable,
    StreamEvent,
    in_path,
    parse_events,
    unreachable,
)
from headroom.client.model_folder import is_weights, model_files, seen_files
from headroom.client.uploads import UploadCalls, send_files

FIRST_RETRY_S = 0.5
_UPLOADED_INSTEAD = {
    "path_not_allowed": "the service may not read this folder (HEADROOM_MODEL_ROOTS)",
    "path_differs": "the service runs on another machine",
}
_MOST_CANCELLED = 1000
"""Ids that one request takes."""
SILENCE_LIMIT_S = 45.0
"""A stream that sends nothing for this long, not even its keep-alive comment, is taken for dead."""


class HeadroomClient(AccessCalls, ChatCalls, UploadCalls):
    """Calls of ``/api/v1`` as one user. Use as a context manager, or call ``close``."""

    def me(self) -> types.Me:
        return cast(types.Me, self._json("GET", "me"))

    # Models and datasets.

    def models(self) -> list[types.Model]:
        return self._all_rows("models")

    def model(self, model_id: str) -> types.ModelDetails:
        return cast(types.ModelDetails, self._json("GET", f"models/{in_path(model_id)}"))

    def create_model(
        self, folder: Path, *, name: str, on_progress: Callable[[int, int], None] | None = None
    ) -> types.Model:
        """Upload a Hugging Face folder: config.json, and the tokenizer's files and weights where they are; or one GGUF file.

        on_progress: called with the bytes sent and the bytes in all. Raises FileNotFoundError.
        """
        files, root = model_files(folder), folder if folder.is_dir() else folder.parent
        made = send_files(self, "model", files, name=name, root=root, on_progress=on_progress)
        return cast(types.Model, made)

    def link_model(self, folder: Path, *, name: str) -> types.Model:
        """Have the service link a folder that it sees too; its weights stay there.

        Raises ApiProblem: ``path_not_allowed`` where it may not, ``path_differs`` where it sees another folder of that name.
        """
        fields = {"name": name, "path": str(folder.absolute()), "seen": json.dumps(seen_files(folder))}
        return cast(types.Model, self.post_files("models", [], **fields))

    def add_model(
        self, folder: Path, *, name: str, on_progress: Callable[[int, int], None] | None = None
    ) -> tuple[types.Model, str]:
        """Link the folder where the service may read it, upload it otherwise; and why it was uploaded, empty if it was linked."""
        if not any(is_weights(path) for path in model_files(folder)):
            return self.create_model(folder, name=name, on_progress=on_progress), "it holds no weights to be linked"
        try:
            return self.link_model(folder, name=name), ""
        except ApiProblem as problem:
            if problem.problem_code not in _UPLOADED_INSTEAD:
                raise
            return self.create_model(folder, name=name, on_progress=on_progress), _UPLOADED_INSTEAD[problem.problem_code]

    def fetch_model(self, reference: str, *, name: str = "") -> types.Upload:
        """Have the service fetch ``owner/name[@revision]`` from the hub; ``upload`` then says how far it is."""
        return cast(types.Upload, self.post_files("models", [], name=name, hub=reference))

    def create_model_from_job(self, job_id: str, *, name: str | None = None) -> types.Model:
        """Register a training run's weights as a model; ``name`` is the job's unless given. Hashing large files takes minutes."""
        body = {} if name is None else {"name": name}
        return cast(types.Model, self._json("POST", f"jobs/{in_path(job_id)}/model", json=body, timeout=None))

    def delete_model(self, model_id: str) -> types.Deleted:
        return cast(types.Deleted, self._json("DELETE", f"models/{in_path(model_id)}"))

    def restore_model(self, model_id: str) -> types.Model:
        return cast(types.Model, self._json("POST", f"models/{in_path(model_id)}/restore"))

    def model_cards(self, model_id: str) -> types.ModelCards:
        """On which cards it can be trained or run, as far as that is known."""
        return cast(types.ModelCards, self._json("GET", f"models/{in_path(model_id)}/cards"))

    def ask_for_model_cards(self, model_id: str) -> types.ModelCards:
        """Have a worker find out what is not known."""
        return cast(types.ModelCards, self._json("POST", f"models/{in_path(model_id)}/cards"))

    def datasets(self) -> list[types.Dataset]:
        return self._all_rows("datasets")

    def dataset(self, dataset_id: str) -> types.Dataset:
        return cast(types.Dataset, self._json("GET", f"datasets/{in_path(dataset_id)}"))

    def preview_dataset(self, dataset_id: str, *, model: str, sequence_length: int, loss_on: str) -> Row:
        """Show what training on it would learn with a model: samples with the parts that are learnt, lengths, what is cut."""
        asked = {"model": model, "sequence_length": sequence_length, "loss_on": loss_on}
        return self._json("GET", f"datasets/{in_path(dataset_id)}/preview", params=asked)

    def create_dataset(
        self,
        file: Path,
        *,
        name: str,
        purpose: Literal["text", "prompts"] = "text",
        columns: str = "",
        on_progress: Callable[[int, int], None] | None = None,
    ) -> types.Dataset:
        """columns: which column holds what, where that is not to be found, as ``prompt=ask, completion=reply``."""
        made = send_files(
            self, "dataset", [file], name=name, purpose=purpose, columns=columns, on_progress=on_progress
        )
        return cast(types.Dataset, made)

    def create_dataset_of_path(self, path: str, *, name: str, columns: str = "") -> types.Dataset:
        """Have the service copy a file of its own machine, or all dataset files of a folder as one."""
        return cast(types.Dataset, self.post_files("datasets", [], name=name, path=path, columns=columns))

    def correct_dataset(self, dataset_id: str, columns: dict[str, str] | None) -> types.Dataset:
        """Say which column holds what; None has them found by their names."""
        return cast(types.Dataset, self._json("PATCH", f"datasets/{in_path(dataset_id)}", json={"columns": columns}))

    def delete_dataset(self, dataset_id: str) -> types.Deleted:
        return cast(types.Deleted, self._json("DELETE", f"datasets/{in_path(dataset_id)}"))

    def restore_dataset(self, dataset_id: str) -> types.Dataset:
        return cast(types.Dataset, self._json("POST", f"datasets/{in_path(dataset_id)}/restore"))

    # Machines and plans.

    def machines(self) -> list[types.Machine]:
        return self._all_rows("machines")

    def machine(self, machine_id: str) -> types.MachineDetails:
        """With who holds its memory now, and how its runs were predicted."""
        return cast(types.MachineDetails, self._json("GET", f"machines/{in_path(machine_id)}"))

    def measure_links(self, machine_id: str) -> list[types.Link]:
        """Have the network to each other machine measured again; the links as they are now."""
        return cast(list[types.Link], self._json("POST", f"machines/{in_path(machine_id)}/links")["links"])

    def price_plans(
        self,
        spec: Row,
        *,
        wait_s: float = 300.0,
        on_wait: Callable[[], None] | None = None,
        on_remark: Callable[[str], None] | None = None,
    ) -> list[types.Offer]:
        """Offers for a spec. A model seen for the first time is profiled first; waits for that, ``wait_s`` at most.

        on_remark: called with each sentence on the network that a job over several machines is planned for.
        """
        answer = self._priced("plans", spec, wait_s=wait_s, on_wait=on_wait)
        for remark in answer.get("remarks", ()):
            if on_remark is not None:
                on_remark(remark)
        return cast(list[types.Offer], answer["offers"])

    def find_best_plan(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /plans/best``: the best plan for a goal, with frontier, bound and reasons."""
        return self._priced("plans/best", question, wait_s=wait_s)

    def rank_cards(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /plans/cards``: cards of the table, best first, to train or with ``kind: generation`` to generate."""
        return self._priced("plans/cards", question, wait_s=wait_s)

    def compare_plans(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /plans/compare``: plans side by side, of either kind, only what differs."""
        return self._priced("plans/compare", question, wait_s=wait_s)

    def price_change(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /plans/price``: a plan of either kind after one edit."""
        return self._priced("plans/price", question, wait_s=wait_s)

    def estimate(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /estimates``: what one plan takes, and where."""
        return self._priced("estimates", question, wait_s=wait_s)

    # Jobs.

    def create_job(self, spec: Row, *, plan_id: str | None = None, override: bool = False) -> types.Job:
        body: Row = {"spec": spec, "override": override}
        if plan_id is not None:
            body["plan_id"] = plan_id
        return cast(types.Job, self._json("POST", "jobs", json=body))

    def jobs(self, *, state: str | None = None, text: str | None = None, limit: int = 50) -> list[types.Job]:
        """Newest first, at most ``limit``."""
        query = {"state": state, "q": text, "page_size": min(limit, 100)}
        return self._all_rows("jobs", params={key: value for key, value in query.items() if value}, limit=limit)

    def job(self, job_id: str) -> types.Job:
        return cast(types.Job, self._json("GET", f"jobs/{in_path(job_id)}"))

    def compare_jobs(self, job_ids: Sequence[str]) -> types.Comparison:
        """Two to ten jobs side by side; the first is what the others are held against."""
        return cast(types.Comparison, self._json("GET", "compare", params={"jobs": ",".join(job_ids)}))

    def queue(self, *, page: int = 1) -> types.Queue:
        """List a page of the waiting jobs in order, each with its reason, and the jobs at work."""
        return cast(types.Queue, self._json("GET", "queue", params={"page": page}))

    def set_priority(self, job_id: str, priority: int) -> types.Job:
        """Higher starts first; above 0 for administrators."""
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/priority", json={"priority": priority}))

    def change_job(
        self, job_id: str, *, name: str | None = None, tags: list[str] | None = None, notes: str | None = None
    ) -> types.Job:
        """Change what is given; the rest stays."""
        given = {key: value for key, value in (("name", name), ("tags", tags), ("notes", notes)) if value is not None}
        return cast(types.Job, self._json("PATCH", f"jobs/{in_path(job_id)}", json=given))

    def delete_job(self, job_id: str) -> types.Job:
        """Delete a job that has ended; it can be restored for a week."""
        return cast(types.Job, self._json("DELETE", f"jobs/{in_path(job_id)}"))

    def restore_job(self, job_id: str) -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/restore"))

    def share_job(self, job_id: str) -> str:
        """Address under which anyone may read the run; the same again while it is shared."""
        return str(self._json("POST", f"jobs/{in_path(job_id)}/share")["url"])

    def unshare_job(self, job_id: str) -> None:
        self._request("DELETE", f"jobs/{in_path(job_id)}/share")

    def cancel_job(self, job_id: str, *, mode: Literal["save", "keep", "discard"] = "save") -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/cancel", json={"mode": mode}))

    def cancel_jobs(
        self,
        job_ids: Sequence[str] = (),
        *,
        states: Sequence[str] = (),
        tag: str = "",
        mode: Literal["save", "keep", "discard"] = "save",
    ) -> list[types.Cancelled]:
        """Ask for the end of many jobs: those named, or all of yours in these states and with this tag that have not ended.

        Returns an answer for each. Not undone where a later request of several fails: up to 1,000 go into one.
        """
        results: list[types.Cancelled] = []
        chosen = [{"ids": list(job_ids[start : start + _MOST_CANCELLED])} for start in range(0, len(job_ids), _MOST_CANCELLED)]
        for part in chosen:
            results += self._json("POST", "jobs/cancel", json={**part, "mode": mode})["results"]
        if not job_ids:
            asked = {"mode": mode, **({"state": list(states)} if states else {}), **({"tag": tag} if tag else {})}
            results += self._json("POST", "jobs/cancel", json=asked)["results"]
        return results

    def pause_job(self, job_id: str) -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/pause"))

    def resume_job(self, job_id: str) -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/resume"))

    def retry_job(self, job_id: str) -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/retry"))

    def export_job(self, job_id: str, *, step: int | None = None, export: Row | None = None) -> types.Job:
        """Write the weights of a checkpoint, the newest unless ``step`` is given, by a job of its own.

        export: fields of ``workload.export``; the job's own unless given.
        """
        body = {key: value for key, value in {"step": step, "export": export}.items() if value is not None}
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/export", json=body))

    def metrics(self, job_id: str, *, max_points: int | None = None) -> types.Metrics:
        params = {"max_points": max_points} if max_points else {}
        return cast(types.Metrics, self._json("GET", f"jobs/{in_path(job_id)}/metrics", params=params))

    def events(self, job_id: str) -> list[types.JobEvent]:
        """Every move of the job, in order."""
        return self._all_rows(f"jobs/{in_path(job_id)}/events")

    def logs(self, job_id: str) -> str:
        return self._request("GET", f"jobs/{in_path(job_id)}/logs").text

    def artifacts(self, job_id: str) -> list[types.Artifact]:
        return self._all_rows(f"jobs/{in_path(job_id)}/artifacts")

    def checkpoints(self, job_id: str) -> list[types.Checkpoint]:
        return self._all_rows(f"jobs/{in_path(job_id)}/checkpoints")

    def attempts(self, job_id: str) -> list[types.Attempt]:
        """The line of attempts, in order: each with its plan, its end and, where memory ran out, the cause."""
        return self._all_rows(f"jobs/{in_path(job_id)}/attempts")

    def download_artifact(self, artifact_id: str, *, file: Path) -> None:
        """Into ``file`` by way of a neighbour that is renamed when whole."""
        partial = file.with_name(f".{file.name}.part")
        try:
            with self._stream("GET", f"artifacts/{in_path(artifact_id)}/download") as response, partial.open("wb") as out:
                for chunk in response.iter_bytes():
                    out.write(chunk)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def follow_job(self, job_id: str, *, max_lost: int | None = None) -> Iterator[StreamEvent]:
        """The job's events until its end. A broken connection is resumed after the last event seen.

        max_lost: give up with ServiceUnreachable after this many failures in a row; None never gives up.
        """
        last_id, num_lost = "", 0
        while True:
            try:
                for event in self._events_once(job_id, last_id=last_id):
                    last_id, num_lost = event.id or last_id, 0
                    yield event
                    if _is_last(event):
                        return
            except (httpx.TransportError, ServiceUnreachable) as error:
                num_lost += 1
                if max_lost is not None and num_lost >= max_lost:
                    raise unreachable(self.url, error) from error
            except ApiProblem as error:
                if error.status < 500 and error.status != 429:
                    raise
                num_lost += 1
            yield StreamEvent(kind="lost", data={"num_lost": num_lost})
            time.sleep(min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** max(0, num_lost - 1)))

    def _events_once(self, job_id: str, *, last_id: str) -> Iterator[StreamEvent]:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        timeout = httpx.Timeout(SILENCE_LIMIT_S)
        with self._stream("GET", f"jobs/{in_path(job_id)}/events", headers=headers, timeout=timeout) as response:
            yield from parse_events(response.iter_lines())


def _is_last(event: StreamEvent) -> bool:
    if event.kind == "snapshot":
        return bool(event.data.get("job", event.data).get("is_terminal"))
    return event.kind == "done"
