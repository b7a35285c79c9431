"""A small estimator for the solver's tests: real schedules in miniature, with every quantity visible.

Forward saves, the loss spikes, backward rebuilds or fetches and lets go, gradients grow, the optimizer steps. One copy
lane each way.
"""

from optimizer.estimate.prediction import Prediction, TimelinePoint
from optimizer.plan.plan import Plan
from optimizer.search.problem import Price, SearchProblem
from optimizer.workload import Goal, TrainingWorkload

MIB = 1024**2


def synthetic_price(
    *,
    num_blocks: int,
    global_batch_size: int,
    weight_mib: int = 10,
    saved_mib: int = 20,
    input_mib: int = 2,
    loss_mib: int = 15,
    forward_ms: float = 10.0,
    copy_ms_per_mib: float = 0.2,
) -> Price:
    """Sizes are of one block and one sequence."""

    def price(plan: Plan) -> Prediction:
        factor = plan.weights.bytes_per_element / 4
        micro = plan.batch.micro_batch_size
        weights = round(weight_mib * num_blocks * factor) * MIB
        moments = round(weight_mib * num_blocks * (2 if plan.optimizer_state.bits == 32 else 0.5)) * MIB
        masters = weight_mib * num_blocks * MIB if factor < 1 else 0
        saved, entry, loss = (round(size * micro * factor * MIB) for size in (saved_mib, input_mib, loss_mib))
        copy_ms = copy_ms_per_mib * saved / MIB
        compute_ms = forward_ms * (micro + 0.2) * (0.6 if factor < 1 else 1.0)
        accumulates = plan.batch.accumulation_steps > 1
        per_block = plan.activations.per_block
        held = {"keep": saved, "recompute": entry, "offload": entry // 2}
        points: list[TimelinePoint] = []
        now = out_free = waited = 0.0
        activations = host = 0

        def note(phase: str, gradients: int, **extra: int) -> None:
            sizes = {
                "weights": weights,
                "gradients": gradients,
                "optimizer_state": moments + masters,
                "activations": activations,
            }
            points.append(TimelinePoint(offset_ms=now, phase=phase, bytes_by_category=sizes | extra))

        one_gradient = weights // num_blocks
        start_gradients = weights if accumulates else 0
        for choice in per_block:
            activations += saved
            note("forward", start_gradients)
            now += compute_ms
            activations -= saved - held[choice]
            if choice == "offload":
                host += saved
                out_free = max(out_free, now) + copy_ms
        note("forward", start_gradients, logits_and_loss=loss)
        lane_free = max(now, out_free)
        for done, choice in enumerate(reversed(per_block)):
            if choice == "offload":
                lane_free = max(lane_free, now - compute_ms) + copy_ms
                waited += max(0.0, lane_free - now)
                now = max(now, lane_free)
            if choice == "recompute":
                now += compute_ms
            activations += saved - held[choice]
            gradients = weights if accumulates else one_gradient * (done + 1)
            note("backward", gradients)
            now += 2 * compute_ms
            activations -= saved
        now *= plan.batch.accumulation_steps
        now += weight_mib * num_blocks * 0.05
        note("optimizer", weights)
        peak = max(points, key=lambda point: sum(point.bytes_by_category.values()))
        peak_bytes = sum(peak.bytes_by_category.values())
        return Prediction(
            device_peak_bytes=peak_bytes,
            device_peak_low_bytes=peak_bytes,
            device_peak_high_bytes=peak_bytes + MIB,
            device_bytes_by_category=peak.bytes_by_category,
            host_peak_bytes=host,
            peak_moment=f"{peak.phase} at {peak.offset_ms:.0f} ms",
            step_ms=now,
            step_low_ms=now * 0.9,
            step_high_ms=now * 1.1,
            lane_busy_ms={"compute": now},
            exposed_copy_ms=waited,
            tokens_per_s=1.0,
            total_s=1.0,
            timeline=tuple(points),
            time_source="measured",
        )

    return price


def synthetic_problem(
    *,
    budget_mib: int,
    num_blocks: int = 4,
    global_batch_size: int = 2,
    allow_lossy: bool = False,
    forbid: tuple[str, ...] = (),
    host_budget_mib: int = 10**6,
    **sizes: float,
) -> SearchProblem:
    return SearchProblem(
        num_blocks=num_blocks,
        workload=TrainingWorkload(global_batch_size=global_batch_size),
        goal=Goal(device_budget_bytes=budget_mib * MIB, allow_lossy=allow_lossy, forbid=forbid),
        host_budget_bytes=host_budget_mib * MIB,
        price=synthetic_price(num_blocks=num_blocks, global_batch_size=global_batch_size, **sizes),
    )
