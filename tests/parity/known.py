"""Where we differ from the reference on purpose. docs/algorithms.md has the same lines as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """One deliberate difference; patterns as in a shell (`*` matches anything)."""

    function: str
    case: str
    output: str
    # anywhere; only where the mask is 0; the reference refuses, or has NaN, and we give numbers
    where: Literal["anywhere", "padding", "refused", "nan"]
    reference: str  # what the reference does
    ours: str  # what we do
    why: str
    vectors: str  # names of ours that show it; "-" where none of them does

    @property
    def reason(self) -> str:
        """One line for the report."""
        return f"reference: {self.reference}; ours: {self.ours} ({self.why})"


KNOWN_DIFFERENCES: tuple[Known, ...] = (
    Known(
        function="grpo_passk",
        case="*",
        output="*",
        where="refused",
        reference="refuses a group of one",
        ours="advantage 0",
        why="a sample that failed must not stop the step; alone, it leads nobody",
        vectors="grpo_passk/group_of_one",
    ),
    Known(
        function="opo",
        case="*",
        output="*",
        where="nan",
        reference="NaN for a group without tokens",
        ours="0: there is no token to give it to",
        why="no NaN from empty rows",
        vectors="opo/group_without_tokens",
    ),
    Known(
        function="remax",
        case="*",
        output="advantages",
        where="padding",
        reference="the return stands at masked tokens inside a response",
        ours="0 there",
        why="an advantage of a masked token is never used; 0 keeps statistics clean",
        vectors="remax/holes",
    ),
    Known(
        function="gae",
        case="*",
        output="*",
        where="refused",
        reference="refuses to whiten one token",
        ours="advantage 0 (the value less its mean)",
        why="no refusal from small batches",
        vectors="gae/one_valid_token",
    ),
    Known(
        function="reinforce_plus_plus*",
        case="*",
        output="*",
        where="refused",
        reference="refuses to whiten one token",
        ours="advantage 0 (the value less its mean)",
        why="no refusal from small batches",
        vectors="-",
    ),
    Known(
        function="gdpo",
        case="*",
        output="*",
        where="refused",
        reference="refuses to whiten one token",
        ours="advantage 0 (the value less its mean)",
        why="no refusal from small batches",
        vectors="-",
    ),
    Known(
        function="masked_var",
        case="*",
        output="*",
        where="refused",
        reference="refuses fewer than two values (one, or none)",
        ours="variance 0",
        why="no refusal from small batches",
        vectors="masked_var/one_valid_token, masked_var/empty_mask",
    ),
    Known(
        function="masked_whiten",
        case="*",
        output="*",
        where="refused",
        reference="refuses fewer than two values",
        ours="the value less its mean, 0",
        why="no refusal from small batches",
        vectors="masked_whiten/one_valid_token",
    ),
    Known(
        function="agg_loss",
        case="*all_masked*",
        output="*",
        where="nan",
        reference="NaN for a batch without a valid token",
        ours="loss 0, gradient 0",
        why="a rank may hold an empty micro-batch",
        vectors="agg_loss/token-mean/all_masked, agg_loss/seq-mean-token-sum/all_masked, agg_loss/seq-mean-token-mean/all_masked, agg_loss/seq-mean-token-sum-norm/all_masked",
    ),
    Known(
        function="agg_loss",
        case="*nan_in_padding*",
        output="*",
        where="nan",
        reference="NaN in the padding spoils the sequence modes",
        ours="what stands in the padding is never used",
        why="the result does not depend on padding",
        vectors="agg_loss/seq-mean-token-sum/nan_in_padding, agg_loss/seq-mean-token-mean/nan_in_padding, agg_loss/seq-mean-token-sum-norm/nan_in_padding",
    ),
    Known(
        function="group_filter",
        case="*acc*",
        output="*",
        where="anywhere",
        reference="equal rewards such as 0.1, 0.1, 0.1 can have a deviation that is not exactly 0",
        ours="rewards that are equal have no variance",
        why="DAPO drops groups whose rewards are equal",
        vectors="group_filter/tenths/acc",
    ),
    Known(
        function="rollout_*",
        case="*",
        output="*",
        where="refused",
        reference="refuses a batch without a valid token",
        ours="weights 0, no figures",
        why="no refusal from empty batches",
        vectors="is_weights/token/no_valid, is_weights/sequence/no_valid",
    ),
    Known(
        function="trl_sampling_correction",
        case="*",
        output="importance_sampling_ratio",
        where="padding",
        reference="a ratio of 1 (bounded) in the padding",
        ours="0 there",
        why="the weight of padding is never used",
        vectors="trl_sampling_correction/token_truncate/None/2.0, trl_sampling_correction/token_mask/0.5/2.0",
    ),
    Known(
        function="*",
        case="*",
        output="*",
        where="nan",
        reference="NaN where there is nothing to average (no valid token)",
        ours="0, with gradient 0",
        why="no NaN from empty rows or batches",
        vectors="-",
    ),
)


def table() -> str:
    """The differences as a Markdown table, as docs/algorithms.md has it."""
    lines = ["| function | vectors | reference | ours | why |", "|---|---|---|---|---|"]
    lines += [
        f"| `{k.function}` | {k.vectors} | {k.reference} | {k.ours} | {k.why} |"
        for k in KNOWN_DIFFERENCES
    ]
    return "\n".join(lines)
