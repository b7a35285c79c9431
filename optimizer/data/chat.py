"""Messages to text by a chat template, as transformers renders it, in a sandbox with budgets: a stranger may have written it.

Runs in the job's own process only, never in the web process. Jinja's sandbox stops access to Python; the budgets stop what it
does not: loops over nested ranges, texts multiplied to gigabytes, output without end. A template that still takes too long
stops with the job's process.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from optimizer.base.errors import InvalidModel

MAX_TEMPLATE_BYTES = 64 * 1024
MAX_OUTPUT_CHARACTERS = 4_000_000
MAX_RANGE_ITEMS = 100_000
_WIDEST_INDENT = 16

DEFAULT_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
"""For models without a template: plain lines, so that any tokenizer can write them."""
DEFAULT_REPLY_TEMPLATE = DEFAULT_CHAT_TEMPLATE + "{% if add_generation_prompt %}assistant:{% endif %}"
Span = tuple[int, int]
"""Characters of a text from one place up to another."""


class ChatTemplate:
    """One compiled template. Raises InvalidModel when it cannot be compiled."""

    def __init__(self, source: str, *, begin_of_text: str = "", end_of_text: str = "") -> None:
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise _invalid(f"{len(source):,} characters long", allowed=f"at most {MAX_TEMPLATE_BYTES:,} bytes")
        extensions = ["jinja2.ext.loopcontrols", _GenerationBlock]
        self._environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._begin_of_text = begin_of_text
        self._end_of_text = end_of_text
        self._marks_answers = "{% generation" in source or "{%- generation" in source
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise _invalid(str(error)[:200], allowed="a Jinja template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of one conversation. Raises InvalidModel when the template fails or goes over a budget.

        add_generation_prompt: whether it ends where the answer begins.
        """
        return self._strip(self._render(messages, tools=tools, add_generation_prompt=add_generation_prompt))[0]

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[Span]]:
        """The text, and the parts of it that the template itself marks as the assistant's by ``{% generation %}``."""
        return self._strip(self._render(messages, tools=tools, add_generation_prompt=False))

    @property
    def marks_answers(self) -> bool:
        return self._marks_answers

    def _strip(self, text: str) -> tuple[str, list[Span]]:
        """The text without the marks, and the spans between them."""
        opening, closing = self._environment.marks
        pieces, spans, length = [], [], 0
        for index, part in enumerate(text.split(opening)):
            answer, found, rest = part.partition(closing) if index else ("", "", part)
            if found:
                spans.append((length, length + len(answer)))
            piece = answer + rest
            pieces.append(piece)
            length += len(piece)
        return "".join(pieces), spans

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        self._environment.reset_budget()
        variables = {
            "messages": json.loads(json.dumps([dict(message) for message in messages])),
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._begin_of_text,
            "eos_token": self._end_of_text,
            "tools": json.loads(json.dumps(list(tools))) or None,
            "documents": None,
        }
        try:
            return "".join(_limited(self._template.generate(variables)))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise _invalid(f"{type(error).__name__}: {str(error)[:200]}", allowed="a template that renders") from error
        except (RecursionError, MemoryError) as error:
            raise _invalid(f"{type(error).__name__} while rendering", allowed="a template that renders") from error


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a budget for range and without the operators that multiply text."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals["range"] = self._range
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        nonce = secrets.token_hex(8)
        self.marks = (f"\0{nonce}(", f"\0{nonce})")
        """Texts that no document holds: a NUL character is refused in all of them."""
        self.reset_budget()

    def reset_budget(self) -> None:
        self._range_items_left = MAX_RANGE_ITEMS

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or not (_is_number(left) and _is_number(right)):
            raise SecurityError(f"{operator} is allowed between numbers only, and ** not at all")
        return super().call_binop(context, operator, left, right)

    def _range(self, *arguments: int) -> range:
        numbers = range(*arguments)
        self._range_items_left -= min(len(numbers), MAX_RANGE_ITEMS + 1)
        if self._range_items_left < 0:
            raise SecurityError(f"more than {MAX_RANGE_ITEMS:,} numbers from range")
        return numbers


class _GenerationBlock(Extension):
    """``{% generation %}``, with which a template marks what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        opening, closing = self.environment.marks  # type: ignore[attr-defined]
        return f"{opening}{caller()}{closing}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (templates pass these by position, too)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Jinja's own escapes for HTML; templates expect plain JSON."""
    if indent is not None and indent > _WIDEST_INDENT:
        raise SecurityError(f"tojson with an indent above {_WIDEST_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _limited(chunks: Iterator[str]) -> Iterator[str]:
    num_characters = 0
    for chunk in chunks:
        num_characters += len(chunk)
        if num_characters > MAX_OUTPUT_CHARACTERS:
            raise SecurityError(f"more than {MAX_OUTPUT_CHARACTERS:,} characters")
        yield chunk


def _invalid(found: str, *, allowed: str) -> InvalidModel:
    return InvalidModel(
        f"chat template: {found}; allowed: {allowed}", field="chat_template", value=found, allowed=allowed
    )
