"""A finished run's weights become a catalog model: its files, its checks, its refusals."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput
from tests.webapp.conftest import make_spec, make_tiny_model
from tests.webapp.exported import ADAPTER, CONFIG, MODEL, leave, weights_file
from tests.webapp.generation import make_generate_spec, make_prompts
from webapp.accounts.projects import create_project
from webapp.catalog.errors import ModelExists
from webapp.catalog.files.limited import run_limited
from webapp.catalog.models import Dataset, Model
from webapp.catalog.queries import models_visible_to
from webapp.catalog.removal import delete_row
from webapp.jobs.errors import FilesLost, NoModelLeft, WrongState
from webapp.jobs.models import Artifact, Job
from webapp.jobs.specs.generation import read_job_spec
from webapp.jobs.trained_model import create_trained_model, folder_left

FILES = sorted([*MODEL, "chat.json"])


@pytest.fixture
def job(make_job: Callable[..., Job], headroom_home: Path) -> Job:
    return leave(make_job(), headroom_home)


def folder_of(home: Path, job: Job) -> Path:
    return home / "jobs" / job.pk / "artifacts" / "model"


def test_a_run_becomes_a_model_with_its_config_weights_and_tokenizer(job: Job, ada: User, headroom_home: Path) -> None:
    model = create_trained_model(job)
    folder = headroom_home / model.folder
    assert (model.name, model.owner, model.project, model.from_job_id) == (job.name, ada, job.project, job.pk)
    assert (model.has_weights, model.has_tokenizer, model.has_chat, list(model.unread)) == (True, True, True, [])
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert json.loads((folder / "chat.json").read_text())["end_of_text"] == "x"
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == CONFIG["hidden_size"]
    assert (folder / "model.safetensors").read_bytes() == MODEL["model.safetensors"]


def test_its_weights_take_no_room_twice_and_outlive_the_job_s_folder(job: Job, headroom_home: Path) -> None:
    weights = headroom_home / create_trained_model(job).folder / "model.safetensors"
    assert weights.samefile(folder_of(headroom_home, job) / "model.safetensors")
    shutil.rmtree(headroom_home / "jobs")
    assert weights.read_bytes() == MODEL["model.safetensors"]


def test_where_the_disk_links_nothing_they_are_copied(
    job: Job, headroom_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Never:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    weights = headroom_home / create_trained_model(job).folder / "model.safetensors"
    assert weights.read_bytes() == MODEL["model.safetensors"]
    assert not weights.samefile(folder_of(headroom_home, job) / "model.safetensors")


def test_how_the_trained_model_writes_conversations_stays(
    make_job: Callable[..., Job], ada: User, headroom_home: Path
) -> None:
    base = make_tiny_model(ada, name="chatty")
    (headroom_home / base.folder / "chat.json").write_text('{"template": "t", "begin_of_text": "", "end_of_text": ""}')
    base.has_chat = True
    base.save()
    model = create_trained_model(leave(make_job(model=base), headroom_home))
    assert model.has_chat
    assert json.loads((headroom_home / model.folder / "chat.json").read_text())["template"] == "t"


def test_training_and_generating_can_start_from_it(job: Job, ada: User, dataset: Dataset) -> None:
    model = create_trained_model(job)
    workload = {"mode": "finetune", "sequence_length": 32, "global_batch_size": 2, "num_steps": 10}
    assert read_job_spec(ada, make_spec(model, dataset, workload=workload)).model == model
    assert read_job_spec(ada, make_generate_spec(model, make_prompts(owner=ada))).model == model


def test_it_goes_to_the_project_of_its_job_wherever_somebody_works(
    make_job: Callable[..., Job], ada: User, headroom_home: Path
) -> None:
    project = create_project(ada, name="summaries")
    assert create_trained_model(leave(make_job(project=project), headroom_home)).project == project


def test_what_holds_a_model_finds_it_where_its_rows_say_whichever_attempt_left_it(job: Job, headroom_home: Path) -> None:
    assert folder_left(job.pk, kind="model", home=headroom_home) == folder_of(headroom_home, job)
    for artifact in Artifact.objects.all():
        Artifact.objects.filter(pk=artifact.pk).update(file=artifact.file.replace("artifacts/", "artifacts/f7/"))
    found = folder_left(job.pk, kind="model", home=headroom_home)
    assert found == folder_of(headroom_home, job).parent / "f7" / "model"
    assert not folder_left(job.pk, kind="adapter", home=headroom_home).exists()


def test_a_file_that_is_not_what_the_run_recorded_is_refused(job: Job, ada: User, headroom_home: Path) -> None:
    (folder_of(headroom_home, job) / "model.safetensors").write_bytes(weights_file(1))
    with pytest.raises(FilesLost, match=r"file model.safetensors of job job_\w+ has sha256 \w+; the run recorded"):
        create_trained_model(job)
    assert not Model.objects.filter(from_job_id=job.pk).exists()
    left = [path.name for kind in ("models", "spool") for path in (headroom_home / kind).glob("*")]
    assert left == ["tiny"]  # the model that was trained


def test_a_file_that_is_gone_is_named(job: Job, headroom_home: Path) -> None:
    (folder_of(headroom_home, job) / "tokenizer.json").unlink()
    with pytest.raises(FilesLost, match=f"tokenizer.json of job {job.pk} is gone") as raised:
        create_trained_model(job)
    assert "train it again" in raised.value.hint


def test_a_file_elsewhere_is_none_of_the_job_s(job: Job, headroom_home: Path) -> None:
    (headroom_home / "secret").write_bytes(MODEL["model.safetensors"])
    Artifact.objects.filter(job=job, name="model.safetensors").update(file="secret")
    with pytest.raises(FilesLost):
        create_trained_model(job)


def test_adapters_alone_are_no_model_and_it_says_what_to_do(make_job: Callable[..., Job], headroom_home: Path) -> None:
    job = leave(make_job(), headroom_home, model=None, adapter=ADAPTER)
    with pytest.raises(NoModelLeft, match="left its adapters alone") as raised:
        create_trained_model(job)
    assert raised.value.hint == "Run it again with workload.export.adapter set to merged or both."


def test_the_whole_model_is_taken_where_adapters_are_saved_beside_it(
    make_job: Callable[..., Job], headroom_home: Path
) -> None:
    model = create_trained_model(leave(make_job(), headroom_home, adapter=ADAPTER))
    names = sorted(path.name for path in (headroom_home / model.folder).iterdir())
    assert names == FILES


def test_a_run_that_goes_on_is_refused(make_job: Callable[..., Job]) -> None:
    job = make_job()
    with pytest.raises(WrongState, match=f"cannot make a model of job {job.pk}: it is queued; allowed: succeeded"):
        create_trained_model(job)


def test_a_run_that_left_nothing_is_refused_with_how_to_get_there(
    make_job: Callable[..., Job], headroom_home: Path
) -> None:
    job = leave(make_job(), headroom_home, model=None)
    Job.objects.filter(pk=job.pk).update(kind="generate")
    with pytest.raises(NoModelLeft, match="left no weights"):
        create_trained_model(job)
    with pytest.raises(NoModelLeft, match="generates; only training leaves a model"):
        create_trained_model(Job.objects.get(pk=job.pk))


def test_a_second_time_without_a_name_says_which_model_it_is(job: Job) -> None:
    model = create_trained_model(job)
    with pytest.raises(ModelExists, match=f"job {job.pk} is the model 'test job' already") as raised:
        create_trained_model(job)
    assert raised.value.fields == {"model_id": model.pk}


def test_under_another_name_it_is_made_again(job: Job, headroom_home: Path) -> None:
    first, second = create_trained_model(job), create_trained_model(job, name=" the  second ")
    assert second.name == "the second"
    weights = [headroom_home / model.folder / "model.safetensors" for model in (first, second)]
    assert weights[0].samefile(weights[1])


def test_a_given_name_that_is_taken_is_refused(job: Job, model: Model) -> None:
    with pytest.raises(ModelExists, match="a model is called 'tiny' already"):
        create_trained_model(job, name="tiny")


def test_the_job_s_name_gets_a_number_where_a_model_is_called_so(
    make_job: Callable[..., Job], ada: User, headroom_home: Path
) -> None:
    make_tiny_model(ada, name="test job")
    jobs = [leave(make_job(), headroom_home) for _ in range(2)]
    assert [create_trained_model(job).name for job in jobs] == ["test job 2", "test job 3"]


def test_a_long_name_stays_within_what_is_allowed(make_job: Callable[..., Job], ada: User, headroom_home: Path) -> None:
    make_tiny_model(ada, name="n" * 200)
    job = leave(make_job(), headroom_home)
    Job.objects.filter(pk=job.pk).update(name="n" * 200)
    assert create_trained_model(Job.objects.get(pk=job.pk)).name == "n" * 192 + " 2"


def test_a_deleted_one_is_in_nobody_s_way(job: Job) -> None:
    delete_row(create_trained_model(job))
    assert create_trained_model(job).name == job.name


def test_a_name_that_cannot_be_one_is_refused(job: Job) -> None:
    with pytest.raises(InvalidInput, match="allowed: 1 to 200 printable characters"):
        create_trained_model(job, name="a" * 201)


def test_two_that_ask_at_once_make_one(job: Job, ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    from webapp.catalog.files import model_parts

    checks = run_limited
    made: list[Any] = []

    def slowly(*arguments: Any, **options: Any) -> dict[str, Any]:
        """Meanwhile somebody else was quicker."""
        if not made:
            made.append(None)
            made[0] = create_trained_model(job)
        return checks(*arguments, **options)

    monkeypatch.setattr(model_parts, "run_limited", slowly)
    with pytest.raises(ModelExists):
        create_trained_model(job)
    assert list(models_visible_to(ada).filter(from_job_id=job.pk)) == made


def test_an_export_of_the_runtime_is_taken_as_it_is(
    make_job: Callable[..., Job], headroom_home: Path, tmp_path: Path
) -> None:
    import torch

    from optimizer.data.bundled import TOKENIZER_FILE
    from optimizer.models.build import build_model, load_weights
    from optimizer.models.files.export import export_model
    from optimizer.models.spec import read_model_spec

    spec = read_model_spec({name: value for name, value in CONFIG.items() if name != "eos_token_id"})
    trained = build_model(spec, dtype=torch.float32, device="cpu", seed=1)
    export_model(trained, spec, folder=tmp_path / "out", max_shard_bytes=200_000, tokenizer_file=TOKENIZER_FILE)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors.index.json" in files
    model = create_trained_model(leave(make_job(), headroom_home, model=files))
    read = build_model(read_model_spec(model.config), dtype=torch.float32, device="cpu", seed=2)
    load_weights(read, headroom_home / model.folder)
    assert list(model.unread) == []
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in trained.state_dict().items())
