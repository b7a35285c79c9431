"""What kernels hold on the CPU, held to torch's profiler; and the moments that can be the highest with it."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.estimate.cpu_scratch import OpScratch, Point, attention_bytes, list_points
from optimizer.profile.op_scratch import read_scratch

BF16 = torch.bfloat16


class Watching(TorchDispatchMode):
    """Notes what is predicted of the ops that are called."""

    def __init__(self):
        super().__init__()
        self.predicted = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
        outputs = [result] if isinstance(result, torch.Tensor) else [each for each in result if each is not None]
        dtype = inputs[0].dtype if inputs else None
        self.predicted.append((str(func), read_scratch(str(func), inputs, outputs), dtype))
        return result


def predict(watched, *, num_threads=1):
    """Of the last op that holds anything."""
    for name, scratch, dtype in reversed(watched.predicted):
        if scratch.num_bytes or scratch.square:
            each = 0
            if scratch.square:
                each = attention_bytes(scratch.square, is_backward="backward" in name, is_half=dtype == BF16)
            return scratch.num_bytes + num_threads * each
    return 0


def measure(run):
    """Bytes held at most beside what is left, from the profiler's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    level = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    del kept
    return highest - level


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


ids = torch.arange(6 * 40).reshape(6, 40) % 30
OPS = {
    "a product of 16 and 32 bits": lambda: normal(40, 64, dtype=BF16) * normal(40, 64),
    "a sum of 16 and 32 bits": lambda: normal(40, 64) + normal(64, dtype=BF16),
    "a cumulative sum in a wider dtype": lambda: torch.cumsum(normal(40, 64, dtype=BF16), dim=0, dtype=torch.float32),
    "a cumulative sum in its own": lambda: torch.cumsum(normal(40, 64), dim=0),
    "a safe softmax": lambda: torch.ops.aten._safe_softmax(normal(4, 40, 64), -1),
    "an embedding of repeated ids": lambda: torch.embedding(normal(50, 16), ids[:1].expand(6, 40)),
    "a sort": lambda: torch.sort(ids.flatten()),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", OPS)
def test_an_op_holds_what_is_predicted_of_it(name):
    with Watching() as watched:
        OPS[name]()
    # A few numbers beside: what is multiplied or added by is a tensor of one element for a moment.
    assert predict(watched) == pytest.approx(held_by_last_op(OPS[name]), abs=16)


def held_by_last_op(run):
    """By the op alone: its arguments are made before the profiler listens."""
    calls = []

    class Last(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Last():
        run()
    func, args, kwargs = calls[-1]
    return measure(lambda: func(*args, **kwargs))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("length", "head_dim"), [(24, 16), (40, 24), (200, 16), (800, 8)])
def test_attention_holds_tiles_of_scores_for_each_thread(length, head_dim, dtype, num_threads):
    torch.set_num_threads(num_threads)
    query, key, value = (normal(2, length, 3, head_dim, dtype=dtype).transpose(1, 2) for _ in range(3))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_sums = forward(query, key, value)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradient = torch.ones_like(output)
    calls = (
        lambda: forward(query, key, value),
        lambda: backward(gradient, query, key, value, output, log_sums, 0.0, False),
    )
    for call in calls:
        with Watching() as watched:
            call()
        # Backward's sums of rows are made by each thread itself, and the profiler hears of the first thread's alone.
        unheard_bytes = 4 * 256 * (num_threads - 1)
        assert 0 <= predict(watched, num_threads=num_threads) - measure(call) <= unheard_bytes


def test_a_moment_has_what_came_with_the_op_and_what_goes_after_it():
    changes = [(("device", 0, 100), 0), (("host", 0, 999), 0), (("device", 1, 50), 1), (("device", 0, -100), 1)]
    assert list_points(changes, {1: OpScratch(7, 0)}) == (Point(157, 0),)
    assert list_points(changes, {0: OpScratch(7, 0)}) == (Point(107, 0),)


def test_moments_that_another_is_above_of_for_any_number_of_threads_are_left_out():
    changes = [(("device", 0, 10), 0), (("device", 0, 10), 1), (("device", 0, 10), 2)]
    found = list_points(changes, {0: OpScratch(0, 5), 1: OpScratch(0, 4), 2: OpScratch(0, 4)})
    assert set(found) == {Point(10, 5), Point(30, 4)}


def test_an_op_without_changes_of_its_own_stands_on_what_is_there():
    changes = [(("device", 0, 10), 0), (("device", 0, -4), 0)]
    assert list_points(changes, {3: OpScratch(1, 0)}) == (Point(7, 0),)
