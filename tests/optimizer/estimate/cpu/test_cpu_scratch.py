"""Predicted scratch of CPU kernels agrees with torch's profiler; and the moments that can be the highest with it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.estimate.cpu.convolution_scratch import hold_convolution
from optimizer.estimate.cpu.cpu_scratch import hold_tile_products, scratch_of
from optimizer.estimate.cpu.matmul_scratch import hold_grouped_product, hold_product
from optimizer.estimate.kernels.rise import rise_with_scratch
from optimizer.formats.matmul_dispatch import uses_onednn
from optimizer.formats.op_costs import classify_op
from optimizer.hardware.machine import Processor
from optimizer.hardware.probe.facts import has_library_for_bf16
from optimizer.profile.meta_ops.convolution import Convolution
from optimizer.profile.meta_ops.op_layout import form_of
from optimizer.profile.meta_ops.op_scratch import read_scratch
from optimizer.profile.ops import Op
from optimizer.profile.sizes import NO_TERMS

BF16 = torch.bfloat16
HAS_TILES = torch.cpu._is_amx_tile_supported()
"""With them (AMX) the library cuts products in bf16 in another way, which nothing models: the CPU device proves schedules."""
HAS_MEASURED_LIBRARY = has_library_for_bf16() and not HAS_TILES
HAS_LIBRARY_FOR_FP32 = HAS_MEASURED_LIBRARY
"""Asked for products in bf16 of numbers in fp32, it makes them in fp32 where there are no tiles for bf16."""
DTYPES = [torch.float32] if HAS_TILES else [torch.float32, BF16]
HAS_WIDE_BLOCKS = torch.backends.cpu.get_cpu_capability() != "AVX2"
NOT_MODELLED = {"one channel", "16 bits", "blocks not filled", "transposed"} if HAS_WIDE_BLOCKS else set()
MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def processor(num_threads: int) -> Processor:
    """This one."""
    return Processor(num_threads, packs_bf16=has_library_for_bf16(), packs_fp32=True)


def constant(value: int) -> tuple[int, ...]:
    return (value, *NO_TERMS[1:])


class Watching(TorchDispatchMode):
    """Notes what is predicted of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.predicted: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        result = func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        inputs = [value for value in given if isinstance(value, torch.Tensor)]
        outputs = [result] if isinstance(result, torch.Tensor) else [each for each in result if each is not None]
        dtype = inputs[0].dtype if inputs else None
        scratch = read_scratch(str(func), inputs, outputs, args=given)
        self.predicted.append((str(func), scratch, dtype, form_of(str(func), inputs)))
        return result


def predict(watched: Watching, *, num_threads: int = 1) -> int:
    """Predict the scratch of the last op that holds any."""
    for name, scratch, dtype, form in reversed(watched.predicted):
        if scratch.num_bytes or scratch.sides:
            op = Op(
                name=name, kind=classify_op(name), flops=NO_TERMS, read_bytes=NO_TERMS, written_bytes=NO_TERMS,
                scratch_bytes=constant(scratch.num_bytes), sides=tuple(map(constant, scratch.sides)),
                dtype="bf16" if dtype == BF16 else "fp32", form=form,
            )  # fmt: skip
            return scratch_of(op, (1, 1), is_half=dtype == BF16, processor=processor(num_threads))
    return 0


def measure(run: Callable[..., Any]) -> int:
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


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def turned(*shape: Any) -> torch.Tensor:
    """The same shape, its last two axes laid out the other way round."""
    return normal(*shape).transpose(1, 2).contiguous().transpose(1, 2)


def layer_norm_backward() -> Any:
    """Run a layer norm's backward for the input's gradient alone: partial sums of the weight's are not predicted."""
    values = normal(4, 48, 32)
    _, mean, rstd = torch.native_layer_norm(values, (32,), None, None, 1e-5)
    wanted = [True, False, False]
    return torch.ops.aten.native_layer_norm_backward(turned(4, 48, 32), values, (32,), mean, rstd, None, None, wanted)


ids = torch.arange(6 * 40).reshape(6, 40) % 30
OPS: dict[str, Any] = {
    "a product of 16 and 32 bits": lambda: normal(40, 64, dtype=BF16) * normal(40, 64),
    "a sum of 16 and 32 bits": lambda: normal(40, 64) + normal(64, dtype=BF16),
    "a cumulative sum in a wider dtype": lambda: torch.cumsum(normal(40, 64, dtype=BF16), dim=0, dtype=torch.float32),
    "a cumulative sum in its own": lambda: torch.cumsum(normal(40, 64), dim=0),
    "a safe softmax": lambda: torch.ops.aten._safe_softmax(normal(4, 40, 64), -1),
    "an embedding of repeated ids": lambda: torch.embedding(normal(50, 16), ids[:1].expand(6, 40)),
    "a sort": lambda: torch.sort(ids.flatten()),
    "a layer norm behind a transpose": lambda: torch.native_layer_norm(turned(4, 48, 32), (32,), None, None, 1e-5),
    "a layer norm of what is in one piece": lambda: torch.native_layer_norm(normal(4, 48, 32), (32,), None, None, 1e-5),
    "layer norm's backward, gradient behind a transpose": layer_norm_backward,
    "a softmax behind a transpose": lambda: torch.softmax(turned(4, 48, 32), -1),
    "softmax's backward, gradient behind a transpose": lambda: torch.ops.aten._softmax_backward_data(
        turned(4, 48, 32), normal(4, 48, 32), -1, torch.float32
    ),
    "gelu's backward, gradient behind a transpose": lambda: torch.ops.aten.gelu_backward(turned(4, 48, 32), normal(4, 48, 32)),
    "gelu's backward, both behind one": lambda: torch.ops.aten.gelu_backward(turned(4, 48, 32), turned(4, 48, 32)),
    "gelu's backward by tanh": lambda: torch.ops.aten.gelu_backward(
        turned(4, 48, 32), normal(4, 48, 32), approximate="tanh"
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _library_for_fp32() -> Iterator[None]:
    MATMUL.fp32_precision = "bf16"
    yield
    MATMUL.fp32_precision = "none"


@pytest.mark.breadth
@pytest.mark.parametrize("name", OPS)
def test_an_op_holds_what_is_predicted_of_it(name: str) -> None:
    with Watching() as watched:
        OPS[name]()
    # A few numbers beside: what is multiplied or added by is a tensor of one element for a moment.
    assert predict(watched) == pytest.approx(held_by_last_op(OPS[name]), abs=16)


def held_by_last_op(run: Callable[..., Any]) -> int:
    """Measure the scratch of the last op alone: its arguments are made before the profiler listens."""
    calls = []

    class Last(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: tuple[Any, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> torch.Tensor:
            calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Last():
        run()
    func, args, kwargs = calls[-1]
    return measure(lambda: func(*args, **kwargs))


def convolve(
    images: torch.Tensor,
    weight: torch.Tensor,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    is_transposed: bool = False,
    with_bias: bool = True,
) -> Iterator[tuple[object, tuple[Any, ...]]]:
    """Forward and both kinds of backward, as calls of what is predicted of each."""
    num_axes = weight.dim() - 2
    spread = ([stride] * num_axes, [padding] * num_axes, [1] * num_axes, is_transposed, [0] * num_axes, groups)
    channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
    bias = torch.zeros(channels, dtype=weight.dtype) if with_bias else None
    forward = images, weight, bias, *spread
    gradient = torch.ones_like(torch.ops.aten.convolution(*forward))
    for wanted in ([False, True, with_bias], [True, True, with_bias]):
        backward = gradient, images, weight, [channels], *spread, wanted
        yield torch.ops.aten.convolution_backward, backward
    yield torch.ops.aten.convolution, forward


CONVOLUTIONS = {
    "colours": lambda: convolve(normal(4, 3, 32, 32), normal(32, 3, 3, 3), padding=1),
    "one channel": lambda: convolve(normal(4, 1, 28, 28), normal(16, 1, 5, 5)),
    "unbiased": lambda: convolve(normal(4, 16, 32, 32), normal(16, 16, 3, 3), padding=1, with_bias=False),
    "behind a transpose": lambda: convolve(turned(4, 32, 16, 16).transpose(1, 2), normal(16, 16, 3, 3), padding=1),
    "one small image": lambda: convolve(normal(1, 16, 16, 16), normal(16, 16, 3, 3), padding=1),
    "one large image": lambda: convolve(normal(1, 16, 64, 64), normal(16, 16, 3, 3), padding=1),
    "single pixels of a few images": lambda: convolve(normal(4, 32, 16, 16), normal(16, 32, 1, 1)),
    "single pixels of many images": lambda: convolve(normal(16, 32, 16, 16), normal(16, 32, 1, 1)),
    "16 bits": lambda: convolve(normal(4, 16, 16, 16, dtype=BF16), normal(16, 16, 3, 3, dtype=BF16), with_bias=False),
    "depthwise": lambda: convolve(normal(4, 32, 16, 16), normal(32, 1, 3, 3), padding=1, groups=32),
    "groups": lambda: convolve(normal(4, 32, 16, 16), normal(64, 8, 3, 3), padding=1, groups=4),
    "blocks not filled": lambda: convolve(normal(4, 12, 32, 32), normal(20, 12, 3, 3), padding=1),
    "a stride": lambda: convolve(normal(4, 32, 32, 32), normal(32, 32, 3, 3), stride=2, padding=1),
    "single pixels with a stride": lambda: convolve(normal(4, 32, 32, 32), normal(64, 32, 1, 1), stride=2),
    "one axis": lambda: convolve(normal(4, 16, 100), normal(32, 16, 3), padding=1),
    "transposed": lambda: convolve(normal(4, 16, 32, 32), normal(16, 24, 2, 2), stride=2, is_transposed=True),
}


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if name not in NOT_MODELLED])
def test_a_convolution_and_its_backward_hold_what_is_predicted_of_them(name: str) -> None:
    for call, args in CONVOLUTIONS[name]():
        assert predict_convolution(call, args) == measure(lambda call=call, args=args: call(*args))


@pytest.mark.parametrize("name", ["colours", "unbiased", "behind a transpose", "one large image", "single pixels of many images"])
def test_threads_that_divide_the_images_sum_up_a_gradient_of_the_weight_each(name: str) -> None:
    torch.set_num_threads(2)
    for call, args in CONVOLUTIONS[name]():
        measured = measure(lambda call=call, args=args: call(*args))
        assert measured <= predict_convolution(call, args, num_threads=2) <= 1.1 * measured


def predict_convolution(call: Any, args: tuple[Any, ...], *, num_threads: int = 1) -> int:
    returned = call(*args)
    outputs = [returned] if isinstance(returned, torch.Tensor) else returned
    convolution = Convolution(*read_scratch(f"aten.{call.__name__}.default", (), outputs, args=args).convolution)
    return hold_convolution(convolution, num_threads=num_threads, packs_bf16=has_library_for_bf16())


def test_single_pixels_are_the_librarys_on_more_than_one_thread() -> None:
    torch.set_num_threads(2)
    call: Any
    *_, (call, args) = CONVOLUTIONS["single pixels of a few images"]()
    assert predict_convolution(call, args) == 0
    assert predict_convolution(call, args, num_threads=2) == measure(lambda: call(*args)) > 0


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "head_dim"), [(24, 16), (40, 24), (200, 16), (800, 8)])
def test_attention_holds_tiles_of_scores_for_each_thread(
    length: int, head_dim: int, dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    for is_backward, call in enumerate(attend(length, head_dim, dtype)):
        with Watching() as watched:
            call()
        # Backward's sums of rows are made by each thread itself, and so are the library's products: the profiler hears of the
        # first thread's alone.
        heard = measure(call) + unheard(length, head_dim, dtype, is_backward=bool(is_backward)) * (num_threads - 1)
        assert predict(watched, num_threads=num_threads) == heard


def attend(length: int, head_dim: int, dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward, with heads for three threads."""
    query, key, value = (normal(2, length, 3, head_dim, dtype=dtype).transpose(1, 2) for _ in range(3))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_sums = forward(query, key, value)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradient = torch.ones_like(output)
    return (
        lambda: forward(query, key, value),
        lambda: backward(gradient, query, key, value, output, log_sums, 0.0, False),
    )


def unheard(length: int, head_dim: int, dtype: torch.dtype, *, is_backward: bool) -> int:
    """Scratch of each thread but the first, which the profiler does not see."""
    rows = min(length, 256 if length >= 768 else 64 if length >= 192 else 32)
    uses_onednn = dtype == BF16 and has_library_for_bf16()
    tiles_bytes = uses_onednn * hold_tile_products((length, length, head_dim), num_threads=torch.get_num_threads())
    return is_backward * (4 * rows + tiles_bytes)


PRODUCTS = {
    "square": (64, 64, 64),
    "long": (64, 2048, 64),
    "a little deeper than the least block": (64, 65, 64),
    "narrow": (64, 64, 2),
    "many rows": (384, 192, 768),
    "rows that are cut unevenly": (300, 64, 64),
    "a few rows": (3, 64, 64),
    "nothing divides": (24, 20, 40),
    "one row": (1, 64, 640),
    "one column": (640, 64, 1),
    "too small": (5, 7, 9),
    "outer": (128, 1, 64),
    "deeper than is laid out at once": (63, 600, 320),
    "many strips": (96, 800, 1432),
    "rows whose pieces divide": (700, 64, 64),
    "a depth that threads divide": (200, 2048, 48),
    "rows that meet in the cache": (1024, 4096, 80),
}


@pytest.mark.skipif(not HAS_MEASURED_LIBRARY, reason="products in bf16 are torch's own here, or made with tiles")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_bf16_holds_what_is_predicted_of_it(name: str, form: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for run, _ in multiply(PRODUCTS[name], form, BF16):
        with Watching() as watched:
            run()
        assert is_held(measure(run), predict(watched, num_threads=num_threads), depth=PRODUCTS[name][1])


@pytest.mark.skipif(not HAS_LIBRARY_FOR_FP32, reason="products in fp32 are never oneDNN's here")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("form", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("name_of", PRODUCTS)
@pytest.mark.usefixtures("_library_for_fp32")
def test_a_product_in_fp32_holds_what_is_predicted_of_it(name_of: str, form: str, num_threads: int) -> None:
    """The runtime leaves no small one to the library, and none of several."""
    torch.set_num_threads(num_threads)
    for run, (count, is_added) in multiply(PRODUCTS[name_of], form, torch.float32):
        with Watching() as watched:
            run()
        *_, (_, _, _, seen_form) = watched.predicted
        sides = (count, *PRODUCTS[name_of])
        held = hold_product(sides, form=seen_form, dtype="fp32", num_threads=num_threads, is_added=is_added)
        assert is_held(measure(run), held, depth=sides[2])
        if count == 1:
            assert predict(watched, num_threads=num_threads) == held * uses_onednn(*sides[1:])


def is_held(measured: int, predicted: int, *, depth: int) -> bool:
    """Return true if the measured scratch is as predicted; at a depth of 1 the layout is unknown, and the prediction an upper
    bound.
    """
    return measured <= predicted if depth == 1 else measured == predicted


def multiply(
    sides: tuple[int, ...], form: str, dtype: torch.dtype
) -> Iterator[tuple[Callable[..., Any], tuple[int, bool]]]:
    """One product and several, alone and added, as calls, each with how many and whether it is added."""
    rows, depth, columns = sides
    first = normal(rows, depth, dtype=dtype) if form[0] == "n" else normal(depth, rows, dtype=dtype).t()
    second = normal(depth, columns, dtype=dtype) if form[1] == "n" else normal(columns, depth, dtype=dtype).t()
    firsts, seconds = (torch.stack([each.t()] * 3).mT if way == "t" else torch.stack([each] * 3)
                       for each, way in ((first, form[0]), (second, form[1])))
    bias, biases = normal(columns, dtype=dtype), normal(3, rows, columns, dtype=dtype)
    yield lambda: torch.mm(first, second), (1, False)
    yield lambda: torch.addmm(bias, first, second), (1, True)
    yield lambda: torch.bmm(firsts, seconds), (3, False)
    yield lambda: torch.baddbmm(biases, firsts, seconds), (3, True)


def test_a_moment_has_what_came_with_the_op_and_what_goes_after_it() -> None:
    changes = [(("device", 0, 100), 0), (("host", 0, 999), 0), (("device", 1, 50), 1), (("device", 0, -100), 1)]
    assert rise_with_scratch(changes, {1: 7}) == 157
    assert rise_with_scratch(changes, {0: 7}) == 107
    assert rise_with_scratch(changes, {0: 60, 1: 7}) == 160


def test_an_op_without_changes_of_its_own_stands_on_what_is_there() -> None:
    changes = [(("device", 0, 10), 0), (("device", 0, -4), 0)]
    assert rise_with_scratch(changes, {3: 1}) == 7


def test_products_in_bf16_hold_nothing_where_no_library_makes_them() -> None:
    op = Op(
        name="aten.mm.default", kind="matmul", flops=NO_TERMS, read_bytes=NO_TERMS, written_bytes=NO_TERMS,
        sides=tuple(map(constant, (1, 64, 64, 64))), dtype="bf16", form="nn",
    )  # fmt: skip
    held = [scratch_of(op, (1, 1), is_half=True, processor=Processor(2, packs_bf16=packs)) for packs in (False, True)]
    assert held[0] == 0 < held[1]


@pytest.mark.skipif(not HAS_MEASURED_LIBRARY, reason="products in bf16 are torch's own here, or made with tiles")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("sizes", [(40, 24), (24, 40), (128, 64), (64, 320), (600, 64)])
@pytest.mark.parametrize("num_rows", [1, 24, 100, 300, 700, 2050])
def test_products_over_experts_hold_no_more_than_is_said_however_tokens_choose(
    num_rows: int, sizes: tuple[int, int], num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    for way, ends, run in multiply_groups(num_rows, sizes, BF16):
        with Watching() as watched:
            run()
        assert predict(watched, num_threads=num_threads) >= measure(run), (way, ends)


@pytest.mark.skipif(not HAS_LIBRARY_FOR_FP32, reason="products in fp32 are never oneDNN's here")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("sizes", [(40, 24), (128, 64), (64, 320), (64, 512)])
@pytest.mark.parametrize("num_rows", [1, 24, 300, 2050])
@pytest.mark.usefixtures("_library_for_fp32")
def test_products_over_experts_in_fp32_hold_no_more_than_is_said(
    num_rows: int, sizes: tuple[int, int], num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    for way, ends, run in multiply_groups(num_rows, sizes, torch.float32):
        with Watching() as watched:
            run()
        *_, (_, _, _, form) = watched.predicted
        width, out = sizes
        sides = {
            "forward": (1, num_rows, width, out),
            "weights behind a transpose": (1, num_rows, out, width),
            "gradient of the weights": (1, width, num_rows, out),
        }[way]
        assert hold_grouped_product(sides, form=form, dtype="fp32", num_threads=num_threads) >= measure(run), (way, ends)


def multiply_groups(
    num_rows: int, sizes: tuple[int, int], dtype: torch.dtype
) -> Iterator[tuple[str, tuple[float, float, float], Callable[..., Any]]]:
    """Each way, however tokens choose."""
    width, out = sizes
    tokens, weights = normal(num_rows, width, dtype=dtype), normal(4, width, out, dtype=dtype)
    results = normal(num_rows, out, dtype=dtype)
    ways = {
        "forward": lambda ends: torch._grouped_mm(tokens, weights, offs=ends),
        "weights behind a transpose": lambda ends: torch._grouped_mm(results, weights.mT, offs=ends),
        "gradient of the weights": lambda ends: torch._grouped_mm(tokens.t(), results, offs=ends),
    }
    for way, run in ways.items():
        for shares in ((0.0, 0.0, 1.0), (0.1, 0.4, 0.5), (0.25, 0.5, 0.75)):
            ends = torch.tensor([*(int(share * num_rows) for share in shares), num_rows], dtype=torch.int32)
            yield way, shares, lambda run=run, ends=ends: run(ends)
