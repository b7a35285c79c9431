"""Fixtures of the web app's tests: people, rows to make jobs of, a real Valkey, an empty HEADROOM_HOME."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from pytest_django import Settings

from optimizer.data.bundled import TOKENIZER_FILE
from tests import llama
from tests.conftest import made_once
from tests.valkey import Valkey
from webapp.catalog.actions import keep_profile, register_machine
from webapp.catalog.models import Dataset, Machine, Model
from webapp.jobs.actions import create_job
from webapp.jobs.models import Job

TINY_CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
}
MACHINE_DOCUMENT: dict[str, Any] = {
    "name": "bench",
    "device": {"kind": "cpu", "name": "test processor", "memory_bytes": 8 * 1024**3, "index": 0},
    "host_memory_bytes": 8 * 1024**3,
    "rates": {
        "matmul_flops_per_s": {"fp32": 5e10},
        "attention_flops_per_s": {"fp32": 2e10},
        "memory_bytes_per_s": 1e10,
        "op_overhead_s": 5e-6,
        "device_to_host_bytes_per_s": 5e9,
        "host_to_device_bytes_per_s": 5e9,
        "optimizer_elements_per_s": {"adamw_32": 2e8, "adamw_8": 1e8},
        "source": "measured",
    },
    "num_threads": 1,
    "facts": {},
}


@pytest.fixture(autouse=True)
def headroom_home(tmp_path: Path, settings: Settings) -> Path:
    """Each test has its own folder of state, and no Redis unless it asks for one."""
    folder = tmp_path / "headroom"
    (folder / "spool").mkdir(parents=True)
    settings.HEADROOM_HOME = folder
    settings.FILE_UPLOAD_TEMP_DIR = folder / "spool"
    settings.REDIS_URL = f"unix://{tmp_path}/none.sock"
    # the real one takes half a second for each person, on purpose
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return folder


def make_person(name: str, *, is_admin: bool = False) -> User:
    make = User.objects.create_superuser if is_admin else User.objects.create_user
    return make(username=name, password="correct horse battery")


def give_tokenizer(folder: str) -> None:
    """Put a tokenizer beside a model whose vocabulary is too small for the bundled one to stand in."""
    from django.conf import settings

    path = Path(settings.HEADROOM_HOME) / folder / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(TOKENIZER_FILE, path)


def make_tiny_model(owner: User | None = None, *, name: str = "tiny", config: dict[str, Any] = TINY_CONFIG) -> Model:
    from optimizer.models.spec import read_model_spec

    spec = read_model_spec(config)
    give_tokenizer(f"models/{name}")
    return Model.objects.create(
        owner=owner,
        name=name,
        model_type=spec.model_type,
        config=spec.to_config(),
        fingerprint=spec.fingerprint,
        folder=f"models/{name}",
        num_parameters=spec.num_parameters,
        has_tokenizer=True,
    )


def make_text(owner: User | None = None) -> Dataset:
    return Dataset.objects.create(
        owner=owner,
        name="text",
        format="txt",
        file="datasets/text/data.txt",
        sha256="0" * 64,
        num_bytes=1000,
        num_documents=1,
    )


def make_bench(name: str = "bench", *, memory_bytes: int = 8 * 1024**3, kind: str = "cpu") -> Machine:
    document = {
        **MACHINE_DOCUMENT,
        "device": {**MACHINE_DOCUMENT["device"], "kind": kind, "memory_bytes": memory_bytes},
    }
    return register_machine(name=name, document=document)


def make_spec(model: Model, dataset: Dataset, **changes: Any) -> dict[str, Any]:
    spec = {
        "name": "test job",
        "model": model.pk,
        "dataset": dataset.pk,
        "workload": {"sequence_length": 32, "global_batch_size": 2, "num_steps": 10},
        "goal": {"device_budget_bytes": 100 * 1024**2},
        "plan": "chosen",
    }
    return {**spec, **changes}


@pytest.fixture
def ada(db: None) -> User:
    return make_person("ada")


@pytest.fixture
def eve(db: None) -> User:
    return make_person("eve")


@pytest.fixture
def admin(db: None) -> User:
    return make_person("root", is_admin=True)


@pytest.fixture
def model(db: None) -> Model:
    return make_tiny_model()


@pytest.fixture
def new_llama(db: None) -> Model:
    """A model that nobody has profiled."""
    return make_tiny_model(name="llama", config=llama.CONFIG)


@pytest.fixture
def profiled_llama(new_llama: Model, llama_document: dict[str, Any]) -> Model:
    keep_profile(new_llama.fingerprint, llama_document)
    return new_llama


@pytest.fixture(scope="session")
def compiled_document(pytestconfig: pytest.Config, llama_document: dict[str, Any]) -> dict[str, Any]:
    """The tiny Llama's profile, with compiled blocks in fp32, the one form that the test's machine has rates for."""

    def add(folder: Path) -> None:
        from optimizer.models.spec import read_model_spec
        from optimizer.profile.assemble.merge import add_compiled
        from optimizer.profile.extent import Extent
        from optimizer.profile.profile import Profile
        from tests.optimizer.profiles import trace

        extent = Extent(representations=("fp32@compiled",), shapes=((1, 32), (2, 32)))
        compiled = trace(read_model_spec(llama.CONFIG), extent=extent)
        document = add_compiled(Profile.from_json(llama_document), compiled).to_json()
        (folder / "profile.json").write_text(json.dumps(document))

    document: dict[str, Any] = json.loads((made_once(pytestconfig, "compiled", add) / "profile.json").read_text())
    return document


@pytest.fixture
def dataset(db: None) -> Dataset:
    return make_text()


@pytest.fixture
def machine(db: None) -> Machine:
    return make_bench()


@pytest.fixture
def pair(db: None) -> Machine:
    """A machine whose CPU plays two devices."""
    link = {"kind": "loopback", "bytes_per_s": 1e9, "latency_s": 1e-4, "source": "measured"}
    return register_machine(name="pair", document={**MACHINE_DOCUMENT, "num_devices": 2, "peers": link})


@pytest.fixture(scope="session")
def writer_document(writer_folder: Path) -> dict[str, Any]:
    """The profile of the tiny model that generates."""
    return json.loads((writer_folder / "profile.json").read_text())


@pytest.fixture
def writer(writer_document: dict[str, Any], db: None) -> Model:
    """A model that generates, profiled."""
    from tests.webapp.generation import make_writer

    return make_writer(writer_document)


@pytest.fixture
def prompts(ada: User) -> Dataset:
    from tests.webapp.generation import make_prompts

    return make_prompts(owner=ada)


@pytest.fixture
def make_job(ada: User, model: Model, dataset: Dataset, machine: Machine) -> Callable[..., Job]:
    """A queued job of ada's."""

    def make(**changes: Any) -> Job:
        arguments = {
            "owner": ada,
            "spec": make_spec(model, dataset),
            "model": model,
            "dataset": dataset,
            "plan": None,
            "prediction": None,
            "machine": machine,
            "actor": "user:ada",
        }
        return create_job(**{**arguments, **changes})

    return make


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A Unix socket's path may have 107 characters, fewer than pytest's own folders take."""
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def valkey(settings: Settings) -> Iterator[Valkey]:
    server = Valkey(decodes=True)
    settings.REDIS_URL = server.url
    yield server
    server.close()


@pytest.fixture
def is_postgresql(db: None) -> bool:
    return connection.vendor == "postgresql"
