"""``headroom chat`` in front of a table of answers."""

import io
import json
import sys
from typing import Any

import pytest

from headroom.commands import main as cli
from tests.worker.answering import AnsweringService

PATH = "/chat/completions"


def stream(*pieces: str, reason: str = "stop") -> bytes:
    chunks: list[Any] = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in pieces]
    chunks.append({"choices": [{"delta": {}, "finish_reason": reason}]})
    lines = [": the model is being loaded", *(f"data: {json.dumps(chunk)}" for chunk in chunks), "data: [DONE]"]
    return "\n\n".join(lines).encode() + b"\n\n"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> AnsweringService:
    service = AnsweringService({("POST", PATH): (200, stream("Noah", " did."))})
    monkeypatch.setattr(cli, "connect", service.connect)
    return service


def test_one_question_is_answered_on_standard_output(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["chat", "m", "--once", "Who?", "--system", "Be brief.", "--temperature", "0", "--budget", "1 GiB"]
    assert cli.main(command) == 0
    found = capsys.readouterr()
    assert (found.out, found.err) == ("Noah did.\n", "(the model is being loaded)\n")
    assert service.sent(PATH) == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
            "stream": True,
            "temperature": 0.0,
            "device_budget_bytes": 1 << 30,
        }
    ]


def test_a_conversation_remembers_and_begins_anew(
    service: AnsweringService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n\nAnd why?\n/new\nWhere?\n"))
    assert cli.main(["chat", "m"]) == 0
    asked = [[message["content"] for message in body["messages"]] for body in service.sent(PATH)]
    assert asked == [["Who?"], ["Who?", "Noah did.", "And why?"], ["Where?"]]


def test_an_answer_that_breaks_off_is_an_error(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    begun = b'data: {"choices": [{"delta": {"content": "No"}, "finish_reason": null}]}\n\n'
    broken = begun + b'data: {"error": {"message": "ask again"}}\n\n'
    service.answers["POST", PATH] = (200, broken)
    assert cli.main(["chat", "m", "--once", "Who?"]) == 1
    assert capsys.readouterr().err == "headroom: ask again\n"


def test_a_refusal_and_an_unknown_size_are_said(service: AnsweringService, capsys: pytest.CaptureFixture[str]) -> None:
    problem = {"title": "Not found", "detail": "the model 'm' is not there", "hint": "", "code": "model_not_found"}
    service.answers["POST", PATH] = (404, problem)
    assert cli.main(["chat", "m", "--once", "Who?"]) == 1
    assert "the model 'm' is not there" in capsys.readouterr().err
    assert cli.main(["chat", "m", "--budget", "much"]) == 2
