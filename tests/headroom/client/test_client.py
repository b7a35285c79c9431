"""The API client against a real HTTP server on loopback that answers as the service does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headroom.client import ApiProblem, HeadroomClient, ServiceUnreachable, calls, parse_events


class Server:
    """Answers from a table of (method, path) to functions; remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[Any, Any] = {}
        self.requests: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.requests.append((self.command, self.path, dict(self.headers), body))
                outer.answers[(self.command, self.path.partition("?")[0])](self)

            do_GET = do_POST = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(
        self,
        method: str,
        path: str,
        *,
        status: int = 200,
        document: dict[str, Any] | None = None,
        raw: bytes | None = None,
        kind: str = "application/json",
        headers: list[tuple[str, str]] | tuple[Any, ...] = (),
    ) -> None:
        def send(handler: BaseHTTPRequestHandler) -> None:
            body = raw if raw is not None else json.dumps(document).encode()
            handler.send_response(status)
            for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)

        self.answers[(method, path)] = send

    def stop(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[HeadroomClient]:
    with HeadroomClient(server.url, token="tok") as client:
        yield client


def sse(*messages: Any) -> bytes:
    lines = []
    for event, event_id, data in messages:
        lines.append(f"event: {event}\n" + (f"id: {event_id}\n" if event_id else "") + f"data: {json.dumps(data)}\n\n")
    return "".join(lines).encode()


def test_a_call_carries_the_token_and_returns_the_row(server: Server, client: HeadroomClient) -> None:
    server.answer("GET", "/api/v1/jobs/job_1", document={"id": "job_1"})
    assert dict(client.job("job_1")) == {"id": "job_1"}
    assert server.requests[0][2]["Authorization"] == "Bearer tok"


def test_a_problem_becomes_an_exception_with_code_fields_and_hint(server: Server, client: HeadroomClient) -> None:
    problem = {
        "title": "Bad request",
        "detail": "workload.num_steps is 0; allowed: 1 or more",
        "code": "invalid_workload",
        "hint": "Give at least one step.",
        "fields": [{"field": "workload.num_steps", "value": 0, "allowed": {"minimum": 1}, "message": "too small"}],
        "extra": {"offers": []},
    }
    server.answer("POST", "/api/v1/jobs", status=422, document=problem, kind="application/problem+json")
    with pytest.raises(ApiProblem, match="workload.num_steps is 0") as raised:
        client.create_job({"name": "x"})
    assert (raised.value.status, raised.value.problem_code) == (422, "invalid_workload")
    assert raised.value.hint == "Give at least one step."
    assert raised.value.problem_fields[0]["field"] == "workload.num_steps"


def test_an_error_that_is_no_problem_document_still_names_the_status(server: Server, client: HeadroomClient) -> None:
    server.answer("GET", "/api/v1/me", status=502, raw=b"<h1>Bad gateway</h1>", kind="text/html")
    with pytest.raises(ApiProblem, match="the service answered 502"):
        client.me()


def test_nothing_listening_is_said_with_the_address_and_the_remedy() -> None:
    with HeadroomClient("http://127.0.0.1:9", token="t") as client, pytest.raises(ServiceUnreachable) as raised:
        client.me()
    assert "nothing answers at http://127.0.0.1:9" in raised.value.message
    assert raised.value.hint == "Start it with: headroom up"


def test_lists_are_read_page_by_page_to_their_end(server: Server, client: HeadroomClient) -> None:
    server.answer(
        "GET", "/api/v1/models", document={"results": [{"id": "a"}], "next": f"{server.url}/api/v1/more", "previous": None}
    )
    server.answer("GET", "/api/v1/more", document={"results": [{"id": "b"}], "next": None, "previous": None})
    assert [row["id"] for row in client.models()] == ["a", "b"]


def test_each_write_has_an_idempotency_key_of_its_own(server: Server, client: HeadroomClient) -> None:
    server.answer("POST", "/api/v1/jobs/job_1/pause", status=202, document={})
    client.pause_job("job_1")
    client.pause_job("job_1")
    keys = [headers["Idempotency-Key"] for _, _, headers, _ in server.requests]
    assert len(set(keys)) == 2


def test_pricing_waits_while_the_model_or_its_compiled_blocks_are_profiled(
    server: Server, client: HeadroomClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[Any] = []
    monkeypatch.setattr("headroom.client.connection.time.sleep", pauses.append)
    priced = {"offers": [{"id": "plan_1"}]}
    answers = iter(
        [
            (202, {"profile": "pending"}),
            (200, {"offers": [{"id": "plan_0"}], "compiled_blocks": "pending"}),
            (200, {**priced, "remarks": ["the network is taken as 1Gbit,1ms"]}),
        ]
    )

    def answer(handler: BaseHTTPRequestHandler) -> None:
        status, document = next(answers)
        server.answer("POST", "/scratch", status=status, document=document, headers=[("Retry-After", "3")])
        server.answers[("POST", "/scratch")](handler)

    server.answers[("POST", "/api/v1/plans")] = answer
    remarks: list[str] = []
    assert list(map(dict, client.price_plans({}, on_remark=remarks.append))) == [{"id": "plan_1"}]
    assert pauses == [3.0, 3.0]
    assert remarks == ["the network is taken as 1Gbit,1ms"]


def test_a_model_folder_is_uploaded_with_config_tokenizer_and_weights(
    server: Server, client: HeadroomClient, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text("{}")
    server.answer("POST", "/api/v1/models", status=201, document={"id": "mdl_1"})
    assert client.create_model(tmp_path, name="mine")["id"] == "mdl_1"
    body = server.requests[0][3]
    assert all(part in body for part in (b'name="config"', b'name="tokenizer"', b'name="weights"', b"mine"))
    assert b"notes.txt" not in body


@pytest.mark.parametrize(("name", "sent"), [("mine", {"name": "mine"}), (None, {})])
def test_a_model_of_a_job_is_asked_for_by_name_or_without(
    server: Server, client: HeadroomClient, name: str | None, sent: dict[str, str]
) -> None:
    server.answer("POST", "/api/v1/jobs/job_1/model", status=201, document={"id": "model_1"})
    assert client.create_model_from_job("job_1", name=name)["id"] == "model_1"
    assert json.loads(server.requests[0][3]) == sent


def test_a_download_that_fails_leaves_no_file(server: Server, client: HeadroomClient, tmp_path: Path) -> None:
    server.answer("GET", "/api/v1/artifacts/art_1/download", status=404, document={"detail": "no such artifact"})
    with pytest.raises(ApiProblem, match="no such artifact"):
        client.download_artifact("art_1", file=tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []


def test_a_download_is_written_whole(server: Server, client: HeadroomClient, tmp_path: Path) -> None:
    server.answer("GET", "/api/v1/artifacts/art_1/download", raw=b"x" * 100_000, kind="application/octet-stream")
    client.download_artifact("art_1", file=tmp_path / "weights")
    assert (tmp_path / "weights").read_bytes() == b"x" * 100_000
    assert len(list(tmp_path.iterdir())) == 1


def test_following_ends_with_the_done_event(server: Server, client: HeadroomClient) -> None:
    body = sse(("snapshot", "", {"job": {"is_terminal": False}}), ("sample", "1-0", {"step": 1}), ("done", "2-0", {}))
    server.answer("GET", "/api/v1/jobs/job_1/events", raw=body, kind="text/event-stream")
    assert [event.kind for event in client.follow_job("job_1")] == ["snapshot", "sample", "done"]


def test_following_an_ended_job_ends_with_the_snapshot(server: Server, client: HeadroomClient) -> None:
    body = sse(("snapshot", "", {"job": {"is_terminal": True}}))
    server.answer("GET", "/api/v1/jobs/job_1/events", raw=body, kind="text/event-stream")
    assert [event.kind for event in client.follow_job("job_1")] == ["snapshot"]


def test_a_broken_stream_is_resumed_after_the_last_event_seen(
    server: Server, client: HeadroomClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FIRST_RETRY_S", 0.001)
    bodies = iter([sse(("sample", "5-0", {"step": 5})), sse(("done", "6-0", {}))])

    def answer(handler: BaseHTTPRequestHandler) -> None:
        server.answer("GET", "/scratch", raw=next(bodies), kind="text/event-stream")
        server.answers[("GET", "/scratch")](handler)

    server.answers[("GET", "/api/v1/jobs/job_1/events")] = answer
    assert [event.kind for event in client.follow_job("job_1")] == ["sample", "lost", "done"]
    assert [headers.get("Last-Event-ID") for _, _, headers, _ in server.requests] == [None, "5-0"]


def test_following_gives_up_after_the_allowed_number_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_RETRY_S", 0.001)
    with HeadroomClient("http://127.0.0.1:9", token="t") as client:
        events = client.follow_job("job_1", max_lost=3)
        assert [next(events).data["num_lost"], next(events).data["num_lost"]] == [1, 2]
        with pytest.raises(ServiceUnreachable):
            next(events)


def test_following_an_unknown_job_fails_at_once(server: Server, client: HeadroomClient) -> None:
    server.answer("GET", "/api/v1/jobs/job_9/events", status=404, document={"detail": "no such job"})
    with pytest.raises(ApiProblem, match="no such job"):
        list(client.follow_job("job_9"))


def test_comments_and_several_data_lines_are_understood() -> None:
    lines = [": keep-alive", "", "event: log", "id: 7-1", 'data: {"message":', 'data: "hello"}', "", "data: {}"]
    events = list(parse_events(iter(lines)))
    assert [(event.kind, event.id, event.data) for event in events] == [("log", "7-1", {"message": "hello"})]


def test_an_event_without_a_name_takes_the_type_of_its_data() -> None:
    events = list(parse_events(iter(['data: {"type": "checkpoint", "step": 50}', ""])))
    assert events[0].kind == "checkpoint"
