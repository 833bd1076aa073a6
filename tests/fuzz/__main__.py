"""`python -m tests.fuzz --graphs N --seed S`: N random graphs under random plans against one device.

Exit code 0 if all agree, 1 if one does not; every failure is shrunk and printed with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import torch

from tests.fuzz.cases import Refused, failure, random_case, sensitive
from tests.fuzz.listing import listing
from tests.fuzz.shrink import shrink

SEED_STRIDE = 1_000_000
"""Graph i of a run with seed S has the seed S * SEED_STRIDE + i."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000, help="how many random graphs (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other graphs (default 0)")
    parser.add_argument("--only", type=int, help="repeat the one graph of this seed, as a failure names it")
    parser.add_argument("--minutes", type=float, help="stop after this number of minutes")
    parser.add_argument("--failures", type=int, default=5, help="stop after this number of failures (default 5)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin = options.seed * SEED_STRIDE
    seeds = range(begin, begin + options.graphs) if options.only is None else (options.only,)
    started = shown = time.monotonic()
    done = operators = unsure = refused = wrong = 0
    for seed in seeds:
        case = random_case(seed)
        done, operators = done + 1, operators + len(case.graph.operators)
        try:
            found = failure(case)
        except Refused as problem:
            refused += 1
            print(f"seed {seed}: torch itself does not run it: {problem}", flush=True)
            continue
        if found is not None and sensitive(case):
            unsure += 1
        elif found is not None:
            wrong += 1
            print(f"\nseed {seed} fails: {found}\nshrinking ...", flush=True)
            print(listing(*shrink(case)), "\n", flush=True)
        now = time.monotonic()
        if now - shown > 10:
            shown = now
            print(f"{done} graphs, {operators} operators, {wrong} wrong, {now - started:.0f} s", flush=True)
        if wrong >= options.failures or (options.minutes is not None and now - started > 60 * options.minutes):
            break
    seconds = time.monotonic() - started
    doubt = f", {unsure} too sensitive to rounding to compare" if unsure else ""
    doubt += f", {refused} that torch itself does not run" if refused else ""
    print(f"{done} graphs with {operators} operators: {wrong} wrong{doubt}; {seconds:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
