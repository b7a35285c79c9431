"""A generation's prediction explained, as ``explanation.py`` does for training. Torch-free."""

from optimizer.base.categories import CATEGORIES, Category
from optimizer.estimate.categories.stores import PLACE_WORDS
from optimizer.estimate.explanation import CategoryAtPeak, Explanation, list_lanes
from optimizer.estimate.generation.prediction import GenerationPrediction
from optimizer.plan.generation import GenerationPlan
from optimizer.profile.generation import GenerationProfile
from optimizer.workload import GenerationWorkload


def explain_generation(
    profile: GenerationProfile,
    *,
    plan: GenerationPlan,
    workload: GenerationWorkload,
    prediction: GenerationPrediction,
) -> Explanation:
    """Lanes are those of a pass."""
    at_peak = prediction.device_bytes_by_category
    highest = {
        name: max([at_peak.get(name, 0), *(point.bytes_by_category.get(name, 0) for point in prediction.timeline)])
        for name in CATEGORIES
    }
    reasons = _reasons(profile, plan, workload, prediction)
    return Explanation(
        peak_moment=prediction.peak_moment,
        categories=tuple(
            CategoryAtPeak(
                category=name, peak_bytes=at_peak.get(name, 0), highest_bytes=highest[name], reason=reasons[name]
            )
            for name in CATEGORIES
            if highest[name]
        ),
        lanes=list_lanes(prediction.lane_busy_ms, prediction.exposed_ms),
    )


def _reasons(
    profile: GenerationProfile, plan: GenerationPlan, workload: GenerationWorkload, prediction: GenerationPrediction
) -> dict[Category, str]:
    weights = plan.weights
    form = weights.dtype if weights.frozen == "same" else f"{weights.dtype}, the blocks' matrices in {weights.frozen}"
    place = (
        "all the while"
        if weights.place == "device"
        else f"of the blocks only those at work; the rest is {PLACE_WORDS[weights.place]}"
    )
    windows = [tensors.window for tensors in profile.kv if tensors.window is not None]
    window = f", blocks with a window at most {max(windows):,}" if windows else ""
    sequences = f"{plan.batch_size:,} sequence{'s' * (plan.batch_size != 1)}"
    return {
        "weights": f"{form}, {place}",
        "gradients": "",
        "optimizer_state": "",
        "activations": f"between the blocks, and inside the one that runs, of {sequences}",
        "logits_and_loss": f"logits of the last position alone, {sequences} by {profile.vocab_size:,} words",
        "kv_cache": f"keys and values of {sequences}, each with room for {workload.cache_length:,} tokens{window}",
        "temporaries": f"token ids, and what {prediction.peak_moment} makes and drops",
    }
