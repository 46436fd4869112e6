"""The flow process imports storage, and must not load torch with it."""

import subprocess
import sys
from pathlib import Path

MODULES = sorted(
    ".".join(path.with_suffix("").parts)
    for path in Path("storage").rglob("*.py")
    if path.stem != "__init__"
)
HEAVY = ("torch", "tensordict", "transformers", "vllm", "prefect", "dask", "distributed", "s3fs")

PROGRAM = """
import sys, {modules}
print([name for name in {heavy} if name in sys.modules])
import numpy as np
from storage.batches.writing import Jagged, write_batch
from storage.objects.store import Store
store = Store("memory://torch-free")
ref = write_batch(store, "a", {{"prompt_ids": [[1, 2], [3]], "reward": [0.5, 1.0], "worker": ["a", "b"]}})
ref = ref.take([1, 0])
assert ref.fetch_list(store, "worker") == ["b", "a"]
assert ref.fetch_numpy(store, "prompt_ids")[0].tolist() == [3, 1, 2]
print("torch" in sys.modules)
"""


def test_storage_needs_no_torch_until_tensors_do() -> None:
    program = PROGRAM.format(modules=", ".join(MODULES), heavy=HEAVY)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
