"""A tiny model that generates, its real profile, and prompts; shared by the tests of generate jobs and of batches."""

import json
from typing import Any

from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile

from optimizer.models.spec import read_model_spec
from optimizer.profile.fingerprints import generation_fingerprint
from tests.webapp.conftest import make_tiny_model
from webapp.catalog.actions import create_dataset, keep_profile
from webapp.catalog.models import Dataset, Model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
CHAT = "/v1/chat/completions"


def trace() -> dict[str, Any]:
    from optimizer.profile.trace.generation import profile_generation

    return profile_generation(read_model_spec(CONFIG), representations=("fp32", "bf16")).to_json()


def make_writer(document: dict[str, Any] | None = None, *, owner: User | None = None, name: str = "writer") -> Model:
    """Says that it has weights; no test here reads them."""
    model = make_tiny_model(owner, name=name, config=CONFIG)
    model.has_weights = True
    # prompts are cut by the bundled tokenizer
    model.has_tokenizer = False
    model.save()
    if document is not None:
        keep_profile(generation_fingerprint(model.fingerprint), document)
    return model


def make_prompts(*lines: Any, owner: User | None = None, name: str = "prompts") -> Dataset:
    lines = lines or ({"prompt": "In the beginning"}, {"prompt": "And God said", "max_new_tokens": 4})
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    file = SimpleUploadedFile("prompts.jsonl", text.encode())
    return create_dataset(owner=owner, name=name, file=file, purpose="prompts")


def request(custom_id: str = "a", **changes: Any) -> dict[str, Any]:
    body = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}


def make_generate_spec(model: Model, prompts: Dataset, /, **changes: Any) -> dict[str, Any]:
    spec = {
        "kind": "generate",
        "name": "test job",
        "model": model.pk,
        "prompts": prompts.pk,
        "workload": {"max_new_tokens": 8},
        "goal": {"device_budget_bytes": 100 * 1024**2},
    }
    return {**spec, **changes}
