"""One side of a probe as a process of its own, for a network namespace. Each prints a line of JSON: ``listen INTERFACE`` where it
listens, ``connect INTERFACE ADDRESS PORT`` what it measured, or why it could not.
"""

import json
import sys

from optimizer.runtime.ranks.interface import address_of
from worker.links.exchange import LinkFailed, answer, measure, open_listener

TOKEN = "of this probe"


def main() -> None:
    role, interface, *where = sys.argv[1:]
    own = address_of(interface)
    if role == "listen":
        with open_listener(own) as listener:
            print(json.dumps([own, listener.getsockname()[1]]), flush=True)
            answer(listener, TOKEN, should_stop=lambda: False)
        return
    try:
        found = measure(where[0], int(where[1]), TOKEN, source=own)
    except LinkFailed as error:
        print(json.dumps({"failure": str(error)}))
    else:
        print(json.dumps({"round_trip_s": found.round_trip_s, "rates": found.bytes_per_s_by_size}))


if __name__ == "__main__":
    main()
