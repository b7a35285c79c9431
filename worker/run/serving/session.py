"""Runs a ``serve`` job in the attempt's process: one model held on a device, answers token by token to whoever asks.

Asks come and answers go over a socket to the supervisor (``asks.py``). The job ends when the supervisor ends the asks (nobody
asked for long), or when it is asked to stop: those who still wait are then answered with an error.
"""

import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.base.errors import HeadroomError, InvalidInput
from optimizer.base.heap import without_collections
from optimizer.base.units import format_bytes
from optimizer.data.prompt_tokens import PromptTokenizer
from optimizer.data.stop_texts import TextStream
from optimizer.estimate.serving import predict_serving, serving_dtype
from optimizer.formats.sampling import Sampling
from optimizer.models.files.linked_files import checked_folder
from optimizer.models.spec import ModelSpec, read_model_spec
from optimizer.plan.weights import WeightsPlan
from worker.run.reporter import Reporter
from worker.run.serving.asks import END, Ask, AskSocket

if TYPE_CHECKING:
    from optimizer.runtime.meter.meter import Meter
    from optimizer.runtime.serving.row import Made, ServedRequest
    from optimizer.runtime.serving.server import Server

MAX_DEFAULT_TOKENS = 1024
"""Length of a chat answer whose asker names no limit."""
DEFAULT_COMPLETION_TOKENS = 16
"""Length of a plain completion, as in OpenAI's API."""
_IDLE_TURN_S = 0.2
_REPORT_EVERY_S = 2.0


def serve_attempt(attempt: dict[str, Any], *, reporter: Reporter, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """The content of ``result.json``. Raises InvalidModel, InvalidInput for a budget that is too small, OutOfDeviceMemory."""
    reporter({"type": "started", "resumed_from_step": 0})
    spec = read_model_spec(attempt["config"])
    tokenizer = PromptTokenizer(
        attempt["tokenizer_file"],
        chat_file=attempt["chat_file"],
        vocab_size=spec.vocab_size,
        end_of_text_id=spec.end_of_text_id,
        end_ids=attempt["end_ids"],
    )
    reporter.phase("loading", "starting torch")
    with ExitStack() as opened, AskSocket(int(os.environ["HEADROOM_ASKS_FD"])) as asks:
        server, meter = _open_server(attempt, spec, opened)
        reporter.phase("serving", _held_words(server, meter))
        session = _Session(server, meter=meter, tokenizer=tokenizer, asks=asks, reporter=reporter)
        was_stopped = session.run(should_stop)
    return session.result(was_stopped=was_stopped)


def _open_server(attempt: dict[str, Any], spec: ModelSpec, opened: ExitStack) -> "tuple[Server, Meter]":
    with without_collections():
        from optimizer.runtime.serving.opening import open_server

    given = attempt["serving"]
    budget_bytes = given["device_budget_bytes"]
    need = predict_serving(
        spec,
        budget_bytes=budget_bytes,
        num_rows=given["num_rows"],
        context_tokens=given["context_tokens"],
        frozen=given["weights"],
    )
    folder = checked_folder(attempt["weights_folder"], attempt["linked_files"])
    server = open_server(
        spec,
        weights=WeightsPlan(dtype=serving_dtype(spec), frozen=given["weights"]),
        num_rows=need.num_rows,
        max_tokens=need.context_tokens,
        kv_limit_bytes=need.kv_limit_bytes,
        budget_bytes=budget_bytes,
        device_name=attempt["device"],
        weights_folder=folder,
    )
    return opened.enter_context(server)


def _held_words(server: "Server", meter: "Meter") -> str:
    how = "together" if server.forward.runs_rows_together else "one after the other"
    return (
        f"held on the device: {format_bytes(meter.bytes_by_category().get('weights', 0))} of weights, "
        f"{format_bytes(server.kv_limit_bytes)} for keys and values of up to {server.num_rows} askers at once, run {how}; "
        f"at most {server.max_tokens:,} tokens for each"
    )


@dataclass
class _Answer:
    """One request on its way."""

    request: "ServedRequest"
    text: TextStream
    num_made: int = 0


class _Session:
    """The loop between asks and the server."""

    def __init__(
        self, server: "Server", *, meter: "Meter", tokenizer: PromptTokenizer, asks: AskSocket, reporter: Reporter
    ) -> None:
        self._server = server
        self._meter = meter
        self._tokenizer = tokenizer
        self._asks = asks
        self._reporter = reporter
        self._answers: dict[str, _Answer] = {}
        self._out: list[dict[str, Any]] = []
        self._num_tokens = self._num_done = self._num_errors = 0
        self._reported = (-1, float("-inf"))
        self._busy_s = 0.0
        self._is_ending = False

    def run(self, should_stop: Callable[[], bool]) -> bool:
        """Until the asks end or it is time to stop; True if it was stopped."""
        self._report()
        while not should_stop():
            found = self._asks.take(timeout_s=_IDLE_TURN_S if self._server.is_idle else 0)
            for ask in found:
                self._hear(ask)
            if self._is_ending and self._server.is_idle:
                return False
            self._make_tokens()
            self._asks.send(self._out)
            self._out = []
            if time.monotonic() - self._reported[1] > _REPORT_EVERY_S:
                self._report()
        for request_id in list(self._answers):
            self._fail(request_id, "the model is being taken down; ask again", code="server_stopping")
        self._asks.send(self._out)
        return True

    def result(self, *, was_stopped: bool) -> dict[str, Any]:
        peak = self._meter.peak()
        answers = "1 answer" if self._num_done == 1 else f"{self._num_done:,} answers"
        return {
            "outcome": "drained" if was_stopped else "succeeded",
            "reason": "" if was_stopped else "done",
            "message": f"{answers} of {self._num_tokens:,} tokens; nobody asked any more",
            "error": None,
            "step": self._num_done,
            "measured": {
                "device_peak_bytes": peak.device_bytes,
                "device_bytes_by_category": peak.device_bytes_by_category,
                "host_peak_bytes": peak.host_bytes,
                "tokens_per_s": self._tokens_per_s,
            },
            "summary": {"num_tokens": self._num_tokens, "prompts_done": self._num_done, "num_errors": self._num_errors},
        }

    @property
    def _tokens_per_s(self) -> float | None:
        return self._num_tokens / self._busy_s if self._num_tokens else None

    # What is asked.

    def _hear(self, ask: Ask) -> None:
        if ask == END:
            self._is_ending = True
        elif ask["type"] == "cancel":
            self._server.drop(ask["id"])
            self._answers.pop(ask["id"], None)
        elif ask["type"] == "ask":
            try:
                self._begin(ask)
            except HeadroomError as error:
                self._fail(ask["id"], _sentence(error), code=error.code, param=error.fields.get("field"))
            except Exception:
                traceback.print_exc()  # one ask must not end the answers of all others
                self._fail(ask["id"], "the request could not be carried out; the job's log says more", code="internal")

    def _begin(self, ask: Ask) -> None:
        from optimizer.runtime.serving.row import ServedRequest

        adapter = ask.get("adapter") or ""
        if adapter not in self._server.shelf:
            self._server.shelf.load(adapter, Path(ask["adapter_folder"]))
        is_chat = ask.get("messages") is not None
        if is_chat:
            ids = self._tokenizer.chat_ids(ask["messages"], tools=ask.get("tools") or ())
        else:
            ids = self._tokenizer.text_ids(ask["prompt"])
        request = ServedRequest(
            id=ask["id"],
            token_ids=ids,
            sampling=self._sampling(ask["settings"], num_prompt=len(ids), is_chat=is_chat),
            adapter=adapter,
            num_top=ask.get("num_top"),
        )
        if any(token >= self._tokenizer.loaded.vocab_size for token in ids):
            raise InvalidInput("the prompt makes tokens that the model does not have", field="messages")
        self._server.submit(request)
        text = TextStream(ask["settings"].get("stop") or (), decode=self._tokenizer.decode)
        self._answers[request.id] = _Answer(request=request, text=text)
        self._out.append({"id": request.id, "type": "started", "prompt_tokens": len(ids)})

    def _sampling(self, settings: dict[str, Any], *, num_prompt: int, is_chat: bool) -> Sampling:
        default = min(MAX_DEFAULT_TOKENS, self._server.max_tokens - num_prompt) if is_chat else DEFAULT_COMPLETION_TOKENS
        return Sampling(
            max_new_tokens=settings.get("max_new_tokens") or max(1, default),
            temperature=settings["temperature"],
            top_k=settings.get("top_k", 0),
            top_p=settings.get("top_p", 1.0),
            seed=settings["seed"],
            stop_token_ids=self._tokenizer.end_ids,
        )

    # What is made.

    def _make_tokens(self) -> None:
        if self._server.is_idle:
            return
        begun_s = time.perf_counter()
        for made in self._server.step():
            self._num_tokens += 1
            self._add(made)
        self._busy_s += time.perf_counter() - begun_s
        while self._server.failed:
            request_id, error = self._server.failed.pop()
            self._fail(request_id, _sentence(error), code=error.code)

    def _add(self, made: "Made") -> None:
        answer = self._answers[made.id]
        answer.num_made += 1
        is_end_token = made.finish_reason == "stop"
        piece = "" if is_end_token else answer.text.add(made.token_id)
        reason = made.finish_reason or ("stop" if answer.text.is_stopped else None)
        if reason is not None:
            piece += answer.text.end()
            reason = "stop" if answer.text.is_stopped else reason
        logprobs = None if made.logprob is None or is_end_token else self._logprobs(made)
        if piece or logprobs:
            self._out.append({"id": made.id, "type": "delta", "text": piece, "logprobs": logprobs})
        if reason is not None:
            self._end(answer, reason)

    def _end(self, answer: _Answer, reason: str) -> None:
        self._server.drop(answer.request.id)
        del self._answers[answer.request.id]
        self._num_done += 1
        self._out.append(
            {
                "id": answer.request.id,
                "type": "end",
                "finish_reason": reason,
                "prompt_tokens": len(answer.request.token_ids),
                "completion_tokens": answer.num_made,
            }
        )

    def _fail(self, request_id: str, message: str, *, code: str, param: str | None = None) -> None:
        self._answers.pop(request_id, None)
        self._num_errors += 1
        self._out.append({"id": request_id, "type": "error", "message": message, "code": code, "param": param})

    def _logprobs(self, made: "Made") -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._tokenizer.write_token(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        assert made.logprob is not None
        return {**entry(made.token_id, made.logprob), "top_logprobs": [entry(*each) for each in made.top]}

    def _report(self) -> None:
        """A sample, where tokens were made since the last."""
        if self._reported[0] == self._num_tokens:
            return
        self._reported = (self._num_tokens, time.monotonic())
        self._reporter(
            {
                "type": "sample",
                "kind": "generate",
                "step": self._num_tokens,
                "time_s": time.time(),
                "prompts_done": self._num_done,
                "num_prompts": 0,
                "num_errors": self._num_errors,
                "num_running": self._server.num_running,
                "num_waiting": self._server.num_waiting,
                "tokens_per_s": self._tokens_per_s,
                "device_bytes": self._meter.bytes_by_category(),
                "device_peak_bytes": self._meter.peak().device_bytes,
                "host_bytes": self._meter.host_bytes,
            }
        )


def _sentence(error: HeadroomError) -> str:
    return f"{error.message}. {error.hint}".rstrip(". ") if error.hint else error.message
