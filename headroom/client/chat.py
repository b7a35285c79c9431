"""The client's call that asks a held model, token by token."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from headroom.client.connection import Connection, Row, problem_of, unreachable

FIRST_WORD_LIMIT_S = 330.0
"""A service says every few seconds what it waits for, and gives up after five minutes."""


@dataclass(frozen=True, kw_only=True)
class ChatEvent:
    """A part of an answer as it comes."""

    kind: Literal["waiting", "text", "end", "error"]
    text: str = ""
    """The next piece of the answer; what is waited for; or what went wrong."""
    finish_reason: str = ""
    """With ``end``: ``stop``, ``length`` or ``tool_calls``."""


class ChatCalls(Connection):
    """Part of ``HeadroomClient``."""

    def chat(self, model: str, messages: Sequence[Row], **settings: Any) -> Iterator[ChatEvent]:
        """The answer to a conversation, as it is made.

        model: a model's name or id, a training run's, or ``NAME:RUN``. settings: as in OpenAI's API, such as ``temperature`` and
        ``max_tokens``, and ``device_budget_bytes``. Raises ApiProblem for what is refused at once, ServiceUnreachable.
        """
        body = {"model": model, "messages": list(messages), "stream": True, **settings}
        try:
            with self._http.stream("POST", "chat/completions", json=body, timeout=FIRST_WORD_LIMIT_S) as response:
                if not response.is_success:
                    response.read()
                    raise problem_of(response)
                yield from _read_stream(response.iter_lines())
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error


def _read_stream(lines: Iterator[str]) -> Iterator[ChatEvent]:
    for line in lines:
        if line.startswith(":"):
            yield ChatEvent(kind="waiting", text=line.removeprefix(":").strip())
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield from _read_chunk(json.loads(line.removeprefix("data: ")))


def _read_chunk(chunk: Row) -> Iterator[ChatEvent]:
    if "error" in chunk:
        yield ChatEvent(kind="error", text=chunk["error"]["message"])
        return
    for choice in chunk["choices"]:
        delta = choice["delta"]
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in delta.get("tool_calls", ())]
        text = (delta.get("content") or "") + "\n".join(calls)
        if text:
            yield ChatEvent(kind="text", text=text)
        if choice["finish_reason"]:
            yield ChatEvent(kind="end", finish_reason=choice["finish_reason"])
