"""Machines: what they are, who holds their memory, and how well their runs were predicted."""

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from optimizer.hardware.machine import PROBE_DISTURBED_FACT
from webapp.catalog.documents import ONLINE_WITHIN
from webapp.catalog.models import Machine
from webapp.catalog.queries import machines_visible_to
from webapp.jobs.fleet import Accuracy, read_accuracy, read_occupancy
from webapp.jobs.links.known import links_between
from webapp.jobs.links.probing import ask_for_links
from webapp.pages.shown.machines.device_bar import accuracy_facts, device_bar, devices_words, holder_rows, within_words
from webapp.pages.shown.machines.links import link_rows, sizes_of


@require_GET
@login_required
def machine_list(request: HttpRequest) -> HttpResponse:
    """The sections alone for whoever fetches them again."""
    machines = list(machines_visible_to(request.user).order_by("name"))
    links = links_between(machines)
    context = {
        "rows": [{**_row(request.user, machine), "links": link_rows(machine, links[machine.pk])} for machine in machines]
    }
    is_refresh = bool(request.htmx)  # type: ignore[attr-defined]
    return render(request, "catalog/machine_rows.html" if is_refresh else "catalog/machines.html", context)


@require_GET
@login_required
def machine_page(request: HttpRequest, machine_id: str) -> HttpResponse:
    """The page; for whoever fetches a part again, the jobs at work there alone, or its links alone."""
    is_refresh = bool(request.htmx)  # type: ignore[attr-defined]
    machine = get_object_or_404(machines_visible_to(request.user), pk=machine_id)
    if is_refresh and request.GET.get("part") == "links":
        return render(request, "catalog/machine_links.html", _links(machine))
    accuracy = read_accuracy(request.user, machine)
    context = {
        **_row(request.user, machine, accuracy),
        **_links(machine),
        "runs": accuracy.runs,
        "facts": accuracy_facts(accuracy),
    }
    return render(request, "catalog/machine_now.html" if is_refresh else "catalog/machine.html", context)


@require_POST
@login_required
def machine_links(request: HttpRequest, machine_id: str) -> HttpResponse:
    """Have its links measured again."""
    machine = get_object_or_404(machines_visible_to(request.user), pk=machine_id)
    ask_for_links(machine)
    return redirect(f"{reverse('machine', args=[machine.pk])}#machine-links")


def _links(machine: Machine) -> dict[str, Any]:
    rows = link_rows(machine, links_between([machine])[machine.pk])
    sizes = sizes_of(rows)
    return {"machine": machine, "links": rows, "link_sizes": sizes, "num_link_columns": 4 + len(sizes)}


def _row(user: Any, machine: Machine, accuracy: Accuracy | None = None) -> dict[str, Any]:
    accuracy = accuracy or read_accuracy(user, machine)
    occupancy = read_occupancy(user, machine)
    document, rates = machine.document, machine.document.get("rates", {})
    return {
        "machine": machine,
        "online": timezone.now() - machine.last_seen_at < ONLINE_WITHIN,
        "device": document.get("device", {}),
        "devices": devices_words(document),
        "host_memory_bytes": document.get("host_memory_bytes"),
        "source": rates.get("source", ""),
        "rates": _rate_pairs(rates),
        "disturbed": document.get("facts", {}).get(PROBE_DISTURBED_FACT, ""),
        "occupancy": occupancy,
        "bar": device_bar(occupancy),
        "holders": holder_rows(occupancy.holders),
        "calibration": machine.calibration,
        "calibrated_at": next((run.ended_at for run in accuracy.runs if run.measured_ms), None),
        "factors": _factors(machine.calibration),
        "generations": machine.calibration.get("generations", {}),
        "generation_factors": _factors(machine.calibration.get("generations", {})),
        "peak_within": within_words(accuracy.peak),
        "step_within": within_words(accuracy.step),
    }


def _factors(calibration: dict[str, Any]) -> list[tuple[str, float]]:
    return sorted(calibration.get("time_factors", {}).items())


def _rate_pairs(rates: dict[str, Any]) -> list[tuple[str, str]]:
    """The measured rates in the units people compare cards by."""
    pairs = [
        (f"{dtype} products", f"{value / 1e9:,.0f} GFLOP/s")
        for dtype, value in rates.get("matmul_flops_per_s", {}).items()
    ]
    named = (
        ("memory", "memory_bytes_per_s"),
        ("device to host", "device_to_host_bytes_per_s"),
        ("host to device", "host_to_device_bytes_per_s"),
    )
    pairs += [(label, f"{rates[key] / 1e9:,.1f} GB/s") for label, key in named if rates.get(key)]
    return pairs
