"""Every page and every GET route of the API, one request after the other, while nothing else is asked of the service.

Addresses that need what the service has not got (an upload, a webhook, a signature), those that take POST alone and streams that
have no end are left out by name.
"""

import os
import re
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import httpx

from benchmarks.common.record import Row
from benchmarks.load.service import Service
from benchmarks.load.submissions import is_fault, percentile

LIMIT_MS = 300
ENDLESS = ("/events",)
QUERIES = {
    **dict.fromkeys(("/jobs/new/", "/plans/", "/plans/cards/", "/plans/knobs/"), "?model={model}"),
    "/search/": "?q=load",
    "/api/v1/compare": "?jobs={jobs}",
}
"""Queries of addresses that would else have nothing to look for, or begin with a model that has no profile yet."""
_FIRST_REFUSAL, _POST_ONLY = 400, 405


def measure_reads(service: Service, *, person: str, num_rounds: int) -> list[Row]:
    """One row of the pages and one of the routes, each with every address's p95."""
    with service.api(person) as api, closing(service.browser(person)) as browser:
        document = api.get("/api/v1/openapi.json").raise_for_status().json()
        ids = _find_ids(api) | {"model": service.model, "model_id": service.model}
        pages, routes = {page: page for page in service.ask("list_pages")}, list_routes(document)
        num_queued = service.ask("num_queued")
        rows = []
        for kind, client, asked in (("pages", browser, pages), ("routes", api, routes)):
            addresses = {name: fill_in(address + QUERIES.get(name, ""), ids) for name, address in asked.items()}
            rows.append({"what": kind, "person": person, "num_queued": num_queued, **_measure(client, addresses, num_rounds)})
        return rows


def _find_ids(api: httpx.Client) -> dict[str, str]:
    """One of each, by the name that addresses have for its id; and what the pages of a job call their parts."""
    ids = {"tab": "plan", "chart": "loss"}
    for kind in ("jobs", "models", "datasets", "machines", "projects"):
        found = api.get(f"/api/v1/{kind}").raise_for_status().json()["results"]
        if found:
            ids[f"{kind.removesuffix('s')}_id"] = found[0]["id"]
            ids[kind] = ",".join(each["id"] for each in found[:2])
    return ids


def fill_in(address: str, ids: Mapping[str, str]) -> str:
    """Put ids in the place of ``{job_id}`` and ``<slug:job_id>``; a name without an id stays as it is."""
    return re.sub(r"\{(\w+)\}|<\w+:(\w+)>", lambda found: ids.get(found[1] or found[2], found[0]), address)


def list_routes(document: Mapping[str, Any]) -> dict[str, str]:
    """The paths of an OpenAPI document that take GET, each with the query that it requires: ``/preview?model={model}``."""
    routes = {}
    for path, methods in document["paths"].items():
        if "get" in methods:
            parameters = methods["get"].get("parameters", [])
            required = [each["name"] for each in parameters if each["in"] == "query" and each.get("required")]
            query = "&".join(f"{name}={{{name}}}" for name in required)
            routes[path] = f"{path}?{query}" if query else path
    return routes


def _measure(client: httpx.Client, addresses: Mapping[str, str], num_rounds: int) -> Row:
    load_average = round(os.getloadavg()[0], 2)
    times_ms: dict[str, list[float]] = {}
    left_out, faults = {}, {}
    for name, address in addresses.items():
        # the first request is not counted: it compiles templates and fills caches
        status = 0 if re.search(r"[<{]", address) or address.endswith(ENDLESS) else client.get(address).status_code
        if is_fault(status):
            faults[name] = status
        elif status == 0 or status >= _FIRST_REFUSAL:
            if status != _POST_ONLY:
                left_out[name] = status
        else:
            times_ms[name] = []
    for _ in range(num_rounds):
        for name, times in times_ms.items():
            began_at = time.perf_counter()
            status = client.get(addresses[name]).status_code
            times.append(1000 * (time.perf_counter() - began_at))
            if status >= _FIRST_REFUSAL:
                faults[name] = status
    p95_ms = {name: percentile(sorted(times), 0.95) or 0.0 for name, times in times_ms.items()}
    slowest_first = dict(sorted(p95_ms.items(), key=lambda each: -each[1]))
    return {
        "num_rounds": num_rounds,
        "load_average": load_average,
        "num_addresses": len(p95_ms),
        "worst_p95_ms": max(p95_ms.values(), default=None),
        "num_slow": sum(value > LIMIT_MS for value in p95_ms.values()),
        "slow": [name for name, value in slowest_first.items() if value > LIMIT_MS],
        "num_faults": len(faults),
        "faults": faults,
        "p95_ms": slowest_first,
        "left_out": left_out,
    }
