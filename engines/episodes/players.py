"""Episodes of several players: the prompt of each, and the samples before their first turns.

A prompt that was drawn is one row until it is sampled. Then it is a row for each player (`deal`),
all in one shard: each has a conversation of its own, and sample k of every player is one episode. A
player's sample waits, untouched by the engines, until the environment says that its turn is next.
All players are the policy, or one is, and the others are an opponent: a version that does not train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from engines.data.chat_template import EMPTY, TOO_LONG, TokenizedPrompts, state_number
from engines.environments.protocol import PlayersTurn
from engines.episodes.contract import OpponentSeats
from engines.episodes.conversation import Conversation
from storage.batches.columns import OPPONENTS_TURN, UNFINISHED, WAITING, SampleStatus
from storage.batches.refs import BatchRef
from storage.batches.writing import write_batch
from storage.objects.documents import Row
from storage.objects.store import Store


def prompts_of_players(
    conversation: Conversation, rows: Sequence[Row], openings: Sequence[PlayersTurn], longest: int
) -> tuple[TokenizedPrompts, list[dict[str, Any]]]:
    """The prompts of those who begin, and the column `players` of the rows that are kept.

    The prompt of any other player has room at its end for what it is told at its first turn. A row
    of which a prompt is longer than `longest` tokens, or empty, is dropped.
    """
    begins = [told.texts[told.player] for told in openings]
    tokenized = conversation.prompts(rows, begins)
    first = dict(zip(tokenized.kept, tokenized.prompt_ids, strict=True))
    dropped, players = dict(tokenized.dropped), {}
    for number in tokenized.kept:
        told = openings[number]
        prompts = [
            first[number] if player == told.player else conversation.opened(rows[number], text)
            for player, text in enumerate(told.texts)
        ]
        if not all(prompts):
            dropped[number] = EMPTY
        elif max(map(len, prompts)) > longest:
            dropped[number] = TOO_LONG
        else:
            states = [state_number([player, text]) for player, text in enumerate(told.texts)]
            players[number] = {"begins": told.player, "prompts": prompts, "states": states}
    numbers = sorted(players)
    prompts_of_rows = TokenizedPrompts(
        prompt_ids=[first[number] for number in numbers],
        kept=numbers,
        dropped=sorted(dropped.items()),
    )
    return prompts_of_rows, [players[number] for number in numbers]


def deal(
    store: Store, prompts: BatchRef, n: int, out_key: str, opponent: OpponentSeats | None = None
) -> tuple[BatchRef, BatchRef]:
    """The prompts of P rows as rows of their players, and n samples of each before the first turn.

    Row i * players + p of the first belongs to prompt i and player p; row j of the second to row
    j // n of the first. Only samples of those who begin are to be gone on with. Where there is an
    opponent, column `frozen` says which rows are its, and their digest is that of its weights.
    """
    seats = cast("list[dict[str, Any]]", prompts.fetch_list(store, "players"))
    count = len(seats[0]["prompts"])
    goes_on = np.array([p == seat["begins"] for seat in seats for p in range(count)])
    total = len(goes_on)
    frozen = np.zeros(total, bool)
    if opponent is not None:
        groups = prompts.fetch_numpy(store, "group_id")[0].astype(np.int64)
        frozen = opponent.seats(groups, count).reshape(-1)
    digest = "" if opponent is None else opponent.digest
    nothing = [np.zeros(0)] * total
    own: dict[str, object] = {
        "prompt_ids": [np.array(ids, np.int32) for seat in seats for ids in seat["prompts"]],
        "state_id": np.array([state for seat in seats for state in seat["states"]], np.int64),
        "player": np.tile(np.arange(count), len(seats)),
        **({} if opponent is None else {"frozen": frozen.astype(np.uint8)}),
    }
    begun: dict[str, object] = {
        "response_ids": [empty.astype(np.int32) for empty in nothing],
        "rollout_logprobs": [empty.astype(np.float32) for empty in nothing],
        "weight_spans": [empty.astype(np.int64) for empty in nothing],
        "author": [empty.astype(np.uint8) for empty in nothing],
        "turn_rewards": [empty.astype(np.float32) for empty in nothing],
        "turn_order": [empty.astype(np.int64) for empty in nothing],
        "observations": [[]] * total,
        "finish_reason": [
            (OPPONENTS_TURN if frozen_row else UNFINISHED) if begins else WAITING
            for begins, frozen_row in zip(goes_on, frozen, strict=True)
        ],
        "status": np.full(total, SampleStatus.UNFINISHED, np.int64),
        "env_seconds": np.zeros(total),
        "weights_digest": [digest if frozen_row else "" for frozen_row in frozen],
        **{name: [""] * total for name in ("episode", "episode_error")},
    }
    written = write_batch(store, out_key, {**own, **begun})
    drawn = prompts.drop(["players"]).take(np.repeat(np.arange(len(prompts)), count))
    samples = written[list(begun)].take(np.repeat(np.arange(total), n))
    return drawn.with_columns(written[list(own)]), samples
