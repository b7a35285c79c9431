"""Prompts as token ids: plain ones as the tokenizer writes a text, messages by the chat template. Torch-free.

As transformers do it: a plain prompt gets the special tokens that the tokenizer puts around one text, a rendered conversation
none, since its template writes them. A template is a stranger's: it is rendered in ``chat.py``'s sandbox, in the job's own
process or in the limited one that counts tokens for a price, never in the web process.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimizer.base.errors import InvalidModel
from optimizer.data.chat import DEFAULT_REPLY_TEMPLATE, ChatTemplate
from optimizer.data.chat_facts import ChatFacts
from optimizer.data.prompts import LineProblem, PromptLine
from optimizer.data.tokenizer import LoadedTokenizer, encode_prompt, load_tokenizer

_BATCH_LINES = 256


@dataclass(frozen=True, kw_only=True)
class LineTokens:
    """A line that can be generated for, or what is wrong with it."""

    line: PromptLine
    """Without its text, which is in the ids."""
    ids: Sequence[int] = ()
    """Kept as an array: a file may hold a million prompts."""
    problem: LineProblem | None = None


@dataclass(frozen=True, kw_only=True)
class TokenCount:
    """Lines that are alike."""

    prompt_tokens: int
    max_new_tokens: int | None
    """New tokens that the lines ask for; None where they leave it to the job."""
    num_lines: int

    def to_json(self) -> list[int | None]:
        return [self.prompt_tokens, self.max_new_tokens, self.num_lines]


class PromptTokenizer:
    """One model's way from a line to ids, and from ids to text. Raises InvalidModel for one that cannot be used."""

    def __init__(
        self,
        tokenizer_file: str | Path | None,
        *,
        chat_file: str | Path | None = None,
        vocab_size: int | None = None,
        end_of_text_id: int | None = None,
        end_ids: Sequence[int] = (),
    ) -> None:
        """end_ids: further tokens that end an answer, as a model's generation_config.json lists them."""
        self._end_ids = tuple(end_ids)
        self.loaded: LoadedTokenizer = load_tokenizer(
            tokenizer_file, model_vocab_size=vocab_size, end_of_text_id=end_of_text_id
        )
        self._chat = ChatFacts.read(chat_file)
        self._template = self._compile(self._chat.template or DEFAULT_REPLY_TEMPLATE)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a continuation."""
        named = self.loaded.tokenizer.token_to_id(self._chat.end_of_text) if self._chat.end_of_text else None
        others = (token for token in self._end_ids if token < self.loaded.vocab_size)
        return tuple(dict.fromkeys(i for i in (self.loaded.end_of_text_id, named, *others) if i is not None))

    def encode(self, lines: Iterable[PromptLine]) -> Iterator[LineTokens]:
        """One for each line, in order."""
        batch: list[PromptLine] = []
        for line in lines:
            batch.append(line)
            if len(batch) == _BATCH_LINES:
                yield from self._encode_batch(batch)
                batch = []
        yield from self._encode_batch(batch)

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens. Ids that the tokenizer does not know, which a wider model may draw, write nothing."""
        return str(self.loaded.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        """Ids of a conversation up to where its answer begins, with tools as the model's template writes them.

        Raises InvalidModel where the template fails, or writes the same with tools and without.
        """
        named = self._chat.named_templates.get("tool_use") if tools else None
        template = self._compile(named) if named else self._template
        text = template.render(messages, tools=tools, add_generation_prompt=True)
        if tools and named is None and text == template.render(messages, add_generation_prompt=True):
            raise InvalidModel(
                "the model's chat template has no place for tools", field="tools", value=len(tools), allowed="no tools"
            )
        return encode_prompt(self.loaded.tokenizer, text, add_special_tokens=False)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a plain prompt, with what the tokenizer puts around one."""
        return encode_prompt(self.loaded.tokenizer, text, add_special_tokens=True)

    def write_token(self, token: int) -> str:
        """One token alone, special ones as their names."""
        return str(self.loaded.tokenizer.decode([token], skip_special_tokens=False))

    def _compile(self, source: str) -> ChatTemplate:
        return ChatTemplate(
            source,
            begin_of_text=self._chat.begin_of_text,
            end_of_text=self._chat.end_of_text or self.loaded.end_of_text,
        )

    def _encode_batch(self, lines: Sequence[PromptLine]) -> Iterator[LineTokens]:
        for line in lines:
            if line.problem is not None:
                yield LineTokens(line=line, problem=line.problem)
                continue
            try:
                ids = self._ids(line)
            except InvalidModel as error:
                yield LineTokens(line=line, problem=LineProblem(code="invalid_prompt", message=error.message))
                continue
            if not ids:
                empty = LineProblem(code="invalid_prompt", message="the prompt makes no tokens", param="prompt")
                yield LineTokens(line=line, problem=empty)
                continue
            yield LineTokens(line=replace(line, prompt=None, messages=()), ids=array("I", ids))

    def _ids(self, line: PromptLine) -> tuple[int, ...]:
        text = line.prompt
        if text is None:
            text = self._template.render(line.messages, add_generation_prompt=True)
        return encode_prompt(self.loaded.tokenizer, text, add_special_tokens=line.prompt is not None)


def length_problem(num_prompt_tokens: int, max_new_tokens: int, *, max_sequence_length: int) -> LineProblem | None:
    """Why a prompt and its continuation have no place in the model, where they have none."""
    num_tokens = num_prompt_tokens + max_new_tokens
    if num_tokens <= max_sequence_length:
        return None
    return LineProblem(
        code="context_length_exceeded",
        message=f"the prompt has {num_prompt_tokens:,} tokens and {max_new_tokens:,} more are asked for, {num_tokens:,} in all; "
        f"the model has positions for {max_sequence_length:,}",
        param="messages",
    )


def count_tokens(lines: Iterable[LineTokens]) -> list[TokenCount]:
    """Token counts of the lines that can be generated for, in rising order."""
    counts: Counter[tuple[int, int]] = Counter()
    for each in lines:
        if each.problem is None:
            counts[len(each.ids), int(each.line.settings.get("max_new_tokens", 0))] += 1
    return [
        TokenCount(prompt_tokens=prompt, max_new_tokens=new or None, num_lines=num)
        for (prompt, new), num in sorted(counts.items())
    ]
