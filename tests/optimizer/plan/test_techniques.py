"""Everything that a plan can decide is declared once, and whatever lists it reads the declarations."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

from optimizer.plan.activations import ActivationsPlan
from optimizer.plan.batch import BatchPlan
from optimizer.plan.generation import GenerationPlan
from optimizer.plan.pins.generation_knobs import generation_knobs
from optimizer.plan.pins.training import knob_kinds
from optimizer.plan.plan import Plan
from optimizer.plan.techniques import (
    DECLARATIONS,
    KNOBS,
    TECHNIQUE_GROUPS,
    Technique,
    knobs_of,
    techniques_for,
)

ROOT = Path(__file__).resolve().parents[3]


def test_every_name_that_may_be_forbidden_is_declared_and_no_other() -> None:
    assert set(DECLARATIONS) == set(get_args(Technique))
    assert [name for _, names in TECHNIQUE_GROUPS for name in names] == list(DECLARATIONS)


def test_every_decision_that_can_be_held_has_a_face_and_no_other_has() -> None:
    assert {knob.path for knob in knobs_of("training", num_devices=2)} == set(knob_kinds())
    assert {knob.path for knob in knobs_of("generation")} == set(generation_knobs())


def test_every_technique_is_used_by_some_decision_of_the_work_it_is_for() -> None:
    for work in ("training", "generation"):
        used = {use.technique for knob in knobs_of(work) for use in knob.uses}
        assert set(techniques_for(work)) == used & set(techniques_for(work))
        assert used <= set(DECLARATIONS)


def test_every_condition_and_everything_brought_is_a_decision() -> None:
    for knob in KNOBS.values():
        assert all(condition.path in KNOBS for condition in (*knob.matters_where, *knob.or_where))
        assert all(path in KNOBS for brought in knob.brings.values() for path in brought)


def test_plain_work_uses_no_technique() -> None:
    plan = Plan(batch=BatchPlan(micro_batch_size=4, accumulation_steps=1), activations=ActivationsPlan(per_block=("keep",)))
    assert plan.techniques == ()
    assert plan.is_lossless
    assert GenerationPlan().techniques == ()


def test_every_technique_says_what_it_does_in_a_sentence() -> None:
    for declared in DECLARATIONS.values():
        assert declared.sentence[0].isupper()
        assert declared.sentence.endswith(".")


def test_the_tables_of_the_documentation_are_current() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.technique_table", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run python -m tools.technique_table"
