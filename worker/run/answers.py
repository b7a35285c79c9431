"""A finished line as people read it: of a plain line a flat object, of a line of OpenAI's Batch API that API's own form.

https://platform.openai.com/docs/api-reference/batch/request-output
"""

import time
import uuid
from typing import Any

from optimizer.data.prompts import CHAT_URL, LineProblem, PromptLine
from worker.run.results import Result


def answer(
    line: PromptLine, *, text: str, finish_reason: str, prompt_tokens: int, completion_tokens: int, job_id: str
) -> Result:
    """finish_reason: ``stop`` or ``length``."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if line.form == "plain":
        record = {
            "id": line.id,
            "line": line.number,
            "text": text,
            "finish_reason": finish_reason,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
        }
    else:
        body = _body(line, text=text, finish_reason=finish_reason, usage=usage)
        record = _batch_record(line, status_code=200, body=body, job_id=job_id)
    return Result(
        index=line.index, record=record, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
    )


def refusal(line: PromptLine, problem: LineProblem, *, job_id: str) -> Result:
    """The answer to a line that was not generated for."""
    if line.form == "plain":
        error = {"code": problem.code, "message": problem.message, "param": problem.param}
        record: dict[str, Any] = {"id": line.id, "line": line.number, "error": error}
    else:
        error = {
            "message": problem.message,
            "type": "invalid_request_error",
            "param": problem.param,
            "code": problem.code,
        }
        record = _batch_record(line, status_code=400, body={"error": error}, job_id=job_id)
    return Result(index=line.index, record=record, is_error=True)


def _body(line: PromptLine, *, text: str, finish_reason: str, usage: dict[str, int]) -> dict[str, Any]:
    is_chat = line.url == CHAT_URL
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    choice |= {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": line.model,
        "choices": [choice],
        "usage": usage,
    }


def _batch_record(line: PromptLine, *, status_code: int, body: dict[str, Any], job_id: str) -> dict[str, Any]:
    request_id = f"batch_req_{job_id.removeprefix('job_')}_{line.number}"
    return {
        "id": request_id,
        "custom_id": line.id,
        "response": {"status_code": status_code, "request_id": request_id, "body": body},
        "error": None,
    }
