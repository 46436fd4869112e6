"""The self-test of a model, in a process of its own: python -m engines.train.self_test.child.

Arguments: the model's directory, and the tokens of the run's longest sample. Prints one line of JSON.
"""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from engines.models.attention import mixers
from engines.models.checkpoints import UNPACKED, build_empty, quantisation
from engines.models.routers import count_experts, find_experts, number_of_experts
from engines.train.batching.packed_batch import why_together
from engines.train.model.lora import expert_weights, linear_layers
from engines.train.policy import Policy
from engines.train.self_test.comparison import (
    MOST,
    SURE,
    TOLERANCE,
    Differences,
    Unpacked,
    differences,
    rounding,
    unrounded,
)
from engines.train.self_test.twin import build, samples, shorter_than, shrunken
from engines.train.self_test.verdict import Verdict

# What code of a model raises where it cannot be used so; anything may be in it.
UNFIT = (
    *(ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError),
    *(RuntimeError, ImportError, StrictDataclassError),
)


def verdict(directory: Path, longest: int) -> Verdict:
    """What the self-test says of a model, of which config.json is read and no weights.

    longest: tokens of the longest sample.
    """
    try:
        whole = build_empty(directory)
    except (*UNFIT, OSError) as error:
        return Verdict(refused=f"transformers cannot build it ({_line(error)})")
    config = whole.config
    if quantisation(config.to_dict()) not in (None, *UNPACKED):
        return Verdict(refused="its weights are quantised")
    try:
        names, together = mixers(whole).names, why_together(whole)
        linear = tuple(sorted({name.rpartition(".")[2] for name in linear_layers(whole)}))
        stacked = tuple(expert_weights(whole))
        routers = Policy(whole).routers
        has_routing = bool(routers) and None not in {
            number_of_experts(module, whole.config.get_text_config().hidden_size)
            for module in routers
        }
        experts = math.gcd(*(count_experts(module) for module in find_experts(whole)))
    except UNFIT as error:
        return Verdict(refused=f"the train engine cannot run it ({_line(error)})")
    try:
        result = compared(shrunken(config, longest))
    except Unpacked as error:
        return Verdict(refused=_window(config, longest) or str(error))
    except UNFIT as error:
        return Verdict(untested=f"a small one of its kind could not be made ({_line(error)})")
    if result.none:
        selective = 0.0 if result.selective <= result.tolerance_of_gradients else result.selective
        return Verdict(
            largest=result.largest,
            together=together,
            selective=selective,
            unrounded=unrounded(build(shrunken(config, longest)), samples()),
            routers=len(routers),
            experts=experts,
            biased=sum(bool(router.bias) for router in routers),
            told=has_routing,
            linear=linear,
            stacked=stacked,
        )
    return Verdict(refused=_cause(config, longest, result, names), largest=result.largest)


def compared(config: PretrainedConfig) -> Differences:
    """A model of this config by the train engine and by transformers.

    Raises Unpacked where the train engine cannot run it, and what transformers raises otherwise.
    """
    model, some = build(config), samples()
    moved = rounding(model, some)  # what fails in here is no fault of the train engine
    if SURE * moved > TOLERANCE:
        model = build(config, gentle=True)
        moved = rounding(model, some)
    tolerance = max(TOLERANCE, SURE * moved)
    if tolerance > MOST:
        raise RuntimeError(f"rounding alone moves its log-probs by {moved:.1g} nats")
    try:
        return differences(model, some, tolerance)
    except UNFIT as error:
        raise Unpacked(f"the train engine cannot run it ({_line(error)})") from error


def _cause(
    config: PretrainedConfig, longest: int, result: Differences, own: tuple[str, ...]
) -> str:
    """Why the numbers differ, as far as that is known."""
    if result.without_attention:
        names = ", ".join(result.without_attention)
        return f"{names} computes attention by itself, and not each packed sample apart"
    if own:
        return f"{', '.join(own)} does not compute samples beside others as each alone"
    if result.in_evaluation <= result.tolerance < result.alone:
        return (
            "in training it changes numbers at random (by a dropout or jitter in its config.json)"
        )
    if window := _window(config, longest):
        return window
    if result.alone > result.tolerance:
        return "its attention is not the causal one that the train engine computes"
    if result.packed > result.tolerance:
        return "samples that are packed into one row reach each other"
    return "the gradients of its weights differ"


def _window(config: PretrainedConfig, longest: int) -> str | None:
    """The lengths that samples are longer than, if the engine computes shorter ones right."""
    short = shorter_than(config, longest)
    try:
        if not short or not compared(shrunken(config, 0)).none:
            return None
    except (Unpacked, *UNFIT):
        return None
    return f"its {' and '.join(short)} is shorter than samples of up to {longest} tokens"


def _line(error: BaseException) -> str:
    first = " ".join(str(error).split()).split(". ")[0]
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__


def main() -> None:
    """Print what is said of the model that the arguments name."""
    warnings.filterwarnings("ignore")
    directory, longest = Path(sys.argv[1]), int(sys.argv[2])
    print(verdict(directory, longest).to_json())


if __name__ == "__main__":
    main()
