"""A conversation's events as OpenAI writes them: one document, or chunks of a stream.

https://platform.openai.com/docs/api-reference/chat/object, .../chat/streaming, .../completions/object
"""

import time
import uuid
from typing import Any

from webapp.serving.asking import AskedFor
from webapp.serving.tool_calls import CallReader

Document = dict[str, Any]


class Answer:
    """Makes the answer to one request. Feed it ``started``, ``delta`` and ``end`` in order."""

    def __init__(self, asked: AskedFor, *, model_name: str) -> None:
        self._asked = asked
        self._id = ("chatcmpl-" if asked.is_chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        self._model_name = model_name
        self._calls = CallReader(has_tools=bool(asked.tools))
        self._text = ""
        self._logprobs: list[Document] = []
        self._offset = 0
        self._finish_reason: str | None = None
        self._usage: Document | None = None

    def first_chunks(self) -> list[Document]:
        """A chat begins with who speaks."""
        return [self._chunk({"role": "assistant", "content": ""})] if self._asked.is_chat else []

    def chunks(self, event: Document) -> list[Document]:
        """The chunks that one event adds to a stream."""
        text, logprobs = self._take(event)
        made = [self._chunk(self._part(text), logprobs=logprobs)] if text or logprobs else []
        if event["type"] != "end":
            return made
        if self._calls.calls:
            made.append(self._chunk({"tool_calls": self._calls.calls}))
        made.append(self._chunk({} if self._asked.is_chat else {"text": ""}, finish_reason=self._finish_reason))
        if self._asked.include_usage:
            made.append({**self._frame(is_chunk=True), "choices": [], "usage": self._usage})
        return made

    def add(self, event: Document) -> None:
        """The same for an answer in one piece."""
        text, _ = self._take(event)
        self._text += text

    def document(self) -> Document:
        """The whole answer, once its end was added."""
        choice: Document = {"index": 0, "finish_reason": self._finish_reason, "logprobs": self._written_logprobs(self._logprobs)}
        if self._asked.is_chat:
            message: Document = {"role": "assistant", "content": self._text, "refusal": None}
            if self._calls.calls:
                calls = [{key: value for key, value in call.items() if key != "index"} for call in self._calls.calls]
                message |= {"content": self._text or None, "tool_calls": calls}
            choice["message"] = message
        else:
            choice["text"] = self._text
        return {**self._frame(is_chunk=False), "choices": [choice], "usage": self._usage}

    def _take(self, event: Document) -> tuple[str, list[Document]]:
        """The text and the logarithms that an event brings."""
        if event["type"] == "delta":
            found = [event["logprobs"]] if event.get("logprobs") else []
            self._logprobs += found
            return self._calls.add(event["text"]), found
        if event["type"] != "end":
            return "", []
        text = self._calls.end()
        self._finish_reason = "tool_calls" if self._calls.calls else event["finish_reason"]
        prompt, completion = event["prompt_tokens"], event["completion_tokens"]
        self._usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return text, []

    def _part(self, text: str) -> Document:
        return {"content": text} if self._asked.is_chat else {"text": text}

    def _chunk(
        self, part: Document, *, finish_reason: str | None = None, logprobs: list[Document] | None = None
    ) -> Document:
        choice: Document = {"index": 0, "finish_reason": finish_reason, "logprobs": self._written_logprobs(logprobs or [])}
        choice |= {"delta": part} if self._asked.is_chat else part
        usage = {"usage": None} if self._asked.include_usage else {}
        return {**self._frame(is_chunk=True), "choices": [choice], **usage}

    def _frame(self, *, is_chunk: bool) -> Document:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self._asked.is_chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model_name,
            "system_fingerprint": None,
        }

    def _written_logprobs(self, found: list[Document]) -> Document | None:
        if not found:
            return None
        if self._asked.is_chat:
            return {"content": found, "refusal": None}
        offsets = []
        for each in found:
            offsets.append(self._offset)
            self._offset += len(each["token"])
        return {
            "tokens": [each["token"] for each in found],
            "token_logprobs": [each["logprob"] for each in found],
            "top_logprobs": [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in found],
            "text_offset": offsets,
        }
