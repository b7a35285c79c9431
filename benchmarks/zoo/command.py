"""Every causal LM that transformers builds: which are estimated, how well, and what is said of the others.

    python -m benchmarks.zoo [--json FILE] [--rows FILE] [--table FILE] [--jobs N] [--only TYPE]

Each model type of transformers' mapping of causal LMs becomes a tiny model (``tiny.py``) and is measured in a process of its
own (``measure.py``), which may take ``LIMIT_S``. ``--rows`` appends each type as it is done, and a later run with the same file
goes on from there. ``--table`` writes the table of docs/zoo.md.
"""

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.common.journal import Journal
from benchmarks.common.record import GoalEntry, Row, at_most, describe_machine, goal
from benchmarks.zoo.table import write_table

LIMIT_S = 240.0
_CONTEXT = multiprocessing.get_context("forkserver")
_GOAL_SHARE = 0.95
_GOAL_MEDIAN = 0.0005
_GOAL_WORST = 0.01


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="TYPE", help="this model type alone; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append rows as they come; go on from what is there")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table of model types here")
    parser.add_argument("--jobs", type=int, default=2, help="model types at a time")
    arguments = parser.parse_args()
    # Imported once, by the process that the others are forked from.
    _CONTEXT.set_forkserver_preload(["benchmarks.zoo.measure", "transformers.modeling_utils", "transformers.generation", "peft"])
    journal = Journal(
        file=arguments.json,
        lines=arguments.rows,
        machine=describe_machine(),
        is_whole=not arguments.only,
        show=show,
    )
    classes = list_classes()
    unknown = sorted(set(arguments.only or ()) - set(classes))
    if unknown:
        parser.error(f"transformers has no causal LM of type {', '.join(unknown)}")
    wanted = {name: classes[name] for name in arguments.only or classes}
    waiting = [name for name in wanted if not journal.has(what="type", model_type=name)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(lambda name: measure_apart(name, wanted[name]), waiting):
            journal.add(row)
    journal.rows.sort(key=lambda row: str(row.get("model_type")))
    if arguments.table is not None:
        write_table(arguments.table, journal.rows)
    return journal.finish(summarize(journal.rows))


def list_classes() -> Mapping[str, str]:
    """Each model type with the class that transformers trains it as."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def measure_apart(model_type: str, class_name: str) -> Row:
    """One type in a process of its own, which ends with it or is ended."""
    receiving, sending = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_measure_and_send, args=(model_type, class_name, sending))
    process.start()
    sending.close()
    try:
        if receiving.poll(LIMIT_S):
            row: Row = receiving.recv()
            return row
        why = f"took more than {LIMIT_S:.0f} s"
    except EOFError:
        process.join()
        why = f"its process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiving.close()
    return {"what": "type", "model_type": model_type, "class": class_name, "outcome": "broken", "why": why}


def _measure_and_send(model_type: str, class_name: str, sending: Connection) -> None:
    from benchmarks.zoo.measure import measure_type

    # The profiler and optional packages write there.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sending.send(measure_type(model_type, class_name))
    sending.close()


def summarize(rows: Sequence[Row]) -> dict[str, GoalEntry]:
    """Goals over the types that plain transformers trains, by plain training."""
    trained = [row for row in rows if row["what"] == "type" and row["outcome"] != "not trained by transformers"]
    errors = [abs(row["plans"]["plain"]["error"]) for row in trained if row["outcome"] == "estimated"]
    share = len(errors) / len(trained) if trained else None
    return {
        "share of the trained types that are estimated and run": goal(
            f"{len(errors)} of {len(trained)}" if trained else None,
            f">= {_GOAL_SHARE:.0%}",
            met=share is not None and share >= _GOAL_SHARE,
        ),
        "median error of the peak": at_most(round(statistics.median(errors), 6) if errors else None, _GOAL_MEDIAN),
        "worst error of the peak": at_most(round(max(errors), 6) if errors else None, _GOAL_WORST),
    }


def show(row: Row) -> str:
    """One line for people."""
    if row["outcome"] != "estimated":
        return f"{row['model_type']:28} {row['outcome']}: {row.get('why')}"
    found = [
        f"{name} {plan['error']:+.3%}" if plan["outcome"] == "estimated" else f"{name} {plan['outcome']}: {plan['why']}"
        for name, plan in row["plans"].items()
    ]
    loss = row["loss"]
    same = f"loss {loss['here'] - loss['transformers']:+.1e}" if "here" in loss else f"loss {loss['outcome']}: {loss['why']}"
    return f"{row['model_type']:28} {'  '.join(found)}  {same}  ({row['seconds']} s)"
