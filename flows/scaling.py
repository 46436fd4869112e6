"""Fit how reward grows with compute, and forecast what more of it would buy.

refrain scaling RUN [RUN …] [--of reward|eval/SUITE/METRIC] [--picture FILE]
"""

from __future__ import annotations

import sys

from tasks.commands.command import Command, option

main = Command(
    "scaling",
    "ScaleRL's sigmoid (arXiv:2510.13786) R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B) of reward "
    "over device-hours, with intervals that hold for all four parameters together at 95 %, and "
    "a forecast. Where the points do not say which curve it is, one sentence says why, and the "
    "exit code is 1.",
    "tasks.commands.scaling:answer",
    option(
        "--of",
        default="reward",
        metavar="METRIC",
        help="reward, the mean of each step [default]; a metric of the commits; eval/SUITE/METRIC",
    ),
    option("--skip", type=int, default=0, metavar="N", help="leave out the first N steps [0]"),
    option("--picture", metavar="FILE", help="write a PNG too"),
    several=True,
)

if __name__ == "__main__":
    sys.exit(main())
