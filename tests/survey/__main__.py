"""`python -m tests.survey`: architectures of installed packages, captured, planned and compared with eager torch.

Nothing is downloaded. Results are appended to a file of JSON lines, so that a survey can be interrupted and goes on
with what is missing. Exit code 0 if no architecture that eager torch trains differs or crashes, 1 if one does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from tests.survey.outcomes import Outcome, as_json, survey
from tests.survey.registries import REGISTRIES, architectures
from tests.survey.table import markdown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survey", description=__doc__)
    parser.add_argument("--registry", choices=REGISTRIES, help="only this package (default: all that are installed)")
    parser.add_argument("--all", action="store_true", help="every class (default: one of each type of model)")
    parser.add_argument("--only", nargs="+", metavar="GLOB", default=["*"], help="names of architectures")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="for each (default 60)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default 1)")
    parser.add_argument("--world", type=int, default=4, metavar="N", help="simulated ranks (default 4)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results: known ones are kept, new ones appended")
    parser.add_argument("--again", nargs="+", metavar="STATUS", default=(), help="try those once more that ended so")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="end after this time; 0: only write the table")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table of all results there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines = (
        options.resume.read_text(encoding="utf-8").splitlines() if options.resume and options.resume.is_file() else []
    )
    known = {(one["registry"], one["name"]): Outcome(**one) for one in map(json.loads, lines)}
    every = architectures(options.registry, options.all or options.only != ["*"])
    wanted = [one for one in every if any(fnmatchcase(one.name, g) for g in options.only)]
    done = {key for key, one in known.items() if one.status not in options.again}
    missing = [one for one in wanted if (one.family, one.name) not in done]
    end = math.inf if options.budget is None else time.monotonic() + options.budget
    missing = missing if options.budget != 0 else []
    for found in survey(missing, options.world, options.limit, options.jobs):
        known[found.registry, found.name] = found
        print(f"{found.name:<44} {found.status:<8} {found.seconds:6.1f} s  {found.cause}", flush=True)
        if options.resume:
            with options.resume.open("a", encoding="utf-8") as file:
                file.write(json.dumps(as_json(found)) + "\n")
        if time.monotonic() > end:
            break
    results = list(known.values())
    if options.write:
        options.write.write_text(markdown(results, len(wanted)), encoding="utf-8")
    bad = [one.name for one in results if one.status in ("differs", "crash")]
    trained = [one for one in results if one.status != "unbuilt"]
    exact = sum(one.status == "exact" for one in trained)
    print(f"{exact} of {len(trained)} exact; {len(results) - len(trained)} that eager torch does not train")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
