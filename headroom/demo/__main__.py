"""``make demo``: a chat fine-tune from its data to its answers, inside a budget that plain training exceeds.

The data is shown; LoRA runs inside the budget, and again with no memory saved, which must run out of memory; base and tuned model
answer the same questions; and a short exact run under a budget is compared with plain training, bit for bit. Every claim is
checked on measured numbers. Exit code 0 only if all hold.
"""

import sys
import time

from rich.console import Console

from headroom.client import HeadroomClient
from headroom.commands.preview import print_preview
from headroom.commands.submit import connect
from headroom.demo.answers import ask_both, print_answers
from headroom.demo.claims import check_chat, check_exact
from headroom.demo.jobs import fetch_files, fine_tune, read_demo_file, train_exactly
from headroom.demo.shown import print_claims, print_table, print_where_to_look
from optimizer.base.errors import HeadroomError

SAMPLES_SHOWN = 2


def main() -> int:
    console = Console()
    started_at = time.monotonic()
    try:
        with connect() as client:
            show_data(client, console=console)
            chat = fine_tune(client, console=console)
            exact = train_exactly(client, console=console)
            folder, url = fetch_files(client, chat.tuned), client.url
        console.rule("What came of it")
        answers = ask_both(folder / "model")
        print_answers(answers, console=console)
        print_table(exact, console=console)
        claims = [*check_chat(chat, answers), *check_exact(exact)]
    except HeadroomError as error:
        console.print(f"demo: {error.message}" + (f"\n  {error.hint}" if error.hint else ""), style="bold red", markup=False)
        return 1
    print_claims(claims, console=console)
    print_where_to_look(chat, folder, url=url, console=console, seconds=time.monotonic() - started_at)
    return 0 if all(claim.holds for claim in claims) else 1


def show_data(client: HeadroomClient, *, console: Console) -> None:
    spec = read_demo_file("chat.yaml")
    console.rule(f"1 of 4: the data, {spec['dataset']}, as {spec['model']} is going to see it")
    dataset = next(row for row in client.datasets() if row["name"] == spec["dataset"])
    length = spec["workload"]["sequence_length"]
    found = client.preview_dataset(dataset["id"], model=spec["model"], sequence_length=length, loss_on="assistant")
    print_preview(found, sequence_length=length, console=console, num_samples=SAMPLES_SHOWN)


if __name__ == "__main__":
    sys.exit(main())
