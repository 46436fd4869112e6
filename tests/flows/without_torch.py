"""Runs a module of flows as `python -m MODULE WORDS` would; exit code 99 if torch was imported.

The flow process holds no tensors, and torch would cost it 150 MB. A result or an error that a worker
sends can bring it in unnoticed: reading a pickle imports the module that it names.
"""

from __future__ import annotations

import runpy
import sys

HAS_TORCH = 99


def main() -> int:
    """The exit code of the module, unless it imported torch."""
    module = sys.argv.pop(1)
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    if "torch" in sys.modules:
        print("torch was imported in the flow process", file=sys.stderr)
        return HAS_TORCH
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    sys.exit(main())
