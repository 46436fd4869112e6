"""What the self-test says of every kind of causal model that the installed transformers has.

    python -m benchmarks.model_types [TYPE ...] [--to FILE]

Each by the config.json of its class without arguments, in a process of its own; about ten seconds
each, 40 minutes for all. A line of JSON for each: its type, and what `--check` would say.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

from engines.train.self_test.verdict import self_test

LONGEST = 512  # tokens of a sample
EXACT, REFUSED, UNTESTED, NO_DEFAULT = "exact", "refused", "untested", "no config of its own"


def judged(kind: str, folder: Path) -> tuple[str, str]:
    """How a type is judged, and why in a sentence; exact ones by the largest difference in nats."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = CONFIG_MAPPING[kind]()
    except Exception as error:  # of any kind: many are made of others and have no defaults
        return NO_DEFAULT, f"{type(error).__name__}: {error}"[:160]
    of_kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config.architectures = [of_kind if isinstance(of_kind, str) else of_kind[0]]
    config.save_pretrained(folder)
    with self_test(folder, LONGEST) as wait:
        verdict = wait()
    if verdict.refused is not None:
        return REFUSED, verdict.refused
    if verdict.untested is not None:
        return UNTESTED, verdict.untested
    also = f"; not in bfloat16: {verdict.unrounded}" if verdict.unrounded else ""
    return EXACT, f"{verdict.largest:.1e} nats{also}"


def main() -> None:
    """Judge the types that the command line names, or all."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--to", type=Path, help="a file of lines, to which these are added")
    given = parser.parse_args()
    found = Counter[str]()
    for kind in given.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder:
            how, why = judged(kind, Path(folder))
        found[how] += 1
        line = json.dumps({"type": kind, "is": how, "because": why})
        print(line, flush=True)
        if given.to is not None:
            with given.to.open("a") as file:
                file.write(f"{line}\n")
    print(", ".join(f"{number} {how}" for how, number in found.most_common()))


if __name__ == "__main__":
    main()
