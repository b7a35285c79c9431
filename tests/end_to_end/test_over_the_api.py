"""A new model from upload to weights over the API alone: profiled, priced, trained and watched with real processes.

On SQLite and on a real PostgreSQL; one job each, of which the tests look at one side after the other.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from optimizer.search.answer.baselines import BASELINES
from tests.end_to_end.site.stack import Stack, running_stack
from tests.end_to_end.test_survival import CONFIG, TEXT
from tests.postgresql import create_database
from tests.worker.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth]

NUM_STEPS = 12
CHECKPOINT_EVERY = 5
WORKLOAD: dict[str, Any] = {
    "sequence_length": 128,
    "global_batch_size": 4,
    "num_steps": NUM_STEPS,
    "warmup_steps": 2,
    "eval_every_steps": 0,
    "eval_batches": 1,
    "checkpoint_every_steps": CHECKPOINT_EVERY,
    "sample_tokens": 4,
}
PRICED_WITHIN_S = 300
TRAINED_WITHIN_S = 180


@dataclass(kw_only=True)
class Story:
    """Events that the client saw, in order."""

    client: httpx.Client
    stack: Stack
    waited_for: list[str] = field(default_factory=list)
    offers: dict[str, dict] = field(default_factory=dict)
    spec: dict = field(default_factory=dict)
    created: httpx.Response | None = None
    replayed: httpx.Response | None = None
    events: list[tuple[str, dict]] = field(default_factory=list)
    web_maps: str = ""

    def get(self, path: str) -> Any:
        answer = self.client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def job(self) -> Any:
        return self.get(f"jobs/{self.created.json()['id']}")

    def seen(self, kind: str) -> list[Any]:
        return [document for name, document in self.events if name == kind]

    def price(self, spec: dict[str, Any]) -> dict[str, Any] | None:
        """The offers by label, once the model is profiled."""
        answer = self.client.post("plans", json=spec)
        if answer.status_code == 202:
            self.waited_for.append(answer.json()["waiting_for"])
            return None
        assert answer.status_code == 200, answer.text
        return {offer["label"]: offer for offer in answer.json()["offers"]}

    def follow(self) -> None:
        """The job's event stream to its end."""
        path, headers = f"jobs/{self.created.json()['id']}/events", {"Accept": "text/event-stream"}
        with self.client.stream("GET", path, headers=headers, timeout=TRAINED_WITHIN_S) as stream:
            kind = ""
            for line in stream.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    self.events.append((kind, json.loads(value)))
                if line == "" and kind == "done":
                    return


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    # a database for each set-up: pytest sets up again where the tests of this module did not run in one go
    is_postgresql = request.param == "postgresql"
    database_url = create_database(request.getfixturevalue("postgresql_url")) if is_postgresql else None
    with running_stack(database_url=database_url) as stack:
        assert stack.ask("database") == request.param
        yield stack


@pytest.fixture(scope="module")
def story(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A person uploads a model and a text, asks for prices until there are any, takes the chosen offer and watches."""
    url = stack.start_web()
    headers = {"Authorization": f"Bearer {stack.ask('token', name='ada')}"}
    with httpx.Client(base_url=f"{url}/api/v1/", headers=headers, timeout=60) as client:
        try:
            yield tell(Story(client=client, stack=stack))
        except (AssertionError, httpx.HTTPError) as error:
            raise AssertionError(f"{error}\n{stack.logs()}") from error


def tell(story: Story) -> Story:
    client = story.client
    model = client.post("models", data={"name": "mine"}, files={"config": ("config.json", json.dumps(CONFIG))})
    dataset = client.post("datasets", data={"name": "verse"}, files={"file": ("verse.txt", TEXT)})
    assert (model.status_code, dataset.status_code) == (201, 201), model.text + dataset.text
    spec = {"name": "spine", "model": model.json()["id"], "dataset": dataset.json()["id"], "workload": WORKLOAD}
    roomy = {**spec, "goal": {"device_budget_bytes": "4 GiB"}}
    plain = wait_for(lambda: story.price(roomy), what="a price", timeout_s=PRICED_WITHIN_S)["keep_all"]
    budget_bytes = plain["prediction"]["device_peak_bytes"] * 8 // 10
    story.spec = {**spec, "goal": {"device_budget_bytes": budget_bytes}}
    story.offers = story.price(story.spec)
    body, key = {"spec": story.spec, "plan_id": story.offers["chosen"]["id"]}, {"Idempotency-Key": "once"}
    story.created, story.replayed = (client.post("jobs", json=body, headers=key) for _ in range(2))
    assert story.created.status_code == 201, story.created.text
    story.follow()
    story.web_maps = Path(f"/proc/{story.stack.pid('web')}/maps").read_text()
    return story


def test_a_new_model_is_priced_once_a_worker_has_profiled_it(story: Story) -> None:
    assert story.waited_for[0] == "profile"
    assert list(story.offers) == ["chosen", *BASELINES]
    assert story.offers["chosen"]["verdict"] == "fits"
    assert story.offers["keep_all"]["verdict"] == "does_not_fit"
    assert story.get("models")["results"][0]["profile"] == "ready"
    assert story.get("machines")["results"][0]["online"]


def test_the_job_ran_the_plan_that_was_offered_and_ends_with_weights(story: Story) -> None:
    job = story.job()
    assert job["state"] == "succeeded", f"{job}\n{story.stack.logs()}"
    assert job["plan"] == story.offers["chosen"]["plan"]
    assert (job["step"], job["attempt"]) == (NUM_STEPS, 1)
    assert job["summary"]["validation_loss"] < job["summary"]["validation_loss_start"]


def test_the_measured_peak_stays_under_the_budget_that_plain_training_exceeds(story: Story) -> None:
    [attempt] = story.stack.ask("attempts", job=story.job()["id"])
    budget_bytes = story.spec["goal"]["device_budget_bytes"]
    assert attempt["outcome"] == "succeeded"
    assert attempt["measured"]["num_steps"] == NUM_STEPS - 1
    assert attempt["measured"]["device_peak_bytes"] <= budget_bytes
    assert budget_bytes < story.offers["keep_all"]["prediction"]["device_peak_low_bytes"]
    assert story.get("machines")["results"][0]["calibration"]["num_runs"] == 1


def test_the_stream_begins_with_a_snapshot_has_every_step_and_ends(story: Story) -> None:
    names = [name for name, _ in story.events]
    assert (names[0], names[-1]) == ("snapshot", "done")
    snapshot = story.events[0][1]
    told = snapshot["metrics"]["steps"] + [record for record in story.seen("sample") if record["kind"] == "step"]
    assert sorted({record["step"] for record in told}) == list(range(1, NUM_STEPS + 1))
    assert snapshot["job"]["id"] == story.job()["id"]
    assert story.seen("state")[-1]["state"] == "succeeded"


def test_afterwards_the_record_holds_every_step_checkpoint_and_move(story: Story) -> None:
    job = story.job()["id"]
    metrics = story.get(f"jobs/{job}/metrics")
    assert [record["step"] for record in metrics["steps"]] == list(range(1, NUM_STEPS + 1))
    assert len(metrics["evals"]) == 2
    steps = [row["step"] for row in story.get(f"jobs/{job}/checkpoints")["results"]]
    assert steps[0] == CHECKPOINT_EVERY * 2
    moves = [row["to_state"] for row in story.get(f"jobs/{job}/events")["results"] if row["to_state"]]
    assert [move for move, before in zip(moves, ["", *moves], strict=False) if move != before] == [
        "queued",
        "starting",
        "running",
        "succeeded",
    ]


def test_what_is_downloaded_is_what_was_recorded(story: Story) -> None:
    rows = story.get(f"jobs/{story.job()['id']}/artifacts")["results"]
    weights = next(row for row in rows if row["name"].endswith(".safetensors"))
    answer = story.client.get(f"artifacts/{weights['id']}/download")
    assert answer.status_code == 200
    assert len(answer.content) == weights["num_bytes"]
    assert hashlib.sha256(answer.content).hexdigest() == weights["sha256"]


def test_a_request_that_was_sent_twice_made_one_job(story: Story) -> None:
    assert story.replayed.status_code == 201
    assert story.replayed.json()["id"] == story.created.json()["id"]
    assert story.replayed.headers["Idempotent-Replayed"] == "true"
    assert len(story.get("jobs")["results"]) == 1


def test_the_web_process_has_priced_without_torch(story: Story) -> None:
    assert "numpy" in story.web_maps
    assert "libtorch" not in story.web_maps
