"""`python -m tests.parity FOLDER`: check a folder of reference vectors against our functions.

A line for each function: cases passed, failed, known differences, and the worst error in units of
the allowed one. Every case runs in its own dtype and again in the other. Exit status 1 on a failure.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch

from tests.parity import (
    advantages,
    balancing,
    corrections,
    distillation,
    embodied,
    policy,
    primitives,
    shaping,
    trees,
    trl,
    values_kl,
)
from tests.parity.answers import Adapter, Answer
from tests.parity.check import Outcome, check, in_dtype
from tests.parity.known import table
from tests.parity.vectors import Case, read_folder, vector_files

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def adapters() -> dict[str, Adapter]:
    """Adapter by the reference's function name."""
    found: dict[str, Adapter] = {}
    modules = (
        primitives,
        advantages,
        policy,
        values_kl,
        corrections,
        shaping,
        trl,
        distillation,
        trees,
        embodied,
        balancing,
    )
    for module in modules:
        found |= module.ADAPTERS
    found["gpg"] = gpg
    return found


def gpg(case: Case) -> Answer:
    """GPG's advantages and GPG's loss have the same name in the reference."""
    module = advantages if "token_level_rewards" in case.inputs else policy
    return module.ADAPTERS["gpg"](case)


def outcomes(cases: list[Case]) -> dict[str, list[Outcome]]:
    """Outcomes by function, each case in both dtypes; a function without adapter fails."""
    known, result = adapters(), defaultdict(list)
    for case in cases:
        if case.function not in known:
            missing = Outcome(
                case=case.name,
                function=case.function,
                verdict="failed",
                worst=float("inf"),
                why="no function of ours is named for it",
            )
            result[case.function].append(missing)
            continue
        for dtype in DTYPES.values():
            result[case.function].append(check(in_dtype(case, dtype), known[case.function]))
    return result


def report(function: str, results: list[Outcome], verbose: bool) -> None:
    """One line, and one for each failure (verbose: for each known difference too)."""
    count = {v: sum(o.verdict == v for o in results) for v in ("passed", "failed", "known")}
    passed = [o for o in results if o.verdict == "passed"]
    worst = max(passed, key=lambda o: o.worst, default=None)
    text = f"worst {worst.worst:.2g} of what is allowed ({worst.case})" if worst else ""
    print(
        f"{function:40} passed {count['passed']:4}  failed {count['failed']:3}  "
        f"known difference {count['known']:3}  {text}"
    )
    shown = {"failed", "known"} if verbose else {"failed"}
    for verdict, case, why in dict.fromkeys((o.verdict, o.case, o.why) for o in results):
        if verdict in shown:
            print(f"    {verdict}: {case}: {why}")


def main(arguments: list[str]) -> int:
    """Check a folder; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="folder with *.json files of vectors")
    parser.add_argument("--differences", action="store_true", help="print what differs on purpose")
    parser.add_argument("--verbose", action="store_true", help="also list known differences")
    parser.add_argument("--only", default="", help="functions whose name contains this")
    options = parser.parse_args(arguments)
    if options.differences:
        print(table())
        return 0
    if options.folder is None:
        parser.error("name a folder of vectors")
    others = [path.name for path, ours in vector_files(options.folder).items() if not ours]
    if others:
        print(f"not looked at, their cases name no function: {', '.join(others)}")
    cases = [c for c in read_folder(options.folder) if options.only in c.function]
    if not cases:
        print(f"{options.folder} holds no vectors.", file=sys.stderr)
        return 1
    results = outcomes(cases)
    for function, found in results.items():
        report(function, found, options.verbose)
    every = [o for found in results.values() for o in found]
    failed = sum(o.verdict == "failed" for o in every)
    known = sum(o.verdict == "known" for o in every)
    print(
        f"{len(cases)} cases, each in float32 and float64: {len(every) - failed - known} passed, "
        f"{failed} failed, {known} known differences"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
