"""Answers are found in the text that a chat template writes, and nothing else is learnt."""

import pytest

from optimizer.base.errors import InvalidDataset
from optimizer.data.chat import ChatTemplate
from optimizer.data.samples.answers import AnswerMarker
from optimizer.data.samples.records import Record
from optimizer.workload import LossOn

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}<e>{% endgeneration %}"
    "{% else %}U:{{ m.content }}{% endif %}\n{% endfor %}"
)
FORGETTING = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}<a>{{ m.content.split('|')[1] }}<e>"
    "{% elif m.role == 'assistant' %}<a>{{ m.content }}<e>{% else %}<u>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
"""Leaves out what was thought (before the bar) in all answers but the last, as Qwen 3 does."""
CHAT = (
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
)


def _learnt(template: str, record: Record, *, loss_on: LossOn = "assistant", is_own: bool = True) -> list[str]:
    marked = AnswerMarker(template=ChatTemplate(template), is_own=is_own, loss_on=loss_on).write(record)
    return [marked.text[start:end] for start, end in marked.spans]


def test_every_answer_is_learnt_with_the_end_of_its_turn() -> None:
    assert _learnt(CHATML, Record(where="line 1", messages=CHAT)) == ["1<|im_end|>\n", "2<|im_end|>\n"]


def test_answers_that_the_template_marks_are_taken_as_it_marks_them() -> None:
    assert _learnt(MARKING, Record(where="line 1", messages=CHAT)) == ["1<e>", "2<e>"]


def test_an_answer_that_is_written_otherwise_later_is_found_in_the_whole_text() -> None:
    thought = [dict(message) for message in CHAT]
    thought[1]["content"], thought[3]["content"] = "hm|1", "so|2"
    marker = AnswerMarker(template=ChatTemplate(FORGETTING), is_own=True, loss_on="assistant")
    marked = marker.write(Record(where="line 1", messages=tuple(thought)))
    assert [marked.text[start:end] for start, end in marked.spans] == ["so|2<e>"]
    assert marker.counts == {"missing": 1, "rendered": 1}


def test_with_loss_on_all_the_whole_text_is_learnt() -> None:
    [whole] = _learnt(CHATML, Record(where="line 1", messages=CHAT), loss_on="all")
    assert whole.startswith("<|im_start|>user")
    assert whole.endswith("2<|im_end|>\n")


def test_a_prompt_with_a_completion_becomes_a_chat_for_a_model_that_has_a_template() -> None:
    record = Record(where="line 1", prompt="one?", completion="1")
    assert _learnt(CHATML, record) == ["1<|im_end|>\n"]


def test_without_a_template_a_completion_follows_its_prompt_on_a_line_of_its_own() -> None:
    marker = AnswerMarker(template=ChatTemplate(CHATML), is_own=False, loss_on="assistant")
    marked = marker.write(Record(where="line 1", prompt="one?", completion="1"))
    assert (marked.text, marked.spans, marked.needs_end) == ("one?\n1", ((5, 6),), True)


def test_a_chat_without_an_answer_is_refused_with_its_line() -> None:
    with pytest.raises(InvalidDataset, match="line 7: only messages by user; allowed: at least one by assistant"):
        _learnt(CHATML, Record(where="line 7", messages=CHAT[:1]))


def test_a_chat_that_the_template_refuses_is_refused_with_its_line() -> None:
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('begin with system') }}{% endif %}"
    with pytest.raises(InvalidDataset, match=r"line 7: the chat template refuses it .*begin with system"):
        _learnt(template, Record(where="line 7", messages=CHAT))
