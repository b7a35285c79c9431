"""Files of prompts: both forms, each wrong line by its code, and how many tokens they have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import InvalidDataset, InvalidModel
from optimizer.data.chat_facts import ChatFacts, read_chat_facts
from optimizer.data.inspect_prompts import inspect_prompts, main
from optimizer.data.prompt_tokens import PromptTokenizer, count_tokens, length_problem
from optimizer.data.prompts import LineProblem, read_prompts
from optimizer.workload import GenerationRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(*lines: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return make


def request(custom_id: str = "a", *, url: str = CHAT, method: str = "POST", **body: Any) -> dict[str, Any]:
    wanted = {"messages": HI} if url == CHAT else {"prompt": "Hi"}
    return {"custom_id": custom_id, "method": method, "url": url, "body": {"model": "m", **wanted, **body}}


def problem_of(path: Path) -> LineProblem:
    [line] = read_prompts(path)
    return line.problem


def test_a_plain_line_is_known_by_its_number_or_its_id(write: Callable[..., Path]) -> None:
    first, second = read_prompts(write({"prompt": "one"}, "", {"prompt": "two", "id": "b"}))
    assert (first.id, first.index, first.number, first.prompt) == ("1", 0, 1, "one")
    assert (second.id, second.index, second.number) == ("b", 1, 3)


def test_a_line_overrides_what_holds_for_all_and_its_seed_counts_on(write: Callable[..., Path]) -> None:
    common = GenerationRequest(max_new_tokens=9, temperature=0.5, seed=7)
    first, second = read_prompts(write({"prompt": "x", "stop": "end"}, {"prompt": "x", "max_new_tokens": 2, "seed": 1}))
    assert first.workload(common) == GenerationRequest(max_new_tokens=9, temperature=0.5, seed=7, stop=("end",))
    assert second.workload(common) == GenerationRequest(max_new_tokens=2, temperature=0.5, seed=1)
    assert next(read_prompts(write({"prompt": "x"}, {"prompt": "y"}))).workload(common).seed == 7


def test_a_chat_request_is_read_with_openais_names(write: Callable[..., Path]) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]}]
    [line] = read_prompts(write(request(messages=parts, max_completion_tokens=5, seed=-1, stop=["a"], n=1, user="u")))
    assert line.problem is None
    assert (line.form, line.id, line.url, line.model) == ("batch", "a", CHAT, "m")
    assert line.messages == ({"role": "user", "content": "Hello"},)
    assert line.settings == {"max_new_tokens": 5, "seed": 2**63 - 1, "stop": ("a",)}


def test_a_null_parameter_is_as_if_it_were_left_out(write: Callable[..., Path]) -> None:
    [line] = read_prompts(write(request(temperature=None, tools=None)))
    assert (line.problem, line.settings) == (None, {})


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("nope", "invalid_json", None),
        ("[1]", "invalid_json", None),
        ('{"prompt": NaN}', "invalid_json", None),
        ("[" * 100_000, "invalid_json", None),
        ('{"prompt": ' + "[" * 40 + "]" * 40 + "}", "invalid_json", None),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": "a\0b"}, "invalid_value", "prompt"),
        ('{"prompt": "\\ud800"}', "invalid_value", "prompt"),
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": "x", "messages": HI}, "missing_required_parameter", "prompt"),
        ({"prompt": "x", "max_new_tokens": 0}, "invalid_value", "max_new_tokens"),
        ({"prompt": "x", "colour": 1}, "unknown_parameter", "colour"),
        ({"prompt": "x", "id": []}, "invalid_id", "id"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"custom_id": "a", "method": "POST", "url": CHAT}, "missing_field", "body"),
        ({**request(), "custom_id": None}, "missing_field", "custom_id"),
        (request(method="GET"), "invalid_method", "method"),
        ({**request(), "url": "/v1/embeddings"}, "invalid_url", "url"),
        (request(prompt="x"), "unknown_parameter", "prompt"),
        (request(url=COMPLETIONS, prompt=[1, 2]), "invalid_value", "prompt"),
        (request(n=2), "unsupported_parameter", "n"),
        (request(n=True), "unsupported_parameter", "n"),
        (request(stream=True), "unsupported_parameter", "stream"),
        (request(tools=[{"type": "function"}]), "unsupported_parameter", "tools"),
        (request(temperature=3), "invalid_value", "temperature"),
        (request(stop=["a"] * 5), "invalid_value", "stop"),
        (request(shout=True), "unknown_parameter", "shout"),
        (
            request(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "invalid_value",
            "messages[0].content",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_kept_with_what_is_wrong(
    write: Callable[..., Path], line: dict[str, Any] | str, code: str, param: str | None
) -> None:
    found = problem_of(write(line))
    assert (found.code, found.param) == (code, param)


def test_the_second_line_of_one_id_is_refused(write: Callable[..., Path]) -> None:
    first, second = read_prompts(write(request("a"), request("a")))
    assert first.problem is None
    assert second.problem.code == "duplicate_id"


def test_a_line_that_is_too_long_or_no_text_refuses_the_file(write: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidDataset, match="line 1: longer than allowed"):
        list(read_prompts(write({"prompt": "x" * 1_000_001})))
    (tmp_path / "bytes").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(InvalidDataset, match="allowed: UTF-8 text"):
        list(read_prompts(tmp_path / "bytes"))
    with pytest.raises(InvalidDataset, match="the file holds none"):
        list(read_prompts(write("", " ")))


def test_what_is_in_a_file_is_counted(write: Callable[..., Path]) -> None:
    facts = inspect_prompts(write(request("a"), request("b", url=COMPLETIONS, model="n"), {"prompt": "x"}, "nope"))
    assert (facts.num_prompts, facts.num_refused, facts.num_batch_lines) == (4, 1, 2)
    assert facts.urls == {CHAT: 1, COMPLETIONS: 1}
    assert facts.models == {"m": 1, "n": 1}
    assert facts.refused_by_code == {"invalid_json": 1}
    assert facts.problems[0].line == 4
    assert facts.preview.startswith("user: Hi\n---\n")


def test_tokens_are_counted_by_what_lines_ask_for(write: Callable[..., Path]) -> None:
    lines = write({"prompt": "In the beginning"}, {"prompt": "In the beginning", "max_new_tokens": 3}, "nope")
    tokenizer = PromptTokenizer(None, vocab_size=4096)
    counts = count_tokens(tokenizer.encode(read_prompts(lines)))
    [whole] = {count.prompt_tokens for count in counts}
    assert [count.to_json() for count in counts] == [[whole, None, 1], [whole, 3, 1]]


def test_the_command_counts_too_and_says_what_is_wrong_with_a_tokenizer(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("optimizer.data.inspect_prompts.limit_process", lambda **_: None)
    lines = write({"prompt": "In the beginning"})
    assert main([str(lines), "--count", "--vocab-size", "4096"]) == 0
    [[_, new, num]] = json.loads(capsys.readouterr().out)["counts"]
    assert (new, num) == (None, 1)
    assert main([str(lines), "--count", "--vocab-size", "100"]) == 2
    assert "vocab_size is 100" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_conversation_ends_where_the_answer_begins(write: Callable[..., Path], tmp_path: Path) -> None:
    lines = list(read_prompts(write({"messages": HI})))
    [plain] = PromptTokenizer(None, vocab_size=4096).encode(lines)
    tokenizer = PromptTokenizer(None, vocab_size=4096)
    assert tokenizer.decode(plain.ids) == "user: Hi\nassistant:"
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"template": template, "begin_of_text": "#", "end_of_text": ""}))
    own = PromptTokenizer(None, chat_file=file, vocab_size=4096)
    [written] = own.encode(lines)
    assert own.decode(written.ids) == "#[Hi]>"


def test_a_template_that_fails_is_the_lines_fault_and_not_the_files(write: Callable[..., Path], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"template": "{{ raise_exception('no system') }}"}))
    chat, plain = PromptTokenizer(None, chat_file=file, vocab_size=4096).encode(
        read_prompts(write({"messages": HI}, {"prompt": "x"}))
    )
    assert chat.problem.code == "invalid_prompt"
    assert "no system" in chat.problem.message
    assert plain.problem is None


def test_a_tokenizer_config_is_read_as_both_generations_of_transformers_write_it() -> None:
    document = {"chat_template": [{"name": "default", "template": "T"}], "eos_token": {"content": "<e>"}, "bos_token": None}
    assert read_chat_facts(document) == ChatFacts(template="T", end_of_text="<e>")
    assert read_chat_facts({"chat_template": "T", "bos_token": "<b>"}) == ChatFacts(template="T", begin_of_text="<b>")
    with pytest.raises(InvalidModel, match="chat_template is not a text"):
        read_chat_facts({"chat_template": 3})


def test_a_prompt_that_leaves_no_room_says_so_in_tokens() -> None:
    assert length_problem(10, 6, max_sequence_length=16) is None
    problem = length_problem(10, 7, max_sequence_length=16)
    assert problem.code == "context_length_exceeded"
    assert "10 tokens and 7 more are asked for, 17 in all; the model has positions for 16" in problem.message
