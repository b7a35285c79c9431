"""Cards of which the driver says nothing, beside machines that have no driver; the driver is played, as the cards are."""

import logging
from types import SimpleNamespace

import pynvml
import pytest

from optimizer.base.units import GIB
from tests.webapp.attempts.claims.test_gangs import make_host
from tests.worker.claims import make_jobs
from webapp.attempts.claiming import claim_job
from webapp.jobs.models import Job
from worker.gpu import GpuMeter
from worker.machine import device_meters, read_used_bytes


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, object]:
    """By card, the memory in use or the error; a reading is a second old at most, and here none at all."""
    answers: dict[int, object] = {}

    def read_memory(handle: int) -> SimpleNamespace:
        answer = answers[handle]
        if isinstance(answer, pynvml.NVMLError):
            raise answer
        assert isinstance(answer, int)
        return SimpleNamespace(total=8 * GIB, free=8 * GIB - answer)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", read_memory)
    monkeypatch.setattr("worker.gpu.time.monotonic", iter(range(0, 1000, 2)).__next__)
    return answers


def lost() -> pynvml.NVMLError:
    return pynvml.NVMLError_GpuIsLost()


def test_nothing_begins_on_a_card_that_does_not_answer(db: None, answers: dict[int, object]) -> None:
    machine, meters = make_host(2), [GpuMeter(0), GpuMeter(1)]
    make_jobs(2)
    Job.objects.update(need_device_bytes=0, need_device_kind="cuda", need_devices=1)
    answers |= {0: lost(), 1: 2 * GIB}
    attempt = claim_job(worker="w", machine=machine, used_bytes=read_used_bytes(machine, meters))
    assert attempt is not None
    assert attempt.devices == [1]  # though most is free on the first, if nobody knows what is in use there
    answers |= {1: lost()}
    assert claim_job(worker="w", machine=machine, used_bytes=read_used_bytes(machine, meters)) is None
    answers |= {0: 0}
    assert claim_job(worker="w", machine=machine, used_bytes=read_used_bytes(machine, meters)) is not None


def test_a_card_that_never_says_how_much_is_free_is_used_as_it_is(db: None, answers: dict[int, object]) -> None:
    machine, meters = make_host(2), [GpuMeter(0), GpuMeter(1)]
    answers |= {0: pynvml.NVMLError_NotSupported(), 1: pynvml.NVMLError_NotSupported()}
    assert read_used_bytes(machine, meters) == []
    answers |= {1: GIB}
    assert read_used_bytes(machine, meters) == [0, GIB]


def test_a_machine_without_the_vendors_library_goes_on(
    db: None, monkeypatch: pytest.MonkeyPatch, answers: dict[int, object]
) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    machine = make_host(1, kind="cpu")
    assert read_used_bytes(machine, device_meters(machine)) == []


def test_a_driver_that_does_not_start_says_nothing_of_the_cpu(
    db: None, monkeypatch: pytest.MonkeyPatch, answers: dict[int, object]
) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError_DriverNotLoaded

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    for kind, is_full in (("cpu", False), ("cuda", True)):
        machine = make_host(1, kind=kind)
        assert bool(read_used_bytes(machine, device_meters(machine))) == is_full


def test_that_a_card_fell_silent_is_logged_once_and_so_is_its_return(
    answers: dict[int, object], caplog: pytest.LogCaptureFixture
) -> None:
    meter = GpuMeter(0)
    with caplog.at_level(logging.INFO):
        for answer in (0, lost(), lost(), 0):
            answers[0] = answer
            meter.read()
    assert [record.message for record in caplog.records] == [
        "cuda:0 does not answer its driver (GPU is lost); nothing is begun on it until it does",
        "cuda:0 answers its driver again",
    ]
