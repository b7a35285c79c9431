"""Reads the body of a live request in OpenAI's form. What it asks for and this program cannot do is refused, never passed over.

https://platform.openai.com/docs/api-reference/chat/create, .../completions/create. Settings are read as a batch's lines are
(``optimizer/data/prompts.py``); what only a live answer can have (streams, logarithms, tools) is read here.
"""

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Final

from optimizer.data.prompts import CHAT_URL, COMPLETIONS_URL, read_request
from webapp.batches.answers import RequestRefused

MAX_TOP_LOGPROBS: Final = 20
MAX_TOOLS: Final = 128
DEFAULT_TEMPERATURE: Final = 1.0
_OWN_FIELDS = ("stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice", "device_budget_bytes")
_IGNORED_FIELDS = ("reasoning_effort", "verbosity", "prompt_cache_retention", "parallel_tool_calls")
_PLACEHOLDER = [{"role": "user", "content": "-"}]

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AskedFor:
    """One live request."""

    model: str
    is_chat: bool
    messages: list[Document] | None = None
    prompt: str | None = None
    tools: list[Document] = field(default_factory=list)
    settings: Document = field(default_factory=dict)
    """Fields of ``GenerationRequest``, with a temperature and a seed always there."""
    num_top: int | None = None
    """Likeliest tokens beside each one; None where no logarithms are asked for."""
    stream: bool = False
    include_usage: bool = False
    device_budget_bytes: int | None = None
    """For holding the model, where it is not held yet. Not in OpenAI's API."""


def read_chat(body: Any) -> AskedFor:
    """A body of ``/v1/chat/completions``. Raises RequestRefused that names the field."""
    body = _object(body)
    messages, plain = _read_messages(body.get("messages")) if "messages" in body else (None, None)
    rest = {**_without_own(body), **({} if plain is None else {"messages": plain})}
    wants_logprobs = _flag(body, "logprobs")
    num_top = _count(body, "top_logprobs", most=MAX_TOP_LOGPROBS)
    if num_top and not wants_logprobs:
        raise _wrong("top_logprobs", num_top, "logprobs must be true with it")
    return _complete(body, url=CHAT_URL, rest=rest, num_top=num_top or 0 if wants_logprobs else None, messages=messages)


def read_completion(body: Any) -> AskedFor:
    """A body of ``/v1/completions``. Raises RequestRefused that names the field."""
    body = _object(body)
    if body.get("tools"):
        raise _wrong("tools", "a list", "tools are for /v1/chat/completions")
    if body.get("logprobs") is False:
        body = {**body, "logprobs": None}
    return _complete(body, url=COMPLETIONS_URL, rest=_without_own(body), num_top=_count(body, "logprobs", most=5), messages=None)


def _complete(body: Document, *, url: str, rest: Document, num_top: int | None, messages: list[Document] | None) -> AskedFor:
    line = read_request(url, rest)
    if line.problem is not None:
        raise RequestRefused(line.problem.message, param=line.problem.param, code=line.problem.code)
    if not line.model:
        raise RequestRefused("model is missing; see GET /v1/models", param="model", code="missing_required_parameter")
    if any(not text for text in line.settings.get("stop", ())):
        raise _wrong("stop", "an empty text", "texts that are not empty")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    return AskedFor(
        model=line.model,
        is_chat=url == CHAT_URL,
        messages=messages,
        prompt=line.prompt,
        tools=_read_tools(body),
        settings={"temperature": DEFAULT_TEMPERATURE, "seed": secrets.randbelow(2**63), **line.settings},
        num_top=num_top,
        stream=_flag(body, "stream"),
        include_usage=bool(options.get("include_usage")),
        device_budget_bytes=_budget(body.get("device_budget_bytes")),
    )


def _without_own(body: Document) -> Document:
    left_out = (*_OWN_FIELDS, *_IGNORED_FIELDS)
    return {name: value for name, value in body.items() if name not in left_out}


def _read_messages(messages: Any) -> tuple[list[Document] | None, Any]:
    """The messages as a template takes them, and those that are left to the common reading.

    Results of tools and calls of tools are read here; the rest as in a batch.
    """
    if not isinstance(messages, list):
        return None, messages
    found, plain = [], []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        is_special = isinstance(message, dict) and (message.get("role") == "tool" or message.get("tool_calls"))
        if is_special:
            found.append(_read_tool_message(message, path))
            continue
        line = read_request(CHAT_URL, {"messages": [message]})
        if line.problem is not None:
            text = line.problem.message.replace("messages[0]", path)
            raise RequestRefused(text, param=(line.problem.param or "").replace("messages[0]", path), code=line.problem.code)
        [read] = line.messages
        found.append({"role": "system" if read["role"] == "developer" else read["role"], "content": read["content"]})
        plain.append(message)
    return found, (plain or (_PLACEHOLDER if messages else messages))


def _read_tool_message(message: Document, path: str) -> Document:
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise _wrong(f"{path}.content", type(content).__name__, "a text")
    if message["role"] == "tool":
        return {"role": "tool", "content": content or "", "tool_call_id": str(message.get("tool_call_id") or "")}
    calls = message["tool_calls"]
    if message["role"] != "assistant" or not isinstance(calls, list):
        raise _wrong(f"{path}.tool_calls", message["role"], "calls of an assistant, in a list")
    return {"role": "assistant", "content": content or "", "tool_calls": [_read_call(call, path) for call in calls]}


def _read_call(call: Any, path: str) -> Document:
    """Templates write a call's arguments as JSON, and so want the object and not its text."""
    function = call.get("function") if isinstance(call, dict) else None
    try:
        arguments = json.loads(function["arguments"])  # type: ignore[index]
        name = str(function["name"])  # type: ignore[index]
    except (TypeError, KeyError, ValueError) as error:
        raise _wrong(f"{path}.tool_calls", "a call", "a function with a name and arguments as JSON") from error
    return {"id": str(call.get("id") or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_tools(body: Document) -> list[Document]:
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS or not all(_is_function(tool) for tool in tools):
        raise _wrong("tools", type(tools).__name__, f"a list of at most {MAX_TOOLS} functions, each with a name")
    if choice not in (None, "auto", "none"):
        raise _wrong("tool_choice", choice, "auto or none: a model here decides by itself")
    return [] if choice == "none" else tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _object(body: Any) -> Document:
    if not isinstance(body, dict):
        raise RequestRefused(f"the body is a JSON {type(body).__name__}; allowed: an object")
    return body


def _flag(body: Document, name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False) or (isinstance(value, int) and not isinstance(value, bool)):
        raise _wrong(name, value, "true or false")
    return bool(value)


def _count(body: Document, name: str, *, most: int) -> int | None:
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most):
        raise _wrong(name, value, f"an integer from 0 to {most}")
    return value


def _budget(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _wrong("device_budget_bytes", value, "bytes, at least 1")
    return value


def _wrong(param: str, value: Any, allowed: str) -> RequestRefused:
    return RequestRefused(f"{param} is {value!r:.80}; allowed: {allowed}", param=param, code="invalid_value")
