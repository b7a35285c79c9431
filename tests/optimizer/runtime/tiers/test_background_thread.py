import threading
from functools import partial
from typing import Never

import pytest
import torch

from optimizer.runtime.tiers.background_thread import BackgroundThread

CPU = torch.device("cpu")


def raise_error() -> Never:
    raise ValueError("no")


def test_without_a_thread_a_job_is_done_at_once_and_its_error_comes_from_submit() -> None:
    worker = BackgroundThread(name="test", device=CPU, is_threaded=False)
    done = []
    worker.submit(lambda: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]
    with pytest.raises(ValueError, match="no"):
        worker.submit(raise_error)
    worker.join()


def test_jobs_run_on_one_thread_in_order() -> None:
    worker = BackgroundThread(name="test", device=CPU, is_threaded=True)
    done = []

    def note(index: int) -> None:
        done.append((index, threading.current_thread().name))

    for index in range(20):
        worker.submit(partial(note, index))
    worker.join()
    assert [index for index, _ in done] == list(range(20))
    assert len({name for _, name in done}) == 1
    assert done[0][1].startswith("test")
    worker.close()


def test_the_first_error_is_raised_once_where_the_jobs_are_joined() -> None:
    worker = BackgroundThread(name="test", device=CPU, is_threaded=True)
    done = []
    worker.submit(raise_error)
    worker.submit(lambda: done.append(1))
    with pytest.raises(ValueError, match="no"):
        worker.join()
    worker.join()
    worker.close()


@pytest.mark.parametrize("is_threaded", [False, True])
def test_gradient_mode_is_off_inside_a_job(is_threaded: bool) -> None:
    worker = BackgroundThread(name="test", device=CPU, is_threaded=is_threaded)
    modes = []
    worker.submit(lambda: modes.append(torch.is_grad_enabled()))
    worker.join()
    assert modes == [False]
    worker.close()


def test_closing_drops_what_has_not_begun() -> None:
    worker = BackgroundThread(name="test", device=CPU, is_threaded=True)
    may_go_on, done = threading.Event(), []
    worker.submit(lambda: may_go_on.wait() and None)
    worker.submit(lambda: done.append(1))
    threading.Timer(0.05, may_go_on.set).start()
    worker.close()
    assert done == []
