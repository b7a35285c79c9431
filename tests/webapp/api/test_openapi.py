"""schemathesis over every operation that the API describes, in process, on a real database: whatever is sent, no answer is a
fault of the server, and each is one that the description names, of the media type and shape that it says.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from django.contrib.auth.models import User
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections, transaction
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation.case import Case
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.webapp.accounts.table import make_owned
from webapp.accounts.models import Scope
from webapp.accounts.projects import create_project
from webapp.accounts.tokens import create_token
from webapp.api.api import openapi_document
from webapp.api.batch_urls import api as openai_api

EXAMPLES = int(os.environ.get("HEADROOM_API_EXAMPLES", "5"))
"""Examples for each operation; drawn afresh by the same seed, so that a failure comes again. `make fuzz` asks many more."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


@pytest.fixture
def ids(admin: User, headroom_home: Path, db: None) -> dict[str, str]:
    return make_owned(admin, create_project(admin, name="summaries"), headroom_home)


@pytest.fixture(autouse=True)
def _one_connection() -> Iterator[None]:
    """Keep a request's end from closing the connection that the test's transaction is on, as Django's own test client does."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture
def token(admin: User) -> str:
    return create_token(user=admin, name="t", scope=Scope.ADMIN)[1]


def operations(document: dict[str, Any]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(document)
    schema.app = get_wsgi_application()
    results: Any = schema.get_all_operations()
    found = [result.ok() for result in results]
    return [pytest.param(operation, id=operation.label) for operation in found]


OPERATIONS = operations(openapi_document())
AFTER_OPENAI = operations(openai_api.get_openapi_schema(path_prefix="/v1/"))
# files are streamed by asynchronous iterators, and the app is called here as a WSGI one
pytestmark = pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume asynchronous iterators")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_answer_is_a_fault_or_undocumented(operation: APIOperation, ids: dict[str, str], token: str) -> None:
    ask_examples(operation, ids, token, checks=CHECKS)


@pytest.mark.parametrize("operation", AFTER_OPENAI)
def test_no_answer_of_the_batch_api_is_a_fault(operation: APIOperation, ids: dict[str, str], token: str) -> None:
    """OpenAI describes it; here it has no description of its own to be held to."""
    ask_examples(operation, ids, token, checks=[not_a_server_error])


def ask_examples(operation: APIOperation, ids: dict[str, str], token: str, *, checks: list[Callable[..., Any]]) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), is_there=st.booleans(), names_project=st.booleans())
    def check(case: Case, is_there: bool, names_project: bool) -> None:
        if is_there:  # a drawn id never names a row
            case.path_parameters = {name: ids[name] for name in re.findall(r"{(\w+)}", operation.path)}
        if not names_project:  # nor does a drawn project
            case.headers.pop("Headroom-Project", None)
        with transaction.atomic():
            # a WSGI app's answers are not unpacked there
            headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
            case.call_and_validate(headers=headers, checks=checks)
            transaction.set_rollback(True)

    check()


def test_the_description_is_of_openapi_3_1_and_says_what_each_operation_needs() -> None:
    document = openapi_document()
    assert document["openapi"].startswith("3.1")
    cancel = document["paths"]["/api/v1/jobs/{job_id}/cancel"]["post"]
    assert cancel["description"].endswith("Needs the scope write, and the role member.")
    assert {"200", "202", "400", "401", "403", "404", "409", "422"} <= set(cancel["responses"])
    assert [one["name"] for one in cancel["parameters"]] == ["job_id", "Headroom-Project", "Idempotency-Key"]
