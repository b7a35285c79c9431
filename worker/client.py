"""A typed client of the REST API, for the command line, the demo and people's own scripts.

It knows addresses, problem documents and the event stream; it draws nothing and decides nothing. Answers are the API's own, typed
by ``client_types.py``. Files of more than a piece go up in pieces: what a cut leaves is gone on from, also by a later process.
"""

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, cast

import httpx

from optimizer.errors import HeadroomError
from worker import client_types as types
from worker.client_access import AccessCalls, in_path
from worker.client_uploads import send_files

Row = dict[str, Any]

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 10.0
PRICE_LIMIT_S = 600.0
"""All cards of the table for a deep model take minutes."""
SILENCE_LIMIT_S = 45.0
"""A stream that sends nothing for this long, not even its keep-alive comment, is taken for dead."""


class ApiProblem(HeadroomError):
    """The service answered with an error; ``problem_code`` is stable, ``problem_fields`` name what was wrong."""

    code: ClassVar[str] = "api_problem"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        problem_code: str,
        hint: str = "",
        problem_fields: Sequence[Row] = (),
        extra: Row | None = None,
    ) -> None:
        super().__init__(message, hint=hint, status=status, problem_code=problem_code)
        self.status = status
        self.problem_code = problem_code
        self.problem_fields = list(problem_fields)
        self.extra = extra or {}


class ServiceUnreachable(HeadroomError):
    """Nothing answers at the address."""

    code: ClassVar[str] = "service_unreachable"


class JobTooSlow(HeadroomError):
    """Something was awaited longer than its limit."""

    code: ClassVar[str] = "wait_limit"


@dataclass(frozen=True, kw_only=True)
class StreamEvent:
    """One message of a job's event stream."""

    kind: str
    """snapshot, sample, state, log, checkpoint, done; ``lost`` when the connection broke and is being resumed."""
    data: Row
    id: str = ""
    """Where to resume after; empty for messages that are not part of the stream."""


class HeadroomClient(AccessCalls):
    """Calls of ``/api/v1`` as one user. Use as a context manager, or call ``close``."""

    def __init__(
        self,
        url: str,
        *,
        token: str,
        project: str = "",
        timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """project: id or name of the one to work in: only its rows are seen, and what is made goes there."""
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={
                "Authorization": f"Bearer {token}",
                "Accept": "application/json",
                **({"Headroom-Project": project} if project else {}),
            },
            timeout=timeout_s,
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def me(self) -> types.Me:
        return cast(types.Me, self._json("GET", "me"))

    # Models and datasets.

    def models(self) -> list[types.Model]:
        return self._all_rows("models")

    def model(self, model_id: str) -> types.ModelDetails:
        return cast(types.ModelDetails, self._json("GET", f"models/{in_path(model_id)}"))

    def create_model(
        self, folder: Path, *, name: str, on_progress: "Callable[[int, int], None] | None" = None
    ) -> types.Model:
        """Upload a Hugging Face folder: config.json, and tokenizer.json and safetensors where they are.

        on_progress: called with the bytes sent and the bytes in all.
        """
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} holds no config.json")
        parts = [folder / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json")]
        weights = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.safetensors.index.json"))]
        files = [*(path for path in parts if path.is_file()), *weights]
        made = send_files(self, "model", files, name=name, on_progress=on_progress)
        return cast(types.Model, made)

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

    def create_dataset(
        self,
        file: Path,
        *,
        name: str,
        purpose: Literal["text", "prompts"] = "text",
        on_progress: "Callable[[int, int], None] | None" = None,
    ) -> types.Dataset:
        made = send_files(self, "dataset", [file], name=name, purpose=purpose, on_progress=on_progress)
        return cast(types.Dataset, made)

    def delete_dataset(self, dataset_id: str) -> types.Deleted:
        return cast(types.Deleted, self._json("DELETE", f"datasets/{in_path(dataset_id)}"))

    def restore_dataset(self, dataset_id: str) -> types.Dataset:
        return cast(types.Dataset, self._json("POST", f"datasets/{in_path(dataset_id)}/restore"))

    # Uploads in pieces; ``create_model`` and ``create_dataset`` use them.

    def uploads(self) -> list[types.Upload]:
        """Those that are not finished."""
        return self._all_rows("uploads")

    def upload(self, upload_id: str) -> types.Upload:
        return cast(types.Upload, self._json("GET", f"uploads/{in_path(upload_id)}"))

    def begin_upload(self, kind: str, files: Sequence[Row], *, name: str, purpose: str = "text") -> types.Upload:
        body = {"kind": kind, "name": name, "purpose": purpose, "files": list(files)}
        return cast(types.Upload, self._json("POST", "uploads", json=body))

    def send_piece(self, upload_id: str, number: int, piece: bytes, *, offset_bytes: int) -> int:
        """How many bytes of the file are there then."""
        headers = {"X-Piece-SHA256": hashlib.sha256(piece).hexdigest(), "Content-Type": "application/octet-stream"}
        path = f"uploads/{in_path(upload_id)}/files/{number}"
        answer = self._json("PUT", path, params={"offset": offset_bytes}, content=piece, headers=headers, timeout=120)
        return int(answer["received_bytes"])

    def finish_upload(self, upload_id: str) -> Row:
        """The model or dataset that it becomes. Checking a large file takes minutes."""
        return self._json("POST", f"uploads/{in_path(upload_id)}/finish", timeout=None)

    def drop_upload(self, upload_id: str) -> None:
        self._request("DELETE", f"uploads/{in_path(upload_id)}")

    # Machines and plans.

    def machines(self) -> list[types.Machine]:
        return self._all_rows("machines")

    def machine(self, machine_id: str) -> types.MachineDetails:
        """With who holds its memory now, and how its runs were predicted."""
        return cast(types.MachineDetails, self._json("GET", f"machines/{in_path(machine_id)}"))

    def price_plans(
        self, spec: Row, *, wait_s: float = 300.0, on_wait: Callable[[], None] | None = None
    ) -> list[types.Offer]:
        """Offers for a spec. A model seen for the first time is profiled first; waits for that, ``wait_s`` at most."""
        return cast(list[types.Offer], self._priced("plans", spec, wait_s=wait_s, on_wait=on_wait)["offers"])

    def find_best_plan(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /plans/best``: the best plan for a goal, with frontier, bound and reasons."""
        return self._priced("plans/best", question, wait_s=wait_s)

    def rank_cards(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /plans/cards``: cards of the table, best first."""
        return self._priced("plans/cards", question, wait_s=wait_s)

    def compare_plans(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /plans/compare``: plans side by side, only what differs."""
        return self._priced("plans/compare", question, wait_s=wait_s)

    def price_change(self, question: Row, *, wait_s: float = 300.0) -> Row:
        """``POST /plans/price``: a plan after one edit."""
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

    def queue(self) -> types.Queue:
        """What waits, in order and why, and what is at work."""
        return cast(types.Queue, self._json("GET", "queue"))

    def set_priority(self, job_id: str, priority: int) -> types.Job:
        """Higher starts first; above 0 for administrators."""
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/priority", json={"priority": priority}))

    def cancel_job(self, job_id: str, *, mode: Literal["save", "discard"] = "save") -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/cancel", json={"mode": mode}))

    def pause_job(self, job_id: str) -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/pause"))

    def resume_job(self, job_id: str) -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/resume"))

    def retry_job(self, job_id: str) -> types.Job:
        return cast(types.Job, self._json("POST", f"jobs/{in_path(job_id)}/retry"))

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
                    raise _unreachable(self.url, error) from error
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

    def post_files(self, path: str, named: Sequence[tuple[str, Path]], **fields: str) -> Row:
        """In one request, as a form; for what is small."""
        with ExitStack() as opened:
            files = [(field, (file.name, opened.enter_context(file.open("rb")))) for field, file in named]
            return _document_of(self._request("POST", path, data=fields, files=files, timeout=None))

    def _priced(self, path: str, question: Row, *, wait_s: float, on_wait: Callable[[], None] | None = None) -> Row:
        """Asked again while the model is being profiled."""
        deadline = time.monotonic() + wait_s
        while True:
            response = self._request("POST", path, json=question, timeout=PRICE_LIMIT_S)
            if response.status_code != 202:
                return _document_of(response)
            if time.monotonic() > deadline:
                raise JobTooSlow(
                    f"the model is still not profiled after {wait_s:.0f} s",
                    hint="Is a worker running? See: headroom machines",
                )
            if on_wait:
                on_wait()
            time.sleep(_retry_after_s(response))

    def _all_rows(self, path: str, *, params: Row | None = None, limit: int | None = None) -> list[Any]:
        document = self._json("GET", path, params=params or {})
        rows: list[Any] = list(document["results"])
        while document.get("next") and (limit is None or len(rows) < limit):
            document = self._json("GET", document["next"])
            rows += document["results"]
        return rows[:limit]

    def _json(self, method: str, path: str, **arguments: Any) -> Row:
        return _document_of(self._request(method, path, **arguments))

    def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            headers = {**_write_headers(method), **arguments.pop("headers", {})}
            response = self._http.request(method, path, headers=headers, **arguments)
        except httpx.TransportError as error:
            raise _unreachable(self.url, error) from error
        if response.is_success:
            return response
        raise problem_of(response)

    def _stream(self, method: str, path: str, **arguments: Any) -> "_CheckedStream":
        return _CheckedStream(self._http.stream(method, path, **arguments))


class _CheckedStream:
    """A streamed answer whose error, if it is one, is read and raised on entry."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> httpx.Response:
        response: httpx.Response = self._stream.__enter__()
        if not response.is_success:
            response.read()
            self._stream.__exit__(None, None, None)
            raise problem_of(response)
        return response

    def __exit__(self, *exc: object) -> None:
        self._stream.__exit__(*exc)


def parse_events(lines: Iterator[str]) -> Iterator[StreamEvent]:
    """Server-sent events, as far as this API uses them: event, id, and data that is JSON; comments are dropped."""
    kind, last_id = "", ""
    data: list[str] = []
    for line in lines:
        if line.startswith(":"):
            continue
        if not line:
            if data:
                yield _event_of(kind, last_id=last_id, data="\n".join(data))
            kind, last_id, data = "", "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "id":
            last_id = value
        elif field == "data":
            data.append(value)


def problem_of(response: httpx.Response) -> ApiProblem:
    """The error an unsuccessful answer stands for, problem document or not."""
    try:
        document = response.json()
    except ValueError:
        document = {}
    if not isinstance(document, dict):
        document = {}
    return ApiProblem(
        str(document.get("detail") or document.get("title") or f"the service answered {response.status_code}"),
        status=response.status_code,
        problem_code=str(document.get("code") or f"http_{response.status_code}"),
        hint=str(document.get("hint") or ""),
        problem_fields=document.get("fields") or [],
        extra=document.get("extra") or {},
    )


def _document_of(response: httpx.Response) -> Row:
    """A success's JSON object; what answers otherwise is not this service."""
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ApiProblem(
            f"{response.url} does not answer as Headroom does",
            status=response.status_code,
            problem_code="not_headroom",
            hint="Is the address that of a Headroom service?",
        )
    return document


def _event_of(kind: str, *, last_id: str, data: str) -> StreamEvent:
    document = json.loads(data)
    if not isinstance(document, dict):
        document = {"value": document}
    kind = kind or str(document.get("type", "message"))
    if set(document) == {"type", "data"}:  # an entry of the wire, sent on as it is
        document = document["data"]
    return StreamEvent(kind=kind, data=document, id=last_id)


def _is_last(event: StreamEvent) -> bool:
    if event.kind == "snapshot":
        return bool(event.data.get("job", event.data).get("is_terminal"))
    return event.kind == "done"


def _retry_after_s(response: httpx.Response) -> float:
    given = response.headers.get("Retry-After", "")
    return min(LONGEST_RETRY_S, float(given)) if given.isdigit() and given != "0" else 1.0


def _write_headers(method: str) -> dict[str, str]:
    """A key of its own for each write, so that a repeat by a proxy or a retry makes nothing twice."""
    return {"Idempotency-Key": uuid.uuid4().hex} if method == "POST" else {}


def _unreachable(url: str, error: Exception) -> ServiceUnreachable:
    return ServiceUnreachable(f"nothing answers at {url} ({error})", hint="Start it with: headroom up")
