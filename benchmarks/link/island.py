"""One island of the shaped-link benchmark: trains, and says where its time went.

    ip netns exec ISLAND python island.py URL NUMBER SETTINGS.toml --steps 240

Prints, as a line of JSON: when it took its first and its last step (Unix time), seconds in inner steps, in
`Island.step`, in joining and in `Island.finish`, and the median seconds of a step before joining, with nothing else
to do, by the clock and by the processor's.
"""

import argparse
import json
from time import perf_counter, time

from training import Training

from diloco_blob import Island


def main() -> None:
    """Train one island to the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("number", type=int)
    parser.add_argument("settings")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    training = Training(args.number)
    bare_step_s, bare_step_cpu_s = training.bare_step(9)
    joining = perf_counter()
    island = Island(
        args.url,
        model=training.model,
        optimizer=training.optimizer,
        name=f"island-{args.number}",
        settings=args.settings,
    )
    compute_s = exchange_s = 0.0
    with island:
        join_s, first_step_at = perf_counter() - joining, time()
        while island.steps < args.steps:
            start = perf_counter()
            loss = training.inner_step(island.steps)
            done = perf_counter()
            island.step(tokens=training.tokens, loss=loss)
            compute_s += done - start
            exchange_s += perf_counter() - done
        last_step_at = time()
        finishing = perf_counter()
        island.finish()
        finish_s = perf_counter() - finishing
    said = {
        "first_step_at": first_step_at,
        "last_step_at": last_step_at,
        "compute_s": compute_s,
        "exchange_s": exchange_s,
        "join_s": join_s,
        "finish_s": finish_s,
        "bare_step_s": bare_step_s,
        "bare_step_cpu_s": bare_step_cpu_s,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
