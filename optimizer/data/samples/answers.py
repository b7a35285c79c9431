"""Writes a record as text by the model's chat template, and finds the parts of the text that are to be learnt.

An answer is found where the template marks it (``{% generation %}``), else between the conversation up to it, rendered with the
prompt for an answer, and the conversation with it. A template may write earlier turns otherwise than it wrote them when they were
the last (Qwen 3 drops their thinking); where one text is not the other's beginning, the answer is looked for as it stands in the
whole text. What comes after an answer up to the next message, the token that ends a turn, is learnt with it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optimizer.base.errors import InvalidDataset, InvalidModel
from optimizer.data.chat import ChatTemplate, Span
from optimizer.data.samples.records import Message, Record
from optimizer.workload import LossOn

ANSWERER = "assistant"


@dataclass(frozen=True, kw_only=True)
class MarkedText:
    """The text of one sample."""

    text: str
    spans: tuple[Span, ...]
    """Characters to learn, in order, without overlaps."""
    needs_end: bool
    """True if an end-of-text token is to follow: what no template of the model's own has ended."""


@dataclass(kw_only=True)
class AnswerMarker:
    """Writes records and counts how their answers were found."""

    template: ChatTemplate
    is_own: bool
    """True if the template is the model's own; one that stands in for it is not forced on prompts with completions."""
    loss_on: LossOn
    counts: Counter[str] = field(default_factory=Counter)
    """Answers by how they were found: ``marked``, ``rendered`` or ``located``; ``missing`` where they were not."""

    def write(self, record: Record) -> MarkedText:
        """Raises InvalidDataset with the record's place where the template refuses it or it holds nothing to learn."""
        if record.text:
            return MarkedText(text=record.text, spans=((0, len(record.text)),), needs_end=True)
        messages = record.messages
        if not messages:
            if not self.is_own:
                return self._write_completion(record)
            messages = ({"role": "user", "content": record.prompt}, {"role": ANSWERER, "content": record.completion})
        try:
            return self._write_messages(replace(record, messages=messages))
        except InvalidModel as error:
            found = f"the chat template refuses it ({error.message})"
            raise _invalid(record.where, found, allowed="messages that it takes") from error

    def write_pair(self, record: Record) -> tuple[MarkedText, MarkedText]:
        """The better and the worse answer, each after all that comes before it, where nothing is learnt.

        Raises as ``write`` does, and where the record is no pair or its answers are the same.
        """
        if record.rejected is None:
            raise _invalid(record.where, "no pair of answers", allowed="a better and a worse one (chosen, rejected)")
        better, worse = self.write(record), self.write(record.rejected)
        if better.text == worse.text:
            raise _invalid(record.where, "chosen and rejected are the same", allowed="two answers that differ")
        num_common = _num_common(better.text, worse.text)
        return _last_answers(better, past=num_common), _last_answers(worse, past=num_common)

    def _write_completion(self, record: Record) -> MarkedText:
        """The two, one after the other, a line break between them where neither has a blank there."""
        is_parted = record.prompt[-1:].isspace() or record.completion[:1].isspace() or not record.prompt
        prompt = record.prompt if is_parted else f"{record.prompt}\n"
        text = prompt + record.completion
        start = len(prompt) if self.loss_on == ANSWERER else 0
        return MarkedText(text=text, spans=((start, len(text)),), needs_end=True)

    def _write_messages(self, record: Record) -> MarkedText:
        messages, tools = record.messages, record.tools
        if self.loss_on == "all":
            text = self.template.render(messages, tools=tools)
            return MarkedText(text=text, spans=((0, len(text)),), needs_end=not self.is_own)
        if all(message["role"] != ANSWERER for message in messages):
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise _invalid(record.where, f"only messages by {roles}", allowed="at least one by assistant, to train on")
        text, marked = self.template.render_marked(messages, tools=tools)
        if marked:
            self.counts["marked"] += len(marked)
            return MarkedText(text=text, spans=tuple(span for span in marked if span[0] < span[1]), needs_end=not self.is_own)
        return MarkedText(text=text, spans=tuple(self._find(text, messages, tools)), needs_end=not self.is_own)

    def _find(self, text: str, messages: Sequence[Message], tools: Sequence[Any]) -> list[Span]:
        spans: list[Span] = []
        for index, message in enumerate(messages):
            if message["role"] != ANSWERER:
                continue
            past = spans[-1][1] if spans else 0
            span = self._between(text, messages, index, tools) or _locate(text, message, past)
            if span is None or span[0] < past:
                self.counts["missing"] += 1
                continue
            spans.append(span)
        return spans

    def _between(self, text: str, messages: Sequence[Message], index: int, tools: Sequence[Any]) -> Span | None:
        before = self._try(messages[:index], tools, add_generation_prompt=True)
        after = text if index == len(messages) - 1 else self._try(messages[: index + 1], tools, add_generation_prompt=False)
        if before is None or after is None or not (text.startswith(after) and after.startswith(before)):
            return None
        self.counts["rendered"] += 1
        return len(before), len(after)

    def _try(self, messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool) -> str | None:
        """None where the template refuses a part of what it takes as a whole (Gemma wants turns to alternate)."""
        try:
            return self.template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        except InvalidModel:
            return None


def _num_common(one: str, other: str) -> int:
    """Characters with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _last_answers(marked: MarkedText, *, past: int) -> MarkedText:
    """Without the answers that end before a place, of which both texts have the same; the last one stays."""
    *earlier, last = marked.spans or ((0, 0),)
    return replace(marked, spans=(*(span for span in earlier if span[1] > past), last))


def _locate(text: str, message: Message, past: int) -> Span | None:
    content = message["content"].strip()
    start = text.find(content, past) if content else -1
    return None if start < 0 else (start, start + len(content))


def _invalid(where: str, found: str, *, allowed: str) -> InvalidDataset:
    message = f"dataset, {where}: {found}; allowed: {allowed}"
    return InvalidDataset(message, field=f"dataset.{where}", value=found, allowed=allowed)
