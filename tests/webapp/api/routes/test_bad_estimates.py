"""Whatever is sent to ``/estimates`` is answered, or refused as problem+json: never a 5xx."""

import json
from typing import Any

import pytest
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optimizer.search.answer.baselines import BASELINES
from tests.fuzzing import JUNK, junk, with_changes
from webapp.catalog.models import Model

BODY: dict[str, Any] = {
    "model": "llama",
    "workload": {"sequence_length": 128, "global_batch_size": 4, "adapter": None, "optimizer": "adamw", "learning_rate": 1e-3},
    "goal": {"device_budget_bytes": 2**30, "host_budget_bytes": 2**30, "allow_lossy": False, "forbid": ["offload"]},
    "machine": None,
    "gpu": "T4",
    "plan": {
        "version": 2,
        "batch": {"micro_batch_size": 2, "accumulation_steps": 2},
        "activations": {"per_block": ["keep", "recompute", "keep", "keep"]},
        "weights": {"dtype": "fp32"},
    },
    "knobs": False,
}
fuzzed = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check_answer(client: Any, body: Any) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body)
    answer = client.post("/api/v1/estimates", data=data, content_type="application/json")
    assert answer.status_code in (200, 202, 400, 413, 422), (answer.status_code, body)
    document = answer.json()
    if answer.status_code >= 400:
        assert answer["Content-Type"] == "application/problem+json"
        assert document["detail"]
        assert "Traceback" not in answer.content.decode()


@pytest.fixture
def body(profiled_llama: Model) -> dict[str, Any]:
    return {**BODY, "model": profiled_llama.pk}


def test_a_body_with_anything_changed(as_ada: Client, body: dict[str, Any]) -> None:
    @fuzzed
    @given(with_changes(body))
    def check(changed: Any) -> None:
        check_answer(as_ada, changed)

    check()


def test_a_field_of_any_kind(as_ada: Client, body: dict[str, Any]) -> None:
    @fuzzed
    @given(st.sampled_from([*BODY, "color"]), st.one_of(junk, st.sampled_from([*BASELINES, "best"])))
    def check(field: str, value: Any) -> None:
        check_answer(as_ada, {**body, "plan": None, field: value})

    check()


NO_BODIES = (b"", b"{", b"[" * 50_000, b"\xff\xfe", b"null", b"NaN", b"9" * 5_000, b'{"model": "a", "model": {}}')


@pytest.mark.parametrize("body", [*NO_BODIES, *JUNK[:12]], ids=lambda body: repr(body)[:20])
def test_a_request_with_a_bad_body_is_refused(as_ada: Client, body: Any) -> None:
    check_answer(as_ada, body)
