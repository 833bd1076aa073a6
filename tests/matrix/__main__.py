"""`python -m tests.matrix [--only NAME ...] [--write FILE]`: every architecture under every plan, compared with eager.

Exit code 0 if all architectures that were run agree, 1 if one does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

from tests.matrix.coverage import Row, markdown, row
from tests.matrix.zoo import ARCHITECTURES, FURTHER


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    names = [one.name for one in (*ARCHITECTURES, *FURTHER)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of: {', '.join(names)}")
    parser.add_argument("--world", type=int, default=4, help="simulated ranks (default 4)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--further", action="store_true", help="also those that are not among the 32")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for one in (*ARCHITECTURES, *FURTHER):
        if one.name in options.only if options.only else one in ARCHITECTURES or options.further or options.write:
            rows.append(row(one, options.world, lambda text: print(f"  {text}", flush=True)))
            print(_line(rows[-1]), flush=True)
    main_rows = [found for found in rows if found.architecture in ARCHITECTURES]
    others = [found for found in rows if found.architecture in FURTHER]
    if options.write:
        options.write.write_text(markdown(main_rows, others, options.world), encoding="utf-8")
    failed = [found.architecture.name for found in rows if not found.passed]
    print(f"{len(rows) - len(failed)} of {len(rows)} agree" + (f"; not: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _line(found: Row) -> str:
    name = f"{found.architecture.name:<18}"
    if found.error:
        return f"{name} refused: {found.error}"
    worst = {
        precision: max(run.differences.worst for run in found.runs if run.differences and run.precision == precision)
        for precision in ("fp64", "fp32")
    }
    shares = ", ".join(f"{mode} {share.flops:.0%}" for mode, share in found.sliced.items() if mode != "random")
    replicated = ", ".join(f"{op} {share.flops:.1%}" for op, share in list(found.replicated.items())[:4])
    verdict = "agrees " if found.passed else "DIFFERS"
    return (
        f"{name} {verdict} {found.operators:>4} operators, flops sliced: {shares}; no rule: {replicated or 'none'}; "
        f"worst {worst['fp64']:.0e} / {worst['fp32']:.0e}; {found.seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
