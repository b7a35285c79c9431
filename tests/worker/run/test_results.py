"""Finished lines on disk: read back whole, torn ends passed over, finished files in the order of the input."""

import hashlib
import json
from pathlib import Path
from typing import Any

from optimizer.data.prompts import LineProblem, PromptLine
from worker.run.answers import answer, refusal
from worker.run.results import Result, ResultWriter, read_finished, write_finished


def result(index: int, *, is_error: bool = False, word: str = "x") -> Result:
    return Result(index=index, record={"id": str(index), "text": word}, is_error=is_error, completion_tokens=2)


def add(folder: Path, *results: Any, attempt: int = 1, fence: int = 1) -> None:
    with ResultWriter(folder, attempt=attempt, fence=fence) as writer:
        writer.add(results)


def test_what_was_added_is_read_back_from_all_attempts_and_the_first_of_a_line_holds(tmp_path: Path) -> None:
    add(tmp_path, result(3), result(1, word="first"))
    add(tmp_path, result(1, word="second"), result(0), attempt=2, fence=5)
    found = read_finished([tmp_path])
    assert sorted(found) == [0, 1, 3]
    assert found[1] == result(1, word="first")


def test_a_torn_last_line_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    add(tmp_path, result(0), result(1))
    [part] = (tmp_path / "results").iterdir()
    part.write_bytes(part.read_bytes()[:-5])
    assert sorted(read_finished([tmp_path])) == [0]


def test_jobs_that_were_retried_count_too(tmp_path: Path) -> None:
    add(tmp_path / "old", result(0))
    add(tmp_path / "new", result(1))
    assert sorted(read_finished([tmp_path / "new", tmp_path / "old"])) == [0, 1]


def test_the_finished_files_are_in_the_order_of_the_input_with_their_hashes(tmp_path: Path) -> None:
    finished = {index: result(index, is_error=index == 1) for index in (4, 1, 0)}
    results, errors = write_finished(finished, job_folder=tmp_path, fence=5)
    text = (tmp_path / results.file).read_bytes()
    assert [json.loads(line)["id"] for line in text.splitlines()] == ["0", "4"]
    assert (results.num_bytes, results.sha256) == (len(text), hashlib.sha256(text).hexdigest())
    assert (errors.kind, errors.name) == ("errors", "errors.jsonl")
    assert json.loads((tmp_path / errors.file).read_text())["id"] == "1"


def test_a_later_attempt_leaves_the_files_of_an_earlier_one_as_they_are(tmp_path: Path) -> None:
    [earlier] = write_finished({0: result(0, word="earlier")}, job_folder=tmp_path, fence=5)
    [later] = write_finished({0: result(0, word="later")}, job_folder=tmp_path, fence=7)
    texts = [json.loads((tmp_path / file.file).read_text())["text"] for file in (earlier, later)]
    assert texts == ["earlier", "later"]


def test_without_errors_there_is_no_file_of_them(tmp_path: Path) -> None:
    [only] = write_finished({0: result(0)}, job_folder=tmp_path, fence=5)
    assert only.kind == "results"


def finish(line: PromptLine) -> dict[str, Any]:
    return answer(line, text="t", finish_reason="length", prompt_tokens=3, completion_tokens=2, job_id="job_7").record


def test_a_plain_line_is_answered_flat() -> None:
    assert finish(PromptLine(index=0, number=1, id="a", prompt="x")) == {
        "id": "a",
        "line": 1,
        "text": "t",
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 2,
    }


def test_a_batch_line_is_answered_as_openai_does_it() -> None:
    line = PromptLine(index=0, number=1, id="a", form="batch", url="/v1/chat/completions", model="m")
    record = finish(line)
    body = record["response"]["body"]
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "t", "refusal": None}
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_a_completion_has_its_text_in_the_choice() -> None:
    line = PromptLine(index=0, number=1, id="a", form="batch", url="/v1/completions", model="m")
    assert finish(line)["response"]["body"]["choices"][0]["text"] == "t"


def test_a_refusal_says_why_in_the_lines_own_form() -> None:
    problem = LineProblem(code="invalid_value", message="no", param="stop")
    plain = refusal(PromptLine(index=0, number=1, id="a"), problem, job_id="job_7")
    assert plain.is_error
    assert plain.record["error"] == {"code": "invalid_value", "message": "no", "param": "stop"}
    batch = refusal(PromptLine(index=0, number=1, id="a", form="batch"), problem, job_id="job_7").record
    assert batch["response"]["status_code"] == 400
    assert batch["response"]["body"]["error"]["code"] == "invalid_value"
