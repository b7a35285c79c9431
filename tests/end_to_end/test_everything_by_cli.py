"""Everything that the pages do, done by the command line against a running stack: over the API alone, with real processes.

The commands run in this process, which saves each a start of Python; all they know of the stack is its address and a token.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headroom.client import HeadroomClient
from headroom.commands.main import main
from headroom.commands.tables import short_id
from tests.breadth import WHOLE_ROADS
from tests.end_to_end.site import writer
from tests.end_to_end.site.stack import Stack, running_stack
from tests.end_to_end.test_survival import TEXT
from tests.worker.processes import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.breadth(WHOLE_ROADS)]

NUM_STEPS = 6
JOB: dict[str, Any] = {
    "name": "by-cli",
    "model": "tiny",
    "dataset": "verse",
    "workload": {
        "sequence_length": 32,
        "global_batch_size": 2,
        "num_steps": NUM_STEPS,
        "eval_every_steps": 0,
        "eval_batches": 1,
        "checkpoint_every_steps": 3,
        "sample_tokens": 4,
    },
    "goal": {"device_budget_bytes": "1 GiB"},
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as stack:
        yield stack


class Terminal:
    """One person at a terminal that is none: plain lines."""

    def __init__(self, capsys: pytest.CaptureFixture[str], url: str, token: str) -> None:
        self._capsys = capsys
        self._connection = ["--url", url, "--token", token]
        self.client = HeadroomClient(url, token=token)

    def run(self, *words: Any, exit_code: int = 0) -> str:
        """Run a command and return its output."""
        assert main([*map(str, words), *self._connection]) == exit_code, self._capsys.readouterr()
        return self._capsys.readouterr().out

    def until(self, job_id: str, **wanted: Any) -> Any:
        """The job, once it is so."""

        def found() -> Any:
            job: Any = self.client.job(job_id)
            return job if all(job[name] == value for name, value in wanted.items()) else None

        return wait_for(found, what=f"{job_id} to be {wanted}", timeout_s=90)


@pytest.fixture
def terminal(stack: Stack, capsys: pytest.CaptureFixture[str]) -> Iterator[Terminal]:
    url = stack.start_web()
    terminal = Terminal(capsys, url, stack.ask("token", name="ada", scope="admin"))
    with terminal.client:
        yield terminal


def test_everything_that_the_pages_do_is_done_by_the_command_line(
    stack: Stack, terminal: Terminal, tmp_path: Path
) -> None:
    try:
        model_id = manage_models_and_datasets(terminal, tmp_path)
        plan(terminal, tmp_path)
        first = train(terminal, tmp_path)
        second = steer(terminal, tmp_path)
        look_back(terminal, first, second, tmp_path)
        go_on_with(terminal, tmp_path, first)
        delete_and_restore(terminal, model_id)
        share(terminal)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{stack.logs()}") from error


def manage_models_and_datasets(terminal: Terminal, folder: Path) -> Any:
    tiny = folder / "tiny"
    writer.write_weights(tiny)
    (tiny / "config.json").write_text(json.dumps(writer.CONFIG))
    (folder / "verse.txt").write_text(TEXT)
    (folder / "questions.jsonl").write_text('{"prompt": "In the"}\n{"prompt": "And God"}\n')
    place, row = terminal.run("models", "add", tiny).splitlines()[:2]
    assert place.startswith("uploaded, because ")
    [model_id, name] = row.split()
    assert name == "tiny"
    assert "tiny" in terminal.run("models", "list")
    assert "word embedding" in terminal.run("models", "show", "tiny")
    assert "not_asked" in terminal.run("models", "cards", "tiny")
    terminal.run("datasets", "add", folder / "verse.txt")
    dataset_id = terminal.run("datasets", "add", folder / "verse.txt", "--name", "spare").split()[0]
    assert "2 prompts" in terminal.run("datasets", "add", folder / "questions.jsonl", "--prompts")
    assert "characters" in terminal.run("datasets", "show", "verse")
    terminal.run("datasets", "delete", "spare")
    assert "spare" not in terminal.run("datasets", "list")
    assert "spare is back" in terminal.run("datasets", "restore", dataset_id)
    assert "no upload is open" in terminal.run("uploads", "list")
    return model_id


def plan(terminal: Terminal, folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    priced = terminal.run("price", folder / "job.yaml")
    assert re.search(r"^chosen .* fits ", priced, re.MULTILINE)
    assert "keep_all" in priced
    assert "peak" in terminal.run("frontier", folder / "job.yaml")
    ranked = terminal.run("cards", folder / "job.yaml", "--card", "RTX 4090", "--card", "T4")
    assert "RTX 4090" in ranked


def train(terminal: Terminal, folder: Path) -> str:
    followed = terminal.run("submit", folder / "job.yaml", "--follow")
    assert f"succeeded · step {NUM_STEPS} of {NUM_STEPS}" in followed
    without_file = ["--model", "tiny", "--dataset", "verse", "--steps", 2, "--sequence-length", 32, "--batch", 2]
    options = ["--recipe", "exact", "--budget", "1 GiB", "--name", "by-options"]
    by_options = terminal.run("submit", *without_file, *options, "--follow")
    assert "recipe exact, device memory at most 1.00 GiB" in by_options
    assert "succeeded · step 2 of 2" in by_options
    return followed.split()[0]


def steer(terminal: Terminal, folder: Path) -> str:
    """A long job: moved, paused, resumed, stopped, retried and stopped again before it has begun."""
    long = {**JOB, "name": "long", "workload": {**JOB["workload"], "num_steps": 100_000}}
    (folder / "long.yaml").write_text(yaml.safe_dump(long))
    job_id = terminal.run("submit", folder / "long.yaml", "--plan", "keep_all").split()[0]
    terminal.until(job_id, state="running", phase="training")
    terminal.run("pause", job_id)
    terminal.until(job_id, state="queued", paused=True)
    assert "Paused" in terminal.run("queue")
    assert "priority -2" in terminal.run("priority", job_id, "-2")
    terminal.run("resume", job_id)
    terminal.until(job_id, state="running", phase="training")
    terminal.run("cancel", job_id)
    terminal.until(job_id, state="cancelled")
    again = terminal.run("retry", job_id).split()[0]
    terminal.run("cancel", again, "--discard")
    terminal.until(again, state="cancelled")
    return job_id


def look_back(terminal: Terminal, first: str, second: str, folder: Path) -> None:
    assert short_id(first) in terminal.run("list", "--state", "succeeded")
    assert short_id(second) in terminal.run("list", "--text", "long")
    assert "device peak" in terminal.run("show", first)
    assert "training" in terminal.run("logs", first)
    assert "succeeded" in terminal.run("events", first)
    assert "step" in terminal.run("checkpoints", second)
    assert "tfevents" in terminal.run("files", first)
    steps = list(csv.DictReader(io.StringIO(terminal.run("metrics", first))))
    assert [int(row["step"]) for row in steps] == list(range(1, NUM_STEPS + 1))
    assert re.search(r"^steps +\d", terminal.run("compare", first, second), re.MULTILINE)
    assert "clone.yaml" in terminal.run("clone", first, "-o", folder / "clone.yaml")
    assert yaml.safe_load((folder / "clone.yaml").read_text())["workload"]["num_steps"] == NUM_STEPS
    terminal.run("download", first, "-o", folder / "files")
    assert any(file.suffix == ".safetensors" for file in (folder / "files").rglob("*"))
    [machine] = terminal.client.machines()
    assert machine["name"] in terminal.run("machines", "list")
    assert "peak memory was predicted within" in terminal.run("machines", "show", machine["name"])


def go_on_with(terminal: Terminal, folder: Path, job_id: str) -> None:
    """Generate with a trained model, and train it further."""
    model_id, name = terminal.run("models", "add", "--from-job", job_id).split()
    assert name == JOB["name"]
    assert f"trained by {job_id}" in terminal.run("models", "show", model_id)
    options = ["--max-new-tokens", "3", "--budget", "1GiB", "-o", folder / "answers"]
    terminal.run("generate", "--model", model_id, "--prompts", "questions", *options)
    assert len((folder / "answers" / "results.jsonl").read_text().splitlines()) == 2
    further = {**JOB, "name": "further", "model": name, "workload": {**JOB["workload"], "mode": "finetune"}}
    (folder / "further.yaml").write_text(yaml.safe_dump(further))
    assert "succeeded" in terminal.run("submit", folder / "further.yaml", "--follow")


def delete_and_restore(terminal: Terminal, model_id: str) -> None:
    terminal.run("models", "delete", model_id)
    assert "tiny is back" in terminal.run("models", "restore", model_id)


def share(terminal: Terminal) -> None:
    """Share a project, list its members, and add a webhook."""
    assert "yours" in terminal.run("projects", "list")
    project = terminal.run("projects", "create", "lab").split()[0]
    assert "ada" in terminal.run("projects", "members", project)
    assert "tiny" not in terminal.run("models", "list", "--work-in", "lab")
    assert "project.create" in terminal.run("audit", "--project", project)
    assert "none" in terminal.run("webhooks", "list", project)
    assert "test" in terminal.run("tokens", "list")
