"""Messages to text by a chat template, which a stranger may have written: rendered in a sandbox with budgets.

Runs in the job's own process only, never in the web process. Jinja's sandbox stops access to Python; the budgets stop what it
does not: loops over nested ranges, texts multiplied to gigabytes, output without end. A template that still takes too long
stops with the job's process.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from optimizer.base.errors import InvalidModel
from optimizer.data.documents import Message

MAX_TEMPLATE_BYTES = 64 * 1024
MAX_OUTPUT_CHARACTERS = 4_000_000
MAX_RANGE_ITEMS = 100_000

DEFAULT_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
"""For models without a template: plain lines, so that any tokenizer can write them."""


class ChatTemplate:
    """One compiled template. Raises InvalidModel when it cannot be compiled."""

    def __init__(self, source: str, *, begin_of_text: str = "", end_of_text: str = "") -> None:
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise _invalid(f"{len(source):,} characters long", allowed=f"at most {MAX_TEMPLATE_BYTES:,} bytes")
        self._environment = _Environment(trim_blocks=True, lstrip_blocks=True)
        self._begin_of_text = begin_of_text
        self._end_of_text = end_of_text
        try:
            self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise _invalid(str(error)[:200], allowed="a Jinja template") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of one conversation. Raises InvalidModel when the template fails or goes over a budget.

        add_generation_prompt: whether it ends where the answer begins.
        """
        self._environment.reset_budget()
        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self._begin_of_text,
            "eos_token": self._end_of_text,
            "tools": None,
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
