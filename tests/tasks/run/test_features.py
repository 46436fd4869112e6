"""A recipe that uses no feature imports none of their code."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import flows.grpo
from configs.grpo import GRPOConfig
from configs.recipe import load_recipe
from tasks.run.features import FEATURES, features_of
assert features_of(load_recipe(GRPOConfig, "tiny")) == []
rooms = {path.partition(":")[0].rpartition(".")[0] for path in FEATURES.values()}
print(*sorted(name for name in sys.modules if name.rpartition(".")[0] in rooms or name in rooms))
"""


def test_a_plain_run_imports_no_feature() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == []
