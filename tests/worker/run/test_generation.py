"""A generate job in the attempt's own process: answers in order, errors by line, stop texts, stopping and going on."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.base.errors import NoFeasiblePlan
from optimizer.base.serialize import from_json, to_json
from optimizer.base.units import MIB
from optimizer.data.prompt_tokens import PromptTokenizer
from optimizer.estimate.generation.pricing import estimate_generation
from optimizer.goal import GenerationGoal
from optimizer.hardware.machine import Machine
from optimizer.models.spec import read_model_spec
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.kv_cache import KvCachePlan
from optimizer.plan.passes.run import TimedPass
from optimizer.profile.generation import GenerationProfile
from optimizer.search.generation.search import search_generation_plans
from optimizer.workload import GenerationRequest
from tests.optimizer.runtime.tiny import artifacts_of
from tests.valkey import Valkey
from tests.webapp.conftest import MACHINE_DOCUMENT
from tests.webapp.generation import CONFIG
from webapp.jobs.specs.generation import summed_workload
from worker.attempt import read_result
from worker.run import generation as generating
from worker.run.exit_codes import EXIT_DONE, EXIT_DRAINED, EXIT_FAILED
from worker.run.reporter import Reporter
from worker.run.runner import StopFlag, run_attempt

LINES = (
    {"prompt": "In the beginning", "id": "first"},
    "nope",
    {"prompt": "And God said, Let there be light: and there was light.", "max_new_tokens": 3},
    {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    },
    {"prompt": "word " * 80, "id": "long"},
)


class Stop(StopFlag):
    """Says stop once so many lines are on the disk."""

    def __init__(self, folder: Path | None = None, *, after: int = 0) -> None:
        super().__init__()
        self._folder, self._after = folder, after

    def __call__(self) -> bool:
        if self._folder is None:
            return False
        parts = list((self._folder / "results").glob("part-*.jsonl"))
        return sum(part.read_bytes().count(b"\n") for part in parts) >= self._after


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of a random model, as an upload leaves it."""
    import torch
    from safetensors.torch import save_file

    from optimizer.models.build import build_model

    folder = tmp_path_factory.mktemp("weights")
    model = build_model(read_model_spec(CONFIG), dtype=torch.float32, device="cpu", seed=3)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def attempt(weights: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """``attempt.json`` of a number, with changes."""

    def make(
        number: int = 1,
        *,
        lines: list[dict[str, Any]] | tuple[dict[str, str], str, dict[str, Any], dict[str, Any], dict[str, str]] = LINES,
        batch_size: int = 2,
        workload: GenerationRequest | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return {
            "job_id": "job_1",
            "attempt": number,
            "fence": number,
            "kind": "generate",
            "device": "cpu",
            "config": CONFIG,
            "model_folder": str(weights),
            "model_name": "m",
            "weights_folder": str(weights),
            "linked_files": [],
            "end_ids": [],
            "tokenizer_file": None,
            "chat_file": None,
            "prompts": {"file": str(file), "format": "prompts"},
            "workload": to_json(workload or GenerationRequest(max_new_tokens=6)),
            "goal": to_json(GenerationGoal(device_budget_bytes=64 * MIB)),
            "plan": GenerationPlan(batch_size=batch_size).to_json(),
            "prediction": None,
            "job_folder": str(tmp_path / "job"),
            "resume_from": None,
            "earlier_job_folders": [],
            **changes,
        }

    return make


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any], Path]]:
    def carry_out(
        attempt: dict[str, Any], *, should_stop: Callable[..., Any] | Stop | None = None
    ) -> tuple[int, dict[str, Any], Path]:
        folder = tmp_path / "job" / "attempts" / str(attempt["attempt"])
        folder.mkdir(parents=True)
        code = run_attempt(attempt, reporter=Reporter(folder, pipe=None), should_stop=should_stop or Stop())
        return code, read_result(folder), folder

    return carry_out


def records(tmp_path: Path, name: str = "results") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (artifacts_of(tmp_path / "job") / f"{name}.jsonl").read_text().splitlines()]


def text_of(record: dict[str, Any]) -> str:
    return record["text"] if "text" in record else record["response"]["body"]["choices"][0]["message"]["content"]


def test_every_line_is_answered_in_the_order_of_the_file_and_wrong_ones_in_the_errors(
    attempt: Callable[..., dict[str, Any]], run: Callable[..., tuple[int, dict[str, Any], Path]], tmp_path: Path
) -> None:
    code, result, folder = run(attempt())
    assert (code, result["outcome"], result["step"]) == (EXIT_DONE, "succeeded", 5)
    assert result["message"] == "5 of 5 prompts are done, 2 of them with an error"
    first, second, chat = records(tmp_path)
    assert (first["id"], first["completion_tokens"], first["finish_reason"]) == ("first", 6, "length")
    assert (second["id"], second["completion_tokens"]) == ("3", 3)
    assert (chat["custom_id"], chat["response"]["body"]["usage"]["completion_tokens"]) == ("chat", 4)
    assert [record["error"]["code"] for record in records(tmp_path, "errors")] == ["invalid_json", "context_length_exceeded"]
    assert {artifact["kind"] for artifact in result["artifacts"]} == {"results", "errors", "tensorboard"}
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert samples[-1]["kind"] == "generate"
    assert (samples[-1]["prompts_done"], samples[-1]["num_prompts"], samples[-1]["step"]) == (5, 5, 13)
    assert 0 < result["measured"]["device_peak_bytes"] <= 64 * MIB
    timed = [from_json(TimedPass, each) for each in result["measured"]["passes"]]
    assert sum(shape.batch_size for each in timed for shape in each.micro_batches for _ in range(each.count)) == 3
    assert not result["measured"]["draws"]


def test_greedy_answers_are_transformers_own(
    attempt: Callable[..., dict[str, Any]],
    run: Callable[..., tuple[int, dict[str, Any], Path]],
    tmp_path: Path,
    weights: Path,
) -> None:
    import torch

    from optimizer.models.build import build_model, load_weights

    run(attempt(lines=LINES[:1]))
    model: Any = build_model(read_model_spec(CONFIG), dtype=torch.float32, device="cpu", seed=0)
    load_weights(model, weights)
    tokenizer = PromptTokenizer(None, vocab_size=4096)
    ids = torch.tensor([tokenizer.loaded.tokenizer.encode("In the beginning").ids])
    with torch.no_grad():
        made = model.eval().generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert records(tmp_path)[0]["text"] == tokenizer.decode(made[0, ids.shape[1] :].tolist())


def test_a_stop_text_ends_an_answer_before_it(
    attempt: Callable[..., dict[str, Any]], run: Callable[..., tuple[int, dict[str, Any], Path]], tmp_path: Path
) -> None:
    run(attempt(lines=LINES[:1]))
    whole = records(tmp_path)[0]["text"]
    stop = whole[2:4]
    (tmp_path / "job").rename(tmp_path / "before")
    run(attempt(lines=[{**LINES[0], "stop": stop}]))
    cut = records(tmp_path)[0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_a_stop_text_ends_the_work_of_its_sequence_with_the_token_that_completes_it(
    attempt: Callable[..., dict[str, Any]], run: Callable[..., tuple[int, dict[str, Any], Path]], tmp_path: Path
) -> None:
    lines = [{**LINES[0], "max_new_tokens": 40}]
    run(attempt(lines=lines))
    [free] = records(tmp_path)
    # From the middle of what was written, over the ends of tokens.
    stop = free["text"][len(free["text"]) // 3 :][:6]
    (tmp_path / "job").rename(tmp_path / "before")
    _, result, _ = run(attempt(lines=[{**lines[0], "stop": ["not there", stop]}]))
    [cut] = records(tmp_path)
    assert cut["text"] == free["text"][: free["text"].index(stop)]
    assert cut["completion_tokens"] == result["measured"]["num_new_tokens"] < 40 == free["completion_tokens"]


def test_drawn_answers_are_the_same_for_the_same_seed_however_they_are_batched(
    attempt: Callable[..., dict[str, Any]], run: Callable[..., tuple[int, dict[str, Any], Path]], tmp_path: Path
) -> None:
    lines = [{"prompt": "In the beginning"}] * 3
    drawn = GenerationRequest(max_new_tokens=6, temperature=1.5, seed=4)
    run(attempt(lines=lines, workload=drawn, batch_size=1))
    alone = [record["text"] for record in records(tmp_path)]
    (tmp_path / "job").rename(tmp_path / "before")
    run(attempt(lines=lines, workload=drawn, batch_size=3))
    assert [record["text"] for record in records(tmp_path)] == alone
    assert len(set(alone)) == 3


def test_a_job_that_is_stopped_goes_on_where_it_was_and_answers_as_if_it_had_not(
    attempt: Callable[..., dict[str, Any]], run: Callable[..., tuple[int, dict[str, Any], Path]], tmp_path: Path
) -> None:
    run(attempt())
    expected = [text_of(record) for record in records(tmp_path)]
    (tmp_path / "job").rename(tmp_path / "before")
    code, result, _ = run(attempt(batch_size=1), should_stop=Stop(tmp_path / "job", after=3))
    assert (code, result["outcome"], result["step"]) == (EXIT_DRAINED, "drained", 3)
    [part] = (tmp_path / "job" / "results").iterdir()
    before = part.read_bytes()
    part.write_bytes(before + b'{"index": 3, "rec')  # as if killed in mid-write
    code, result, _ = run(attempt(2))
    assert (code, result["step"]) == (EXIT_DONE, 5)
    assert [text_of(record) for record in records(tmp_path)] == expected
    new = sorted((tmp_path / "job" / "results").iterdir())[1].read_text().splitlines()
    assert len(new) == 2


def test_a_retried_job_takes_over_what_the_ended_one_had_finished(
    attempt: Callable[..., dict[str, Any]],
    run: Callable[..., tuple[int, dict[str, Any], Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(attempt())
    (tmp_path / "job").rename(tmp_path / "ended")
    monkeypatch.setattr(generating, "_Requests", None)  # nothing is left to generate
    code, result, _ = run(attempt(earlier_job_folders=[str(tmp_path / "ended")]))
    assert (code, result["measured"]) == (EXIT_DONE, None)
    assert len(records(tmp_path)) == 3


def test_a_budget_that_is_too_small_ends_the_job_with_the_sizes(
    attempt: Callable[..., dict[str, Any]], run: Callable[..., tuple[int, dict[str, Any], Path]]
) -> None:
    code, result, _ = run(attempt(goal=to_json(GenerationGoal(device_budget_bytes=600_000))))
    assert (code, result["reason"]) == (EXIT_FAILED, "out_of_device_memory")
    fields = result["error"]["fields"]
    assert (fields["cause"], fields["allowed_bytes"]) == ("load", 600_000)
    assert result["error"]["fields"]["bytes_by_category"]["weights"] > 0


@pytest.fixture(scope="module")
def profile() -> GenerationProfile:
    from optimizer.profile.trace.generation import profile_generation

    return profile_generation(read_model_spec(CONFIG), representations=("fp32",))


DIES = """
import json, os, signal, sys
from pathlib import Path
from worker.run import results
from worker.run.reporter import Reporter
from worker.run.runner import StopFlag, run_attempt

left, add = int(sys.argv[2]), results.ResultWriter.add

def add_and_die(self, found):
    global left
    add(self, found)
    left -= len(found)
    if left <= 0:
        os.kill(os.getpid(), signal.SIGKILL)

results.ResultWriter.add = add_and_die
folder = Path(sys.argv[1])
run_attempt(json.loads((folder / "attempt.json").read_text()), reporter=Reporter(folder, pipe=None), should_stop=StopFlag())
"""
"""An attempt whose process is killed as soon as so many lines are on the disk."""


def test_a_chosen_plan_killed_among_lines_of_mixed_lengths_repeats_none_and_loses_none(
    attempt: Callable[..., dict[str, Any]],
    run: Callable[..., tuple[int, dict[str, Any], Path]],
    profile: GenerationProfile,
    tmp_path: Path,
) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "And God said, " * (1 + index % 3), "max_new_tokens": most, "id": str(index)}
        for index, most in enumerate((3, 17, 9, 2, 17, 5, 12, 1, 9))
    ]
    tokenizer = PromptTokenizer(None, vocab_size=4096)
    lengths = [len(tokenizer.loaded.tokenizer.encode(line["prompt"]).ids) for line in lines]
    workload = summed_workload(
        [(length, line["max_new_tokens"], 1) for length, line in zip(lengths, lines, strict=True)], max_sequence_length=64
    )
    machine = Machine.from_json(MACHINE_DOCUMENT)

    def choose(budget_bytes: int) -> GenerationPlan:
        goal = GenerationGoal(device_budget_bytes=budget_bytes)
        return search_generation_plans(profile, workload=workload, goal=goal, machine=machine).chosen.plan

    with pytest.raises(NoFeasiblePlan) as caught:
        choose(1)
    budget_bytes = int(1.2 * caught.value.fields["smallest_feasible_bytes"])
    plan = choose(budget_bytes)
    assert plan.weights.place == "host"
    chosen = {
        "lines": lines, "plan": plan.to_json(), "goal": to_json(GenerationGoal(device_budget_bytes=budget_bytes)),
    }  # fmt: skip
    run(attempt(**chosen))
    expected = records(tmp_path)
    (tmp_path / "job").rename(tmp_path / "before")
    folder = tmp_path / "job" / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "attempt.json").write_text(json.dumps(attempt(**chosen)))
    killed = subprocess.run([sys.executable, "-c", DIES, str(folder), "4"], check=False)
    assert killed.returncode == -signal.SIGKILL
    code, result, _ = run(attempt(2, **chosen))
    assert (code, result["step"]) == (EXIT_DONE, len(lines))
    assert records(tmp_path) == expected
    parts = sorted((tmp_path / "job" / "results").iterdir())
    indices = [json.loads(line)["index"] for part in parts for line in part.read_text().splitlines()]
    assert len(parts) == 2
    assert sorted(indices) == list(range(len(lines)))


def test_a_remote_store_that_dies_is_the_reason_and_the_next_attempt_goes_on(
    attempt: Callable[..., dict[str, Any]],
    run: Callable[..., tuple[int, dict[str, Any], Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [{"prompt": f"Line number {index}", "id": str(index)} for index in range(4)]
    run(attempt(lines=lines))
    expected = records(tmp_path)
    (tmp_path / "job").rename(tmp_path / "before")
    remote = GenerationPlan(batch_size=2, kv_cache=KvCachePlan(place="remote")).to_json()
    done = Stop(tmp_path / "job", after=2)
    server = Valkey()
    monkeypatch.setenv("HEADROOM_REMOTE_URL", server.url)

    def kill_after_two_lines() -> bool:
        if done():
            server.kill()
        return False

    try:
        code, result, _ = run(attempt(lines=lines, plan=remote), should_stop=kill_after_two_lines)
        assert (code, result["reason"]) == (EXIT_FAILED, "remote_store_lost")
        assert "does not answer" in result["message"]
        server.start()
        code, result, _ = run(attempt(2, lines=lines, plan=remote))
        assert (code, result["step"]) == (EXIT_DONE, 4)
        assert result["measured"]["remote_peak_bytes"] > 0
        assert server.list_keys() == []
    finally:
        server.close()
    assert records(tmp_path) == expected
    new = sorted((tmp_path / "job" / "results").iterdir())[1].read_text().splitlines()
    assert len(new) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_measured_peak_is_the_predicted_one_to_the_byte(
    attempt: Callable[..., dict[str, Any]],
    run: Callable[..., tuple[int, dict[str, Any], Path]],
    profile: GenerationProfile,
    temperature: float,
) -> None:
    lines = [{"prompt": "And God said, " * repeats} for repeats in (1, 3, 2, 3, 4)]
    tokenizer = PromptTokenizer(None, vocab_size=4096)
    lengths = [len(tokenizer.loaded.tokenizer.encode(line["prompt"]).ids) for line in lines]
    workload = summed_workload([(length, 6, 1) for length in lengths], max_sequence_length=64, draws=temperature > 0)
    machine = Machine.from_json(MACHINE_DOCUMENT)
    predicted = estimate_generation(profile, plan=GenerationPlan(batch_size=2), workload=workload, machine=machine)
    _, result, _ = run(attempt(lines=lines, workload=GenerationRequest(max_new_tokens=6, temperature=temperature)))
    assert result["measured"]["device_peak_bytes"] == predicted.device_peak_bytes
    by_category = result["measured"]["device_bytes_by_category"]
    assert without_zeros(by_category) == without_zeros(predicted.device_bytes_by_category)


def without_zeros(sizes: dict[str, int]) -> dict[str, int]:
    return {category: num_bytes for category, num_bytes in sizes.items() if num_bytes}
