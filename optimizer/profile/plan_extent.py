"""The extent to which a model has to be profiled to price given plans. Torch-free."""

from collections.abc import Iterable

from optimizer.plan.plan import Plan
from optimizer.profile.extent import Extent, traced_choice, traced_representation
from optimizer.workload import TrainingWorkload


def extent_of_plans(plans: Iterable[Plan], *, workload: TrainingWorkload) -> Extent:
    """The extent that pricing these plans needs, on each of their ranks."""
    given = [own for plan in plans for own in (plan.of_ranks() if plan.layout.ranks else (plan,))]
    choices = {traced_choice(choice) for plan in given for choice in plan.activations.per_block}
    return Extent(
        representations=tuple(sorted({traced_representation(plan.weights.representation) for plan in given})),
        choices=tuple(sorted({"keep", *choices})),
        shapes=tuple(sorted({(plan.batch.micro_batch_size, workload.sequence_length) for plan in given})),
    )
