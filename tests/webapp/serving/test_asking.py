"""Bodies of live requests: what is read, and what is refused with its field."""

from typing import Any

import pytest

from webapp.batches.answers import RequestRefused
from webapp.serving.asking import read_chat, read_completion

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO, **changes}


def test_a_plain_question_has_openais_defaults() -> None:
    asked = read_chat(chat())
    assert (asked.model, asked.is_chat, asked.messages, asked.stream) == ("m", True, HELLO, False)
    assert asked.settings["temperature"] == 1.0
    assert asked.num_top is None
    assert read_chat(chat()).settings["seed"] != asked.settings["seed"]


def test_what_a_live_answer_can_have_is_read() -> None:
    asked = read_chat(
        chat(stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=3, tools=[TOOL],
             max_tokens=7, stop="end", seed=5, device_budget_bytes=1000)
    )  # fmt: skip
    assert (asked.stream, asked.include_usage, asked.num_top, asked.tools) == (True, True, 3, [TOOL])
    assert (asked.settings["seed"], asked.device_budget_bytes) == (5, 1000)
    assert read_chat(chat(tools=[TOOL], tool_choice="none")).tools == []


def test_calls_and_results_of_tools_go_to_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    asked = read_chat(chat(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}, result]))
    assert asked.messages is not None
    assert asked.messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}
    assert asked.messages[2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tools": "all"}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"stream_options": []}, None),
        ({"stream_options": "x"}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"device_budget_bytes": 0}, "device_budget_bytes"),
        ({"temperature": 9}, "temperature"),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(changes: dict[str, Any], param: str | None) -> None:
    if param is None:
        read_chat(chat(**changes))
        return
    with pytest.raises(RequestRefused) as refused:
        read_chat(chat(**changes))
    assert refused.value.param == param


def test_a_completion_takes_a_prompt_and_no_tools() -> None:
    asked = read_completion({"model": "m", "prompt": "Once", "logprobs": 2})
    assert (asked.is_chat, asked.prompt, asked.num_top) == (False, "Once", 2)
    with pytest.raises(RequestRefused, match="tools are for /v1/chat/completions"):
        read_completion({"model": "m", "prompt": "Once", "tools": [TOOL]})
    with pytest.raises(RequestRefused, match="the body is a JSON list"):
        read_completion([])
