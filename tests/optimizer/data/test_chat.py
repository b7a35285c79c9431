"""Chat templates are rendered in a sandbox with budgets."""

import pytest

from optimizer.base.errors import InvalidModel
from optimizer.data.chat import DEFAULT_CHAT_TEMPLATE, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_the_default_template_writes_plain_lines() -> None:
    assert ChatTemplate(DEFAULT_CHAT_TEMPLATE).render(MESSAGES) == "user: hi\nassistant: there\n"


def test_a_published_template_renders() -> None:
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nthere<|im_end|>\n"
    assert ChatTemplate(CHATML).render(MESSAGES) == expected


def test_arithmetic_and_the_end_token_are_there() -> None:
    template = ChatTemplate("{{ (7 % 4) * 2 }}{{ eos_token }}", end_of_text="</s>")
    assert template.render(MESSAGES) == "6</s>"


def test_the_budget_is_fresh_for_each_conversation() -> None:
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}done")
    assert [template.render(MESSAGES) for _ in range(3)] == ["done"] * 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "chat template"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 100,000 numbers from range",
        ),
        ("{{ 'a' * 1000000000 }}", r"\* is allowed between numbers only"),
        ("{{ '%999999999999d' % 1 }}", "% is allowed between numbers only"),
        ("{{ 9 ** 999999999 }}", r"\*\* not at all"),
        ("{{ range(10**12) }}", r"\*\* not at all"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(50000) %}" + "x" * 100 + "{% endfor %}", "more than 4,000,000 characters"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{% for %}", "chat template"),
        ("x" * 70_000, "allowed: at most 65,536 bytes"),
        ("{% include '/etc/passwd' %}", "chat template"),
    ],
)
def test_a_template_that_does_harm_is_refused(source: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert caught.value.fields["field"] == "chat_template"
