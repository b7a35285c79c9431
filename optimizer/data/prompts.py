"""Reads a file of prompts, one JSON object a line. A line that cannot be used is kept, with what is wrong with it.

Two forms, which may be mixed:

- plain: ``{"prompt": "..."}`` or ``{"messages": [{"role", "content"}]}``, with an ``id`` where one is wanted, and with any field
  of ``GenerationRequest`` that is to differ on this line;
- as OpenAI's Batch API has them: ``{"custom_id", "method": "POST", "url", "body"}``, where the body is that of
  ``/v1/chat/completions`` or ``/v1/completions`` (https://platform.openai.com/docs/api-reference/batch/request-input).
  What the body may ask for and this program cannot do is refused on that line, never passed over.

Only what makes the file as a whole unreadable is raised: a line that is too long, bytes that are not UTF-8, too many lines, none.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from optimizer.base.errors import InvalidDataset, InvalidWorkload
from optimizer.base.serialize import from_json
from optimizer.data.documents import MAX_DEPTH, is_shallow, read_lines
from optimizer.data.samples.records import Message
from optimizer.workload import GenerationRequest

CHAT_URL: Final = "/v1/chat/completions"
COMPLETIONS_URL: Final = "/v1/completions"
URLS: Final = (CHAT_URL, COMPLETIONS_URL)
MAX_PROMPTS: Final = 1_000_000
MAX_ID_CHARACTERS: Final = 512
MAX_MESSAGES: Final = 10_000
ROLES: Final = ("system", "developer", "user", "assistant")

ENVELOPE_PROBLEMS: Final = ("invalid_json", "missing_field", "invalid_id", "duplicate_id", "invalid_method", "invalid_url")
"""Codes of a line that is no request at all; for them OpenAI's API refuses a whole batch."""

_PLAIN_FIELDS = ("id", "prompt", "messages", *GenerationRequest.__dataclass_fields__)
_BODY_SETTINGS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop",
    "seed": "seed",
}
_BODY_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "stream_options")
"""About who asks and how it is billed, not about what is generated."""
_BODY_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Fields that may be sent with these values, which ask for nothing."""


@dataclass(frozen=True, kw_only=True)
class LineProblem:
    """Why a line is not generated for."""

    code: str
    """One of ENVELOPE_PROBLEMS, or of what the line asks for: missing_required_parameter, invalid_value, unknown_parameter,
    unsupported_parameter, invalid_prompt, context_length_exceeded."""
    message: str
    param: str | None = None
    """The field, as OpenAI names it."""


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """One line of the file: what to continue, or what is wrong."""

    index: int
    """From 0, of the lines that are not blank."""
    number: int
    """From 1, in the file."""
    id: str
    """``custom_id`` or ``id``; the line's number where it has none."""
    form: Literal["plain", "batch"] = "plain"
    url: str = ""
    """Address that a line of the batch form asks."""
    model: str = ""
    """Name of the model in the body."""
    prompt: str | None = None
    messages: tuple[Message, ...] = ()
    """Instead of a prompt."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of GenerationRequest that this line sets for itself."""
    problem: LineProblem | None = None

    def workload(self, common: GenerationRequest) -> GenerationRequest:
        """The request for this line. Its own settings were checked when it was read. The seed counts on from line to line."""
        seeded = replace(common, seed=(common.seed + self.index) % 2**63)
        return replace(seeded, **self.settings)


class _LineError(Exception):
    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.problem = LineProblem(code=code, message=message, param=param)


def read_prompts(path: str | Path) -> Iterator[PromptLine]:
    """In the order of the file; blank lines are passed over. Raises InvalidDataset, while iterating."""
    seen: set[str] = set()
    index = 0
    for number, text in read_lines(Path(path)):
        if not text.strip():
            continue
        if index >= MAX_PROMPTS:
            raise InvalidDataset(
                f"prompts: more than {MAX_PROMPTS:,} lines; allowed: at most {MAX_PROMPTS:,}",
                field="file",
                value=number,
                allowed=f"at most {MAX_PROMPTS:,} prompts",
                hint="Split the file.",
            )
        line = _read_line(text, index=index, number=number)
        if line.problem is None and line.id in seen:
            again = LineProblem(code="duplicate_id", message=f"the id {line.id[:80]!r} was used on an earlier line")
            line = replace(line, problem=again)
        seen.add(line.id)
        yield line
        index += 1
    if not index:
        raise InvalidDataset("prompts: the file holds none", field="file", value=0, allowed="one JSON object a line")


def read_request(url: str, body: dict[str, Any]) -> PromptLine:
    """One request of OpenAI's form, as it is sent to an address; what is wrong with it is its ``problem``."""
    line = PromptLine(index=0, number=1, id="1", form="batch")
    try:
        if not is_shallow(body, MAX_DEPTH):
            raise _LineError("invalid_value", f"the body is nested deeper than {MAX_DEPTH} levels")
        return _read_request({"method": "POST", "url": url, "body": body}, line)
    except _LineError as error:
        return replace(line, problem=error.problem)


def _read_line(text: str, *, index: int, number: int) -> PromptLine:
    blank = PromptLine(index=index, number=number, id=str(number))
    try:
        record = _parse(text)
    except _LineError as error:
        return replace(blank, problem=error.problem)
    is_batch = "custom_id" in record or "body" in record
    named = replace(blank, form="batch" if is_batch else "plain")
    try:
        named = replace(named, id=_read_id(record, "custom_id" if is_batch else "id", fallback=None if is_batch else str(number)))
        return _read_request(record, named) if is_batch else _read_plain(record, named)
    except _LineError as error:
        url = record.get("url")
        return replace(named, url=url if is_batch and url in URLS else "", problem=error.problem)


def _parse(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _LineError("invalid_json", f"the line is not JSON: {str(error)[:200]}") from error
    if not isinstance(record, dict):
        raise _LineError("invalid_json", f"the line is a JSON {type(record).__name__}; allowed: an object")
    if not is_shallow(record, MAX_DEPTH):
        raise _LineError("invalid_json", f"the line is nested deeper than {MAX_DEPTH} levels")
    return record


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _read_id(record: dict[str, Any], name: str, *, fallback: str | None) -> str:
    value = record.get(name, fallback)
    if isinstance(value, int) and not isinstance(value, bool) and fallback is not None:
        value = str(value)
    if value is None:
        raise _LineError("missing_field", f"{name} is missing", param=name)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARACTERS:
        raise _LineError("invalid_id", f"{name} is not a text of 1 to {MAX_ID_CHARACTERS} characters", param=name)
    return _checked(value, name)


def _read_plain(record: dict[str, Any], line: PromptLine) -> PromptLine:
    for name in record:
        if name not in _PLAIN_FIELDS:
            known = ", ".join(_PLAIN_FIELDS)
            raise _LineError("unknown_parameter", f"{name[:80]!r} is not a known field; known: {known}", param=name[:80])
    given = {key: value for key, value in record.items() if key not in ("id", "prompt", "messages") and value is not None}
    return replace(_read_text(record, line), settings=_read_settings(given))


def _read_request(record: dict[str, Any], line: PromptLine) -> PromptLine:
    url, body = record.get("url"), record.get("body")
    if record.get("method") != "POST":
        raise _LineError("invalid_method", f"method is {_short(record.get('method'))}; allowed: POST", param="method")
    if url not in URLS:
        raise _LineError("invalid_url", f"url is {_short(url)}; allowed: {', '.join(URLS)}", param="url")
    if not isinstance(body, dict):
        raise _LineError("missing_field", "body is missing or not an object", param="body")
    line = replace(line, url=str(url))
    model = body.get("model", "")
    if not isinstance(model, str):
        raise _LineError("invalid_value", f"model is {_short(model)}; allowed: a text", param="model")
    wanted, other = ("messages", "prompt") if url == CHAT_URL else ("prompt", "messages")
    if other in body:
        raise _LineError("unknown_parameter", f"{other} is not a field of {url}", param=other)
    if wanted not in body:
        raise _LineError("missing_required_parameter", f"{wanted} is missing", param=wanted)
    line = replace(line, model=_checked(model, "model"))
    settings = _read_body_settings({key: value for key, value in body.items() if key not in ("model", wanted)})
    return replace(_read_text({wanted: body[wanted]}, line), settings=settings)


def _read_body_settings(given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _BODY_IGNORED or value is None:
            continue
        if name in _BODY_SETTINGS:
            found[_BODY_SETTINGS[name]] = value
        elif name not in _BODY_FIXED:
            raise _LineError("unknown_parameter", f"{name[:80]!r} is not a known parameter", param=name[:80])
        elif not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in _BODY_FIXED[name]):
            message = f"{name} is {_short(value)}, which is not supported; leave it out"
            raise _LineError("unsupported_parameter", message, param=name)
    if isinstance(found.get("seed"), int) and not isinstance(found["seed"], bool):
        found["seed"] %= 2**63  # OpenAI's may be negative
    return _read_settings(found)


def _read_settings(given: dict[str, Any]) -> dict[str, Any]:
    """Checked by what a whole workload would say to them."""
    if isinstance(given.get("stop"), str):
        given = {**given, "stop": [given["stop"]]}
    try:
        read = from_json(GenerationRequest, given, path="workload", error=InvalidWorkload)
    except InvalidWorkload as error:
        param = str(error.fields.get("field") or "").removeprefix("workload.")
        raise _LineError("invalid_value", error.message.replace("workload.", ""), param=param) from error
    return {name: value for name, value in asdict(read).items() if name in given}


def _read_text(record: dict[str, Any], line: PromptLine) -> PromptLine:
    prompt, messages = record.get("prompt"), record.get("messages")
    if (prompt is None) == (messages is None):
        raise _LineError("missing_required_parameter", "the line has neither or both of prompt and messages", param="prompt")
    if messages is not None:
        return replace(line, messages=_read_messages(messages))
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise _LineError("invalid_value", f"prompt is {_short(prompt)}; allowed: one text that is not empty", param="prompt")
    return replace(line, prompt=_checked(prompt, "prompt"))


def _read_messages(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise _LineError("invalid_value", f"messages is not a list of 1 to {MAX_MESSAGES:,} entries", param="messages")
    return tuple(_read_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _read_message(message: Any, path: str) -> Message:
    if not isinstance(message, dict):
        raise _LineError("invalid_value", f'{path} is not an object with "role" and "content"', param=path)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise _LineError("invalid_value", f"{path}.role is {_short(role)}; allowed: {', '.join(ROLES)}", param=f"{path}.role")
    extra = sorted(key for key, value in message.items() if key not in ("role", "content", "name") and value is not None)
    if extra:
        raise _LineError("unsupported_parameter", f"{path}.{extra[0][:80]} is not supported", param=f"{path}.{extra[0][:80]}")
    return {"role": str(role), "content": _checked(_read_content(content, f"{path}.content"), f"{path}.content")}


def _read_content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
        if texts and all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise _LineError("invalid_value", f"{path} is {_short(content)}; allowed: a text, or parts of type text", param=path)


def _checked(text: str, name: str) -> str:
    """No NUL, and characters that UTF-8 has: results are written as UTF-8."""
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _LineError("invalid_value", f"{name} holds a NUL or half a character", param=name)
    return text


def _short(value: Any) -> str:
    if isinstance(value, str | int | float | None):
        return f"{value!r:.80}"
    return "an object" if isinstance(value, dict) else "a list"
