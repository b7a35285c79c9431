"""Recipes: the values that a spec leaves out."""

from typing import Any

import pytest
from django.contrib.auth.models import User

from optimizer.base.errors import InvalidInput, InvalidWorkload
from optimizer.workload import TrainingWorkload
from tests.webapp.conftest import make_spec
from webapp.catalog.models import Dataset, Model
from webapp.jobs.specs.recipes import RECIPES
from webapp.jobs.specs.training import read_spec

pytestmark = pytest.mark.django_db


@pytest.fixture
def trained(new_llama: Model) -> Model:
    new_llama.has_weights = True
    new_llama.save(update_fields=["has_weights"])
    return new_llama


def make_pairs_of(dataset: Dataset) -> None:
    dataset.facts = {**dataset.facts, "kind": "preference"}
    dataset.num_documents = 20
    dataset.save(update_fields=["facts", "num_documents"])


def test_preference_learns_from_pairs_by_dpo_with_adapters(ada: User, trained: Model, dataset: Dataset) -> None:
    make_pairs_of(dataset)
    workload = read_spec(ada, make_spec(trained, dataset, recipe="preference")).workload
    assert (workload.objective, workload.packing, workload.loss_on) == ("dpo", "off", "assistant")
    assert workload.adapter is not None


def test_orpo_on_pairs_needs_no_recipe(ada: User, trained: Model, dataset: Dataset) -> None:
    make_pairs_of(dataset)
    spec = make_spec(trained, dataset)
    spec["workload"] |= {"objective": "orpo", "beta": 0.2}
    read = read_spec(ada, spec)
    assert (read.workload.objective, read.workload.beta, read.workload.packing) == ("orpo", 0.2, "off")
    assert read_spec(ada, read.to_json()) == read


@pytest.mark.parametrize("asked", [{"recipe": "preference"}, {"workload": {"objective": "orpo"}}])
def test_pairs_are_asked_of_a_dataset_that_has_some(
    ada: User, trained: Model, dataset: Dataset, asked: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput, match="holds texts; workload.objective is '(dpo|orpo)', which learns from pairs"):
        read_spec(ada, {**make_spec(trained, dataset), **asked})


def test_single_answers_are_not_learnt_from_pairs(ada: User, trained: Model, dataset: Dataset) -> None:
    make_pairs_of(dataset)
    with pytest.raises(InvalidInput, match="pairs of a better and a worse answer") as caught:
        read_spec(ada, make_spec(trained, dataset, recipe="lora"))
    assert "recipe preference" in caught.value.hint


def test_dpo_of_every_weight_is_refused_with_what_to_do(ada: User, trained: Model, dataset: Dataset) -> None:
    make_pairs_of(dataset)
    with pytest.raises(InvalidWorkload, match="no second copy") as caught:
        read_spec(ada, {**make_spec(trained, dataset), "workload": {"objective": "dpo"}})
    assert "orpo" in caught.value.hint


def test_a_spec_without_a_recipe_uses_the_weights_that_there_are(ada: User, trained: Model, dataset: Dataset) -> None:
    assert read_spec(ada, make_spec(trained, dataset)).workload.mode == "finetune"


def test_a_spec_without_a_recipe_starts_from_scratch_where_there_are_no_weights(
    ada: User, new_llama: Model, dataset: Dataset
) -> None:
    assert read_spec(ada, make_spec(new_llama, dataset)).workload == TrainingWorkload(
        sequence_length=32, global_batch_size=2, num_steps=10
    )


def test_qlora_trains_adapters_over_packed_weights(ada: User, trained: Model, dataset: Dataset) -> None:
    read = read_spec(ada, make_spec(trained, dataset, recipe="qlora"))
    assert read.workload.adapter is not None
    assert read.workload.adapter.rank == 16
    assert read.goal.pins.weights.frozen == "nf4"
    assert read.workload.sequence_length == 32


def test_values_of_the_spec_stand_over_those_of_its_recipe(ada: User, trained: Model, dataset: Dataset) -> None:
    spec = make_spec(trained, dataset, recipe="full")
    spec["workload"] |= {"learning_rate": 5e-5}
    read = read_spec(ada, spec)
    assert (read.workload.learning_rate, read.goal.allow_lossy, read.goal.most_loss) == (5e-5, True, "rounding")


def test_a_normalized_spec_asks_for_the_same_job_without_naming_its_recipe(ada: User, trained: Model, dataset: Dataset) -> None:
    read = read_spec(ada, make_spec(trained, dataset, recipe="lora"))
    assert read_spec(ada, read.to_json()) == read


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_is_a_valid_job(ada: User, trained: Model, dataset: Dataset, recipe: str) -> None:
    if recipe == "preference":
        make_pairs_of(dataset)
    assert read_spec(ada, make_spec(trained, dataset, recipe=recipe)).workload.mode == "finetune"


def test_a_recipe_that_fine_tunes_is_refused_for_a_model_without_weights(ada: User, new_llama: Model, dataset: Dataset) -> None:
    with pytest.raises(InvalidWorkload, match=r"recipe is 'lora', which fine-tunes; llama has no weights, allowed: exact"):
        read_spec(ada, make_spec(new_llama, dataset, recipe="lora"))


@pytest.mark.parametrize("recipe", ["LoRA", 3, ["lora"]])
def test_an_unknown_recipe_is_refused_with_those_that_are_known(
    ada: User, trained: Model, dataset: Dataset, recipe: Any
) -> None:
    with pytest.raises(InvalidInput, match="allowed: lora, qlora, preference, full, exact"):
        read_spec(ada, make_spec(trained, dataset, recipe=recipe))
