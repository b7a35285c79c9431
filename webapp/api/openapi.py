"""The description of the API, completed: every way in which an operation can refuse, and the headers that all of them take.

ninja writes down what a route answers when all goes well; the rest is the same for all routes and is said here once. What
each needs is read from the permission table.
"""

from typing import Any, Final

from ninja import NinjaAPI

from webapp.accounts.permissions import TABLE, Rule

PROBLEM: Final[dict[str, Any]] = {
    "title": "Problem",
    "description": "RFC 9457, with a stable `code`, what to do (`hint`) and the fields that were wrong.",
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "fields": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"field": {"type": "string"}, "value": {}, "allowed": {}, "message": {"type": "string"}},
                "required": ["field", "message"],
            },
        },
        "hint": {"type": "string"},
        "extra": {"type": "object"},
    },
    "required": ["type", "title", "status", "detail", "code", "fields", "hint"],
}
_ALWAYS: Final = {
    400: "The request cannot be read.",
    401: "No valid token or session.",
    403: "This needs a larger role or scope, or a session's CSRF token.",
    422: "A field is wrong.",
}
_WITH_BODY: Final = {
    408: "The body came too slowly.",
    409: "The present state forbids it, or the first request with this Idempotency-Key still runs.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    503: "Too much is under way, or the disk or the database fails; send it again after Retry-After.",
    507: "The disk is full.",
}
_OF_STREAMS: Final = {503: "Too many live streams are open."}
_OF_PREVIEWS: Final = {503: _WITH_BODY[503]}
_NOT_THERE: Final = {404: "Nothing with this id in your projects."}
_PROJECT_HEADER: Final = {
    "name": "Headroom-Project",
    "in": "header",
    "required": False,
    "description": "id or name of the project to work in: lists show it alone, what is made goes there",
    "schema": {"type": "string"},
}
_IDEMPOTENCY_HEADER: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "the same key with the same request replays the first answer for a day",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200},
}

_SPEC: Final[dict[str, Any]] = {
    "name": "chat-demo",
    "model": "headroom-chat-4m",
    "dataset": "kjv-chats",
    "recipe": "lora",
    "workload": {"sequence_length": 256, "global_batch_size": 8, "num_steps": 100, "learning_rate": 3e-3},
    "goal": {"device_budget_bytes": "110 MiB"},
}
_EXAMPLES: Final[dict[str, Any]] = {
    "POST /api/v1/jobs": {"spec": _SPEC},
    "POST /api/v1/plans": _SPEC,
    "POST /api/v1/jobs/{job_id}/cancel": {"mode": "save"},
    "POST /api/v1/jobs/cancel": {"state": ["queued"], "tag": "sweep", "mode": "discard"},
    "POST /api/v1/tokens": {"name": "laptop", "scope": "write"},
}
"""Bodies of the calls that most people begin with; a test sends each."""


def complete_document(api: NinjaAPI, *, path_prefix: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    document: dict[str, Any] = api.get_openapi_schema(path_prefix=path_prefix)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = PROBLEM
    takes_keys = _operations_with_keys(api)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            route = path.removeprefix("/").replace("{", "<").replace("}", ">")
            _complete(operation, method, path, rule=TABLE.get(f"{method.upper()} {route}"))
            if operation["operationId"] in takes_keys:
                operation["parameters"].append(_IDEMPOTENCY_HEADER)
    return document


def _complete(operation: dict[str, Any], method: str, path: str, *, rule: Rule | None) -> None:
    described = dict(_ALWAYS)
    if "{" in path:
        described |= _NOT_THERE
    if method != "get":
        described |= _WITH_BODY
    if path.endswith("/events"):
        described |= _OF_STREAMS
    if method == "get" and path.endswith("/preview"):
        described |= _OF_PREVIEWS
    answers = {str(status): answer for status, answer in operation["responses"].items()}
    operation["responses"] = {**{str(status): _problem(text) for status, text in described.items()}, **answers}
    operation["parameters"].append(_PROJECT_HEADER)
    example = _EXAMPLES.get(f"{method.upper()} {path}")
    if example is not None:
        operation["requestBody"]["content"]["application/json"]["example"] = example
    if rule is not None:
        operation["description"] = f"{operation.get('description', '')}\n\n{_need(rule)}".strip()


def _problem(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": text, "content": {"application/problem+json": {"schema": schema}}}


def _need(rule: Rule) -> str:
    """For people."""
    if rule.session_only:
        return "Needs a session."
    accounts = {"account": "that is no viewer's", "service_admin": "that administers the service"}
    named = {"signed_in": "", **{who: f", of an account {which}" for who, which in accounts.items()}}
    who = named.get(rule.who, f", and the role {rule.role}")
    return f"Needs the scope {rule.scope}{who}."


def _operations_with_keys(api: NinjaAPI) -> set[str]:
    """Ids of the operations whose view is ``idempotent``."""
    return {
        api.get_openapi_operation_id(operation)
        for _, router in api._routers
        for view in router.path_operations.values()
        for operation in view.operations
        if getattr(operation.view_func, "is_idempotent", False)
    }
