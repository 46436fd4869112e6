"""Where we differ from the reference on purpose. docs/algorithms.md has the same lines as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """One deliberate difference; patterns as in a shell (`*` matches anything)."""

    functions: tuple[str, ...]
    case: str = "*"
    output: str
    # anywhere; only where the mask is 0; the reference refuses, or has NaN, and we give numbers
    where: Literal["anywhere", "padding", "refused", "nan"]
    reference: str  # what the reference does
    ours: str  # what we do
    why: str
    vectors: str  # names of those that show it

    @property
    def reason(self) -> str:
        """One line for the report."""
        return f"reference: {self.reference}; ours: {self.ours} ({self.why})"


_FEW = "a small batch must not end a run"

KNOWN_DIFFERENCES: tuple[Known, ...] = (
    Known(
        functions=("grpo_passk",),
        output="*",
        where="refused",
        reference="refuses a group of one",
        ours="advantage 0",
        why="failed samples can leave one",
        vectors="grpo_passk/group_of_one",
    ),
    Known(
        functions=("gae", "reinforce_plus_plus*", "gdpo", "masked_whiten"),
        output="*",
        where="refused",
        reference="refuses to whiten one token",
        ours="the value less its mean, 0",
        why=_FEW,
        vectors="gae/one_valid_token, masked_whiten/one_valid_token",
    ),
    Known(
        functions=("masked_var",),
        output="*",
        where="refused",
        reference="refuses one value, or none",
        ours="variance 0",
        why=_FEW,
        vectors="masked_var/one_valid_token, masked_var/empty_mask",
    ),
    Known(
        functions=("rollout_*",),
        output="*",
        where="refused",
        reference="refuses a batch without a valid token",
        ours="weights 0, no metrics",
        why="a rank may hold one",
        vectors="is_weights/token/no_valid, is_weights/sequence/no_valid",
    ),
    Known(
        functions=("agg_loss",),
        case="*nan_in_padding*",
        output="*",
        where="nan",
        reference="NaN in the padding spoils the sequence modes",
        ours="padding is never used",
        why="it is no data",
        vectors="agg_loss/seq-mean-token-sum/nan_in_padding, agg_loss/seq-mean-token-mean/nan_in_padding, agg_loss/seq-mean-token-sum-norm/nan_in_padding",
    ),
    Known(
        functions=("*",),
        output="*",
        where="nan",
        reference="NaN where no token is valid",
        ours="0, with gradient 0",
        why="one empty row must not spoil the step",
        vectors="opo/group_without_tokens, agg_loss/token-mean/all_masked, agg_loss/seq-mean-token-sum/all_masked, agg_loss/seq-mean-token-mean/all_masked, agg_loss/seq-mean-token-sum-norm/all_masked",
    ),
    Known(
        functions=("group_filter",),
        case="*acc*",
        output="*",
        where="anywhere",
        reference="keeps a group of equal rewards whose computed deviation is not 0",
        ours="left out",
        why="rounding is no reason to keep one",
        vectors="group_filter/tenths/acc",
    ),
    Known(
        functions=("remax",),
        output="advantages",
        where="padding",
        reference="the return stands at masked tokens of a response",
        ours="0",
        why="they do not train",
        vectors="remax/holes",
    ),
    Known(
        functions=("trl_sampling_correction",),
        output="importance_sampling_ratio",
        where="padding",
        reference="a bounded ratio of 1 in the padding",
        ours="0",
        why="padding is not stored",
        vectors="trl_sampling_correction/token_truncate/None/2.0, trl_sampling_correction/token_mask/0.5/2.0",
    ),
    Known(
        functions=("compute_embodied_reward",),
        output="score",
        where="anywhere",
        reference="a missing embedding is zeros, and scored 0",
        ours="the sample is failed, without a reward",
        why="a failure is never data",
        vectors="compute_embodied_reward/zero_embedding_success_and_failure",
    ),
)


def table() -> str:
    """The differences as a Markdown table, as docs/algorithms.md has it; a report names their vectors."""
    lines = ["| function | reference | ours, because |", "|---|---|---|"]
    lines += [
        f"| {', '.join(f'`{name}`' for name in k.functions)} | {k.reference} | {k.ours}: {k.why} |"
        for k in KNOWN_DIFFERENCES
    ]
    return "\n".join(lines)
