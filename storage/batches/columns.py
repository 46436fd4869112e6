"""The columns of a batch: their names, what each row of them holds, and the status of a sample.

A column that is not declared here can be stored too; a declared one is checked when it is written.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# dense: every row has the same shape. jagged: rows differ in length along their first dimension.
# str and json: one string or JSON value per row, stored as UTF-8.
Kind = Literal["dense", "jagged", "str", "json"]


class SampleStatus(enum.IntEnum):
    """What became of a sample. A failed one is never data: it has no reward."""

    OK = 0
    TRUNCATED = 1  # ended by the limit of new tokens
    FAILED = 2  # sampling or scoring failed; `reward` is meaningless
    UNFINISHED = 3  # to go on from its tokens: carried to a later step, or saved on the way


class Author(enum.IntEnum):
    """Who wrote a token of a conversation."""

    POLICY = 1
    ENVIRONMENT = 2  # what it answered
    TEMPLATE = 3  # the chat template's words around a message
    BUDGET = 4  # words within a turn of the policy that end a thought (rollout.thinking)


UNFINISHED = "unfinished"  # finish reason of a sample that was cut and can go on
SEGMENT = "segment"  # finish reason of a path that has got a segment, and may go on
WAITING = "waiting"  # finish reason of a sample that goes on when others have had their turns
GIVEN = "given"  # finish reason of a sample that is an answer of the data
OPPONENTS_TURN = "opponent's turn"  # finish reason of a frozen player's sample whose turn is next
LIMIT = "max_new_tokens"  # column of prompts, where one of a run's tasks has a limit of its own
TURN_LIMIT = "max_turn_tokens"  # likewise, of a turn of an episode
GROUP_SIZE = "group_size"  # likewise, where one of a run's tasks has groups of its own size
GRAMMAR = "grammar"  # likewise, where the text of some turns has one
TASK = "task"  # column of rows, prompts and samples, where a run has several tasks
TOKENS = "I32"  # number format of token ids; older objects hold I64


@dataclass(frozen=True, slots=True)
class Declared:
    """What a declared column holds."""

    kind: Kind
    dtype: str  # safetensors code; U8 for str and json
    meaning: str
    wide: str = ""  # a second code, where some models' numbers need it


COLUMNS: dict[str, Declared] = {
    "prompt_ids": Declared("jagged", TOKENS, "tokens of the prompt"),
    "response_ids": Declared("jagged", TOKENS, "tokens of the completion"),
    "rollout_logprobs": Declared(
        "jagged", "F32", "behaviour policy's log-prob of each response token, at its temperature"
    ),
    "weight_spans": Declared(
        "jagged", "I64", "flat triples policy version, start, stop over the response tokens"
    ),
    "prompt_routed_experts": Declared(
        "jagged", "U8", "experts of each prompt token but the last, [layers, k]", wide="U16"
    ),
    "routed_experts": Declared(
        "jagged",
        "U8",
        "experts of the token before each response token, [layers, k]; 255, or 65535: not known",
        wide="U16",
    ),
    "sampling_mask_counts": Declared(
        "jagged",
        "I32",
        "words that each response token was drawn from; 0: all; -1 - t: the same as of token t",
    ),
    "sampling_mask_words": Declared(
        "jagged",
        "I32",
        "those words, token after token: token ids in rising order, or -1 - id of all left out",
    ),
    "grammar": Declared(
        "str", "U8", "JSON: what the text of the turn has to be; empty: any (requests only)"
    ),
    "response_mask": Declared("jagged", "U8", "1 where the policy wrote the response token"),
    "author": Declared(
        "jagged", "U8", "Author of each response token (episodes, thoughts with a budget)"
    ),
    "env_seed": Declared("dense", "I64", "seed of the episode's environment, [N]"),
    "opening": Declared("str", "U8", "digest of what the episode's environment said first"),
    "env_code": Declared("str", "U8", "digest of the environment's code (prompts only)"),
    "players": Declared(
        "json", "U8", "who begins, and the prompt of each of several players (prompts only)"
    ),
    "player": Declared("dense", "I64", "player of the episode, from 0, [N]"),
    "frozen": Declared(
        "dense", "U8", "1 where the player is the opponent: a version that does not train, [N]"
    ),
    "episode_id": Declared("dense", "I64", "sample_id of the episode's player 0, [N]"),
    "turn_order": Declared(
        "jagged", "I64", "number in the episode of each turn of the sample's player"
    ),
    "observations": Declared("json", "U8", "digests of what the environment answered, by turn"),
    "turn_rewards": Declared("jagged", "F32", "the environment's reward of each turn; NaN: none"),
    "env_seconds": Declared("dense", "F64", "seconds in the episode's environment, [N]"),
    "episode": Declared("str", "U8", "why the episode ended; empty while it goes on"),
    "episode_error": Declared("str", "U8", "why the episode failed; empty where it did not"),
    "unused_tokens": Declared(
        "dense", "I64", "tokens at the end, after the action that ended the episode, [N]"
    ),
    "past_rewritten": Declared(
        "dense",
        "F32",
        "share of what the model read before its last turn that its chat template lacks, [N]",
    ),
    "embedding": Declared(
        "dense", "F32", "the encoder's of the episode's frames, [N, D]; NaN: none"
    ),
    "encoder": Declared("str", "U8", "digest of the encoder that made the embedding"),
    "embedding_error": Declared("str", "U8", "why there is no embedding; empty where there is one"),
    "reward": Declared("dense", "F32", "score of the completion, [N]"),
    "reward_code": Declared("str", "U8", "digest of the functions that scored; see the commit"),
    "repeated_ngrams": Declared("dense", "F32", "share of the response's 4-grams that repeat, [N]"),
    "token_rewards": Declared("jagged", "F32", "reward of each response token"),
    "advantages": Declared("jagged", "F32", "advantage of each response token"),
    "returns": Declared("jagged", "F32", "return of each response token"),
    "values": Declared("jagged", "F32", "critic's value of each response token"),
    "old_logprobs": Declared("jagged", "F32", "proximal policy's log-prob of each response token"),
    "staleness": Declared(
        "jagged", "I32", "versions by which the one that trains is ahead of each token's own"
    ),
    "ref_logprobs": Declared("jagged", "F32", "reference's log-prob of each response token"),
    "teacher": Declared("str", "U8", "name of the sample's teacher"),
    "teacher_digest": Declared("str", "U8", "digest of the teacher's weights"),
    "teacher_logprobs": Declared("jagged", "F32", "teacher's log-prob of each response token"),
    "teacher_topk_ids": Declared("jagged", TOKENS, "teacher's k likeliest tokens at each, [k]"),
    "teacher_topk_logprobs": Declared("jagged", "F32", "teacher's log-probs of those, [k]"),
    "teacher_tail_logprobs": Declared("jagged", "F32", "teacher's log-prob of all others together"),
    "sum_pi_squared": Declared(
        "jagged", "F32", "sum over the vocabulary of the proximal policy's squared probabilities"
    ),
    "correction_weights": Declared("jagged", "F32", "behaviour-policy weight of each token"),
    "correction_kept": Declared("jagged", "U8", "1 where no correction leaves the token out"),
    "turn_ids": Declared("jagged", "I64", "number of the turn of each response token"),
    "turn_states": Declared("jagged", "I64", "number of the state in which that turn began"),
    "branch_seed": Declared(
        "dense", "I64", "what tells the row's noise from that of other rows of its prompt, [N]"
    ),
    "tree_node": Declared("dense", "I64", "number of the segment in its prompt's tree, [N]"),
    "tree_parent": Declared("dense", "I64", "number of the segment before it; 0: the prompt, [N]"),
    "tree_depth": Declared("dense", "I64", "segments from the prompt to the end of this one, [N]"),
    "tree_share": Declared("dense", "I64", "leaves that the segment stands for, [N]"),
    "node_lengths": Declared(
        "jagged", "I64", "response tokens of each node of an episode's forest (forest.py)"
    ),
    "node_parents": Declared(
        "jagged", "I64", "number of the token after which each of those nodes goes on, from 1"
    ),
    "branch_ids": Declared(
        "jagged", "I64", "number of the branch that each response token is of (episodes.credit)"
    ),
    "branch_rewards": Declared(
        "jagged", "F32", "what the agent gave each token's branch, less what it gave the episode"
    ),
    "requests": Declared(
        "json", "U8", "names and places of the requests that an episode's nodes are"
    ),
    "tree_path": Declared("jagged", "I64", "numbers of the nodes of the sample's segments"),
    "tree_lengths": Declared("jagged", "I64", "response tokens of each of those segments"),
    "baseline_reward": Declared("dense", "F32", "reward of the prompt's greedy completion, [N]"),
    LIMIT: Declared("dense", "I64", "longest completion, in tokens, [N] (prompts only)"),
    TURN_LIMIT: Declared("dense", "I64", "longest turn, in tokens; 0: none, [N] (prompts only)"),
    GROUP_SIZE: Declared("dense", "I64", "completions of the prompt, [N] (prompts only)"),
    "state_id": Declared("dense", "I64", "number of the state that the prompt shows, [N]"),
    "group_id": Declared("dense", "I64", "number of the prompt in the run, [N]"),
    "sample_id": Declared("dense", "I64", "number of the sample in the run, [N]"),
    "prompt_row": Declared("dense", "I64", "row number in the dataset, [N]"),
    TASK: Declared("str", "U8", "name of the row's task, where there are several"),
    "status": Declared("dense", "I64", "SampleStatus, [N]"),
    "finish_reason": Declared("str", "U8", "why sampling ended, as the engine names it"),
    "weights_digest": Declared("str", "U8", "digest of the weights that the engine held"),
    "worker": Declared("str", "U8", "name of the worker that made the row"),
    "attempt": Declared("dense", "I64", "attempt that made the row, [N]"),
    "row": Declared("json", "U8", "the dataset row (prompts only)"),
}

# Integers that are stored in fewer bytes than they are handed over in, or than older objects hold.
WIDER = {"I32": "I64"}

# What is kept of an episode from turn to turn, beside its tokens.
EPISODE = ("observations", "turn_rewards", "env_seconds", "episode", "episode_error")
IN_PART = ("unused_tokens",)  # likewise, where a turn may be acted on in part
REWRITTEN = ("past_rewritten",)  # likewise, where the template rewrites earlier turns
OF_PLAYERS = ("turn_order", "episode_id")  # likewise, where there are several players

# Columns that a sample shares with its prompt; they are referred to, not written again.
PROMPT_COLUMNS = (
    *("prompt_ids", "group_id", "prompt_row", "state_id", "env_seed", "opening"),
    *("player", "frozen", "opening_frame", "frame", "task"),
)
# Columns that are named after reward functions, and what the names begin with.
SCORE = "score/"  # score/<function>: F32 [N], what the function gave; NaN where nothing
EXTRA = "extra/"  # extra/<function>/<column>: json, what it gave to log_extra; null where nothing


def policy_mask(authors: NDArray[np.uint8], unused: int = 0) -> NDArray[np.uint8]:
    """1 for each token [T] that trains: the policy's, but for the `unused` ones at the end.

    Authors 1 1 2 1 1, of which the last was not acted on: 1 1 0 1 0.
    """
    mask = (authors == Author.POLICY).astype(np.uint8)
    mask[len(mask) - unused :] = 0
    return mask


def kind_of(name: str) -> Kind | None:
    """The kind of a column whose values must not decide it; None for others."""
    if name in COLUMNS:
        return COLUMNS[name].kind
    return "json" if name.startswith(EXTRA) else None


def narrowed(name: str, dtype: str) -> str:
    """The number format that rows of a column are read in: the declared one, where that is narrower.

    Token ids that an older Refrain stored as I64 are read, and joined with newer ones, as I32.
    """
    declared = COLUMNS.get(name)
    narrow = declared is not None and WIDER.get(declared.dtype) == dtype
    return declared.dtype if declared is not None and narrow else dtype
