"""The openai package, unmodified, against a running stack: answers while one waits, base and tuned, from a model that is held."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from headroom.client import HeadroomClient
from optimizer.data.bundled import CHATS_FILE
from tests.breadth import OPENAI_API
from tests.end_to_end.site.stack import Jobs, Stack, running_stack
from tests.worker.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(OPENAI_API)]

MODEL_FOLDER = Path(__file__).parents[2] / "optimizer" / "models" / "bundled" / "headroom-chat-4m"
PLAN = {
    "batch": {"micro_batch_size": 4, "accumulation_steps": 1},
    "activations": {"per_block": ["keep"] * 4},
}
QUESTION: list[Any] = [{"role": "user", "content": "Who built the ark?"}]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def token(stack: Stack) -> str:
    return str(stack.ask("token", name="ada"))


@pytest.fixture(scope="module")
def service(stack: Stack, token: str) -> Iterator[HeadroomClient]:
    url = stack.start_web()
    with HeadroomClient(url, token=token) as client:
        client.create_model(MODEL_FOLDER, name="chat")
        wait_for(lambda: client.machines(), what="a machine", timeout_s=60)
        yield client


@pytest.fixture(scope="module")
def client(service: HeadroomClient, stack: Stack, token: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{service.url}/v1", api_key=token, max_retries=0, timeout=240) as client:
        try:
            yield client
        finally:
            print(stack.logs())


def ask(client: OpenAI, question: str = "Who built the ark?", **changes: Any) -> str:
    asked = {"model": "chat", "temperature": 0, "max_tokens": 24, **changes}
    answer = client.chat.completions.create(messages=[{"role": "user", "content": question}], **asked)
    return answer.choices[0].message.content


def test_a_model_that_nobody_held_answers(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="chat", messages=QUESTION, temperature=0, max_tokens=24)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 24


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="chat", messages=QUESTION, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == ask(client)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens >= 1
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert len(chunks) > 4


def test_an_answer_ends_before_a_stop_text(client: OpenAI) -> None:
    whole = ask(client, max_tokens=40)
    stop = whole[len(whole) // 2 :][:3]
    cut = client.chat.completions.create(model="chat", messages=QUESTION, temperature=0, max_tokens=40, stop=[stop])
    assert cut.choices[0].message.content == whole[: whole.find(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_logprobs_are_those_of_the_tokens(client: OpenAI) -> None:
    choice = client.chat.completions.create(
        model="chat", messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    ).choices[0]
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    for each in choice.logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].token == each.token
        assert each.logprob == each.top_logprobs[0].logprob <= 0


def test_a_plain_completion_and_its_seed(client: OpenAI) -> None:
    first, again, other = (
        client.completions.create(model="chat", prompt="And the", max_tokens=12, temperature=1, seed=seed, logprobs=2)
        for seed in (7, 7, 8)
    )
    assert first.object == "text_completion"
    assert first.choices[0].text == again.choices[0].text != other.choices[0].text
    assert len(first.choices[0].logprobs.tokens) == first.usage.completion_tokens
    assert first.choices[0].finish_reason == "length"


def test_eight_askers_at_once_get_the_answers_they_get_alone(client: OpenAI) -> None:
    questions = [f"Tell me about {name}." for name in ("Noah", "Moses", "David", "Ruth", "Paul", "Peter", "Mary", "Adam")]
    alone = [ask(client, question, max_tokens=40) for question in questions]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda question: ask(client, question, max_tokens=40), questions)) == alone


def test_what_is_wrong_reaches_the_client_as_its_own_errors(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'nobody' is not there"):
        ask(client, model="nobody")
    with pytest.raises(openai.BadRequestError, match="at most 512"):
        ask(client, "long " * 600)
    with pytest.raises(openai.BadRequestError, match="at most 512"):
        list(client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "long " * 600}], stream=True))
    with pytest.raises(openai.BadRequestError, match="n is 2, which is not supported") as refused:
        ask(client, n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError, match="no place for tools"):
        ask(client, tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}])
    with pytest.raises(openai.AuthenticationError, match="valid API token"):
        ask(client.with_options(api_key="hr_wrong"))


def test_base_and_tuned_are_held_once_and_differ(client: OpenAI, service: HeadroomClient, stack: Stack) -> None:
    run = train_adapter(service, stack)
    assert Jobs(stack).wait_for_end(run)["state"] == "succeeded", stack.logs()
    base, tuned = ask(client), ask(client, model=f"chat:{run}")
    assert ask(client, model=run) == tuned
    assert tuned != base
    with ThreadPoolExecutor(4) as pool:
        mixed = list(pool.map(lambda model: ask(client, model=model), ("chat", run, "chat", run)))
    assert mixed == [base, tuned, base, tuned]
    held = [job for job in service.jobs() if job["kind"] == "serve" and not job["is_terminal"]]
    assert len(held) == 1
    names = {model.id for model in client.models.list()}
    assert {"chat", f"chat:{run}"} <= names


def train_adapter(service: HeadroomClient, stack: Stack) -> str:
    """The job, under a plan that is given: to trace the model with adapters and to search takes longer than to train them."""
    (model,) = service.models()
    dataset = service.create_dataset(CHATS_FILE, name="chats")
    workload = {
        "mode": "finetune", "sequence_length": 64, "global_batch_size": 4, "num_steps": 12, "eval_batches": 1,
        "learning_rate": 0.02, "adapter": {"rank": 4}, "export": {"adapter": "alone"}, "sample_tokens": 0,
    }  # fmt: skip
    return str(
        stack.ask(
            "create_job",
            model=model["id"],
            dataset=dataset["id"],
            workload=workload,
            plan=PLAN,
            budget_bytes=2**30,
            kind="train",
            owner="ada",
        )
    )


def test_a_worker_that_is_killed_ends_the_answer_with_an_error(client: OpenAI, stack: Stack) -> None:
    stream = client.chat.completions.create(
        model="chat", messages=QUESTION, temperature=1, max_tokens=400, stream=True
    )
    next(stream)
    killer = threading.Timer(0.05, lambda: stack.kill("worker"))
    killer.start()
    begun_s = time.monotonic()
    try:
        with pytest.raises(openai.APIError, match="ask again"):
            for _ in stream:
                pass
    finally:
        killer.join()
        stack.start_worker()
    assert time.monotonic() - begun_s < 60
