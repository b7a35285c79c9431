"""Calls of tools in what a model writes, where its form is recognisable: ``<tool_call>{"name", "arguments"}</tool_call>``.

That is how the templates of Qwen and Hermes have it. Other forms stay text: a guess would drop what a person should read.
"""

import json
import uuid
from typing import Any, Final

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"

Document = dict[str, Any]


class CallReader:
    """Parts the text of an answer from its calls as it comes. Without tools all is text."""

    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._held = ""
        self._is_inside = False
        self.calls: list[Document] = []

    def add(self, text: str) -> str:
        """The text that is certainly no part of a call."""
        if not self._has_tools:
            return text
        self._held += text
        written = ""
        while True:
            mark = CLOSING if self._is_inside else OPENING
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            if not self._is_inside:
                written += before
            elif (call := _read_call(before, index=len(self.calls))) is None:
                written += f"{OPENING}{before}{CLOSING}"
            else:
                self.calls.append(call)
            self._is_inside = not self._is_inside
        if self._is_inside:
            return written
        num_held = next((size for size in range(len(OPENING) - 1, 0, -1) if self._held.endswith(OPENING[:size])), 0)
        kept = len(self._held) - num_held
        written, self._held = written + self._held[:kept], self._held[kept:]
        return written

    def end(self) -> str:
        """The text that was held back and is no call after all; a call whose end never came may still be whole."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return held
        self._is_inside = False
        if (call := _read_call(held, index=len(self.calls))) is None:
            return OPENING + held
        self.calls.append(call)
        return ""


def _read_call(text: str, *, index: int) -> Document | None:
    """In OpenAI's form; None for what is no call."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    identifier = f"call_{uuid.uuid4().hex[:24]}"
    return {"index": index, "id": identifier, "type": "function", "function": {"name": found["name"], "arguments": written}}
