"""A signed-in person, for the tests of pages."""

import pytest
from django.contrib.auth.models import User
from django.test import Client


@pytest.fixture
def browser(client: Client, ada: User) -> Client:
    client.force_login(ada)
    return client


@pytest.fixture
def typed_work() -> dict[str, str]:
    """Every field of the form for a new job but its model, its dataset and its device budget."""
    return {
        "name": "kjv",
        "mode": "pretrain",
        "sequence_length": "32",
        "global_batch_size": "4",
        "num_steps": "50",
        "learning_rate": "1e-3",
        "schedule": "cosine",
        "warmup_steps": "5",
        "optimizer": "adamw",
        "momentum": "0.9",
        "weight_decay": "0.1",
        "max_grad_norm": "",
        "seed": "1",
        "eval_every_steps": "10",
        "eval_batches": "2",
        "checkpoint_every_steps": "10",
        "sample_tokens": "0",
        "host_budget": "",
        "disk_budget": "",
    }
