"""Episodes whose turns are answers to requests, each after a whole sequence of tokens.

Agents ask by themselves: their requests come over HTTP, several at once too. With
episodes.past_turns = as_rendered each turn of any environment is asked for after a rendering of its
own. Between two rounds an episode is a row of stored samples, with the requests that wait; what they
are after goes to the rollout engines as prompts, and the turns come back in the same order.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.data.chat_template import state_number
from engines.episodes.contract import PATHS, TOKENS, TURN_TOKENS, TURNS
from engines.episodes.episode_rows import POLICY, Episode, episode_columns, read_lists, read_numbers
from engines.episodes.request_forest import Node, RequestForest, turn_before
from engines.episodes.task_environment import TaskEnvironment
from storage.batches.columns import LIMIT, TASK, UNFINISHED, Author, SampleStatus
from storage.batches.forest import LENGTHS, PARENTS
from storage.batches.refs import BatchRef
from storage.batches.sampling_mask import COUNTS, read_masks
from storage.batches.writing import write_batch
from storage.objects.documents import Row
from storage.objects.store import Store
from storage.prompts.source import PromptSource
from storage.runs.run_store import DATA_SUFFIX

# Columns of prompts that their samples have too.
OF_PROMPT = ("prompt_ids", "group_id", "prompt_row", "state_id", "env_seed", "opening", "task")
OF_TURN = ("weights_digest", "worker", "attempt")  # of a sample: those of the turn that came last

NOT_ONE = (
    "the agent asks for two turns at once, or for another conversation than the one that it has "
    "begun, and episodes.branches = false. Set it to true"
)


@dataclass(slots=True, kw_only=True, eq=False)
class RequestEpisode(Episode):
    """An episode of requests: all its tokens are in its forest."""

    forest: RequestForest
    task: TaskEnvironment
    most: int  # tokens of a conversation after its first prompt
    drawn: dict[str, Any]  # by OF_TURN

    @property
    def turns(self) -> list[tuple[int, int]]:
        """Where each turn of the policy begins and ends."""
        first = len(self.forest.prompt)
        return [
            (start - first + node.said, start - first + len(node.ids))
            for node, start in self.forest.starts.items()
        ]

    def settle(self) -> None:
        """At an agent's end: its requests in order, and its rewards at the last turns of branches.

        What is of no branch that there is goes to the last turn of all that is of none.
        """
        self.forest = self.forest.in_order()
        nodes = self.forest.nodes
        self.observations = [node.name for node in nodes]
        self.order = list(range(len(nodes)))
        self.rewards = [math.nan] * max(len(nodes), bool(self.forest.given))
        for name, reward in self.forest.given.items():
            places = [n for n, node in enumerate(nodes) if node.branch == name]
            rest = [n for n, node in enumerate(nodes) if node.branch not in self.forest.given]
            place = [-1, *rest, *places][-1]
            self.rewards[place] = float(np.nansum([self.rewards[place], reward]))

    def add_branch_rewards(self, reward: float | None, by_branch: Mapping[str, float]) -> None:
        """An agent's rewards, to be settled; one number is for what is of no branch."""
        for name, number in {**by_branch, **({} if reward is None else {"": reward})}.items():
            self.forest.given[name] = self.forest.given.get(name, 0.0) + number

    def credit(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[R] each token's branch as a number, and what the agent gave it, less what it gave all.

        A branch that got no reward of its own is of the rest.
        """
        names = [
            node.branch if node.branch in self.forest.given else "" for node in self.forest.nodes
        ]
        lengths = [len(node.ids) for node in self.forest.nodes]
        whole = sum(self.forest.given.values())
        own = [self.forest.given.get(name, 0.0) - whole for name in names]
        ids = np.array([state_number(name) for name in names], np.int64)
        return np.repeat(ids, lengths), np.repeat(np.array(own, np.float32), lengths)

    @property
    def total(self) -> int:
        """Tokens of all of it after its prompt, at most."""
        return self.task.settings.max_tokens or self.most

    @property
    def past(self) -> tuple[list[int], list[tuple[int, list[int]]]]:
        """As of any episode, of its longest conversation, without what is also in another."""
        numbers = {node: number for number, node in enumerate(self.forest.nodes)}
        last = max(numbers, key=lambda node: len(self.forest.read(node)), default=None)
        if last is None:
            return [], []
        answers, node = [], last
        while (before := turn_before(node)) is not None:
            shown = zip(node.ids[: node.said], node.authors, strict=False)
            ids = [id for id, author in shown if author == Author.ENVIRONMENT]
            answers.append((numbers[before], ids))
            node = before
        return self.forest.read(last)[node.begins :], answers[::-1]

    @property
    def cut(self) -> list[Node]:
        """The turns that reached a limit of tokens."""
        return [node for node in self.forest.nodes if node.finish == "length"]


class RequestEpisodes:
    """Reads and writes them, and gives each request the tokens that it is after."""

    def __init__(
        self,
        store: Store,
        task_of: Callable[[Row], TaskEnvironment],
        *,
        words: int,
        forests: bool,
        path_tokens: int | None = None,
    ) -> None:
        """task_of: how a row is played. words: of the vocabulary. forests: whether rows are stored
        as such, or each as one path. path_tokens: of all paths of an episode together, at most."""
        self._store = store
        self._task_of = task_of
        self._words = words
        self._are_forests = forests
        self._path_tokens = path_tokens

    # -- rows --------------------------------------------------------------------------------------

    def read(
        self,
        prompts: BatchRef,
        n: int,
        begun: BatchRef | None,
        source: PromptSource,
        stage: str,
        group: int = 1,
        first: int = 0,
    ) -> list[RequestEpisode]:
        """The episodes of P prompts, n of each; `begun`: as `write` wrote them.

        group, first: as in Sampling.
        """
        store, places, sizes = self._store, *self._places(prompts, n)
        count, repeated = len(places), prompts.take(places)
        within = np.concatenate([*map(np.arange, sizes)])
        numbers = (prompts.own_groups(store)[places] * group + first + within).tolist()
        if begun is not None:
            numbers = read_numbers(store, begun, "sample_id")
        rows = source.rows(read_numbers(store, repeated, "prompt_row"))
        if TASK in repeated.names:
            names = repeated.fetch_list(store, TASK)
            rows = [{**row, TASK: str(name)} for row, name in zip(rows, names, strict=True)]
        tasks = [self._task_of(row) for row in rows]
        most = [task.max_new_tokens for task in tasks]
        if LIMIT in prompts.names:
            most = [*map(min, most, read_numbers(store, repeated, LIMIT))]
        values: dict[str, Sequence[Any]] = {
            "sample": numbers,
            "row": rows,
            "task": tasks,
            "seed": read_numbers(store, repeated, "env_seed"),
            "opening": list(repeated.fetch_list(store, "opening")),
            "prompt": read_lists(store, repeated, "prompt_ids"),
            "most": most,
        }
        nothing: dict[str, Any] = {"finish": UNFINISHED, "status": int(SampleStatus.UNFINISHED)}
        if begun is None:
            values["forest"] = [RequestForest(prompt) for prompt in values["prompt"]]
            values |= {name: [value] * count for name, value in {**nothing, "seconds": 0.0}.items()}
            values |= {name: [[] for _ in range(count)] for name in ("observations", "rewards")}
            values["drawn"] = [{"weights_digest": "", "worker": "", "attempt": 0}] * count
        else:
            values["forest"] = self._forests(begun, values["prompt"])
            values |= {
                "finish": list(begun.fetch_list(store, "finish_reason")),
                "status": read_numbers(store, begun, "status"),
                "seconds": read_numbers(store, begun, "env_seconds"),
                "observations": list(begun.fetch_list(store, "observations")),
                "rewards": read_lists(store, begun, "turn_rewards"),
                "ended": list(begun.fetch_list(store, "episode")),
                "error": list(begun.fetch_list(store, "episode_error")),
                "drawn": _records(store, begun),
            }
            more = {"unused": "unused_tokens", "rewritten": "past_rewritten"}
            values |= {
                field: read_numbers(store, begun, name)
                for field, name in more.items()
                if name in begun.names
            }
        rows_of_values = zip(*values.values(), strict=True)
        fields = [dict(zip(values, row, strict=True)) for row in rows_of_values]
        return [
            RequestEpisode(
                **own,
                name=f"{stage}/{own['sample']}",
                tokens=[],
                logprobs=[],
                authors=bytearray(),
                order=list(range(len(own["observations"]))),
            )
            for own in fields
        ]

    def _places(self, prompts: BatchRef, n: int) -> tuple[NDArray[np.int64], list[int]]:
        """[N] prompt of each sample, and [P] samples of each prompt."""
        sizes = prompts.group_sizes(self._store, n)
        return np.repeat(np.arange(len(prompts)), sizes), sizes

    def _forests(self, begun: BatchRef, prompts: Sequence[list[int]]) -> list[RequestForest]:
        store = self._store
        masks = read_masks(store, begun) if COUNTS in begun.names else [None] * len(begun)
        parents: Sequence[Any] = [None] * len(begun)
        if PARENTS in begun.names:
            parents = read_lists(store, begun, PARENTS)
        return [
            RequestForest.of(
                prompt, ids, logprobs, bytes(authors), _spans(spans), own, requests, mask
            )
            for prompt, ids, logprobs, authors, spans, own, requests, mask in zip(
                prompts,
                read_lists(store, begun, "response_ids"),
                read_lists(store, begun, "rollout_logprobs"),
                read_lists(store, begun, "author"),
                read_lists(store, begun, "weight_spans"),
                parents,
                begun.fetch_list(store, "requests"),
                masks,
                strict=True,
            )
        ]

    def lay_out(self, episodes: Sequence[RequestEpisode]) -> None:
        """Have the episodes' tokens as their forests have them, end to end."""
        for episode in episodes:
            episode.tokens = [id for node in episode.forest.nodes for id in node.ids]
            episode.authors = bytearray(episode.forest.authors)
            episode.mask = episode.forest.mask

    def write(
        self,
        episodes: Sequence[RequestEpisode],
        prompts: BatchRef,
        n: int,
        out_key: str,
        in_part: bool,
    ) -> tuple[BatchRef, BatchRef | None]:
        """The episodes as samples, and the rows of the requests that wait; None where none does.

        in_part: as in `episode_columns`.
        """
        self.lay_out(episodes)
        forests = [episode.forest.columns() for episode in episodes]
        columns = episode_columns(episodes, in_part)
        columns |= {name: [forest[name] for forest in forests] for name in forests[0]}
        if not self._are_forests:
            columns = {
                name: values for name, values in columns.items() if name not in (LENGTHS, PARENTS)
            }
        if any(episode.task.settings.credit == "branch" for episode in episodes):
            credits = [episode.credit() for episode in episodes]
            columns["branch_ids"] = [ids for ids, _ in credits]
            columns["branch_rewards"] = [rewards for _, rewards in credits]
        columns["sample_id"] = np.array([episode.sample for episode in episodes], np.int64)
        columns |= {name: [episode.drawn[name] for episode in episodes] for name in OF_TURN}
        columns["attempt"] = np.array(columns["attempt"], np.int64)
        written = write_batch(self._store, out_key, columns)
        present = [name for name in OF_PROMPT if name in prompts.names]
        repeated = prompts[present].take(self._places(prompts, n)[0])
        return repeated.with_columns(written), self._pending(episodes, repeated, out_key)

    def _pending(
        self, episodes: Sequence[RequestEpisode], samples: BatchRef, out_key: str
    ) -> BatchRef | None:
        waiting = [
            (number, episode, node)
            for number, episode in enumerate(episodes)
            if not episode.ended
            for node in episode.forest.waiting
        ]
        if not waiting:
            return None
        read = [episode.forest.read(node) for _, episode, node in waiting]
        seeds = [state_number([node.state, node.again]) for *_, node in waiting]
        columns: dict[str, object] = {
            "prompt_ids": [np.array(ids, np.int32) for ids in read],
            "group_id": np.array([episode.sample for _, episode, _ in waiting], np.int64),
            "branch_seed": np.array(seeds, np.int64),
            LIMIT: np.array(
                [
                    self._room(episode, node, len(ids))
                    for (_, episode, node), ids in zip(waiting, read, strict=True)
                ],
                np.int64,
            ),
        }
        key = f"{out_key.removesuffix(DATA_SUFFIX)}-requests{DATA_SUFFIX}"
        written = write_batch(self._store, key, columns)
        others = [name for name in ("prompt_row", TASK) if name in samples.names]
        return samples[others].take(np.array([n for n, *_ in waiting])).with_columns(written)

    # -- turns -------------------------------------------------------------------------------------

    def fold(self, episodes: Sequence[RequestEpisode], turns: BatchRef) -> int:
        """Answer the requests that wait, each by its row; how many. A turn that was cut off because a
        step did not wait for it is not there: it is asked for again.
        """
        store = self._store
        waiting = [
            (episode, node)
            for episode in episodes
            if not episode.ended
            for node in episode.forest.waiting
        ]
        ids, logprobs = (read_lists(store, turns, n) for n in ("response_ids", "rollout_logprobs"))
        spans = read_lists(store, turns, "weight_spans")
        reasons = [str(reason) for reason in turns.fetch_list(store, "finish_reason")]
        authors: list[list[int]] = [[]] * len(turns)
        if "author" in turns.names:
            authors = read_lists(store, turns, "author")
        masks = read_masks(store, turns) if COUNTS in turns.names else [None] * len(turns)
        drawn = _records(store, turns)
        assert len(waiting) == len(turns), "a turn for each request that waits"
        answered = 0
        for row, (episode, node) in enumerate(waiting):
            if reasons[row] == UNFINISHED:
                continue
            own = bytes(authors[row]).ljust(len(ids[row]), POLICY)
            node.logprobs, node.spans = logprobs[row], _spans(spans[row])
            mask = masks[row]
            node.mask = None if mask is None else mask.extended(len(ids[row]))
            episode.forest.answer(node, ids[row], own, reasons[row])
            episode.drawn, episode.finish = drawn[row], reasons[row]
            answered += 1
        return answered

    def limit(self, episode: RequestEpisode) -> str:
        """Which limit of tokens a turn of it reached that ends it; empty: none."""
        settings = episode.task.settings
        for node in episode.cut:
            if len(node.written) != settings.max_turn_tokens:
                return TOKENS if self._left_of_paths(episode) > 0 else PATHS
            if settings.full_turn != "counts":
                return TURN_TOKENS
        return ""

    def given(
        self, episode: RequestEpisode, calls: Callable[[str], Any]
    ) -> dict[str, Callable[[], Mapping[str, Any]]]:
        """What its agent is given, by the names of its requests; `calls`: of a turn's text."""
        forest, ends = episode.forest, bool(self.limit(episode))
        turns: dict[str, Callable[[], Mapping[str, Any]]] = {
            name: functools.partial(dict, name=name, refused=True) for name in forest.refused
        }
        for node, text in zip(forest.nodes, episode.texts, strict=True):
            cut = node.finish == "length"
            if not (cut and ends):
                turns[node.name] = functools.partial(
                    self._turn, forest, node, text, calls(text), cut
                )
        return turns

    @staticmethod
    def _turn(
        forest: RequestForest, node: Node, text: str, calls: Sequence[Any] | None, cut: bool
    ) -> Mapping[str, Any]:
        return {
            "name": node.name,
            "text": text,
            "calls": calls,
            "cut": cut,
            "prompt_ids": forest.read(node),
            "ids": node.written,
            "logprobs": node.logprobs,
        }

    # -- requests ----------------------------------------------------------------------------------

    def check_known(self, ids: Sequence[int]) -> None:
        """ValueError for a token id that the tokenizer does not know."""
        if (other := max(ids, default=0)) >= self._words:
            text = f"the agent gave the token id {other}; the model's tokenizer has {self._words}"
            raise ValueError(f"{text} tokens")

    def ask(self, episode: RequestEpisode, observation: str) -> None:
        """The requests in an agent's observation become those that wait, or are refused.

        ValueError, in a sentence, for one that cannot be asked.
        """
        forest = episode.forest
        for request in json.loads(observation)["requests"]:
            if request["name"] in forest.names:
                continue
            self._ask(episode, request)
            if episode.ended:
                return

    def _ask(self, episode: RequestEpisode, request: Mapping[str, Any]) -> None:
        forest, name = episode.forest, request["name"]
        settings = episode.task.settings
        if len(forest.nodes) + len(forest.waiting) >= settings.max_turns:
            self._refuse(episode, name, TURNS)
            return
        before = next((node for node in forest.nodes if node.name == request.get("after")), None)
        ids, authors = self._read(episode, request, before)
        if not ids:
            self._refuse(episode, name, TOKENS, alone=False)
            return
        node = forest.ask(name, ids, authors, branch=request["branch"])
        began = before or turn_before(node)
        node.begins = began.begins if began else min(len(ids), episode.task.data.max_prompt_tokens)
        if not settings.branches and not forest.is_one_path:
            raise ValueError(NOT_ONE)
        if self._full(episode):
            forest.waiting.remove(node)
            self._refuse(episode, name, TOKENS)
        elif self._left_of_paths(episode) < len(forest.waiting):
            forest.waiting.remove(node)
            self._refuse(episode, name, PATHS, alone=False)
        elif len(ids) - node.begins >= episode.most:
            forest.waiting.remove(node)
            self._refuse(episode, name, TOKENS, alone=False)

    def ask_first(self, episode: RequestEpisode) -> None:
        """The first turn, after the prompt, where the environment does not ask by itself."""
        node = episode.forest.ask("0", episode.prompt)
        node.begins = len(episode.prompt)

    def ask_again(self, episode: RequestEpisode, told: str) -> None:
        """The turn after an answer of an environment that is told the last one's text."""
        forest, task = episode.forest, episode.task
        talk, role, last = (
            task.conversation.for_row(episode.row),
            task.answers_as,
            forest.nodes[-1],
        )
        if talk.rewrites and task.settings.past_turns == "as_rendered":
            answers = [*(node.told for node in forest.nodes[1:]), told]
            past = list(zip(episode.texts, answers, strict=True))
            ids = talk.rendered(forest.prompt, past, role)
            authors: Sequence[int] = ()
        else:
            ended = last.finish != "length"
            delta = talk.delta(told, ended=ended, last=last.ids[-1], role=role)
            ids, authors = [*forest.path(last, len(last.ids)), *delta.ids], delta.authors
        node = forest.ask(str(len(forest.nodes)), ids, authors, told=told)
        node.begins = len(forest.prompt)
        if self._full(episode) or len(ids) - node.begins >= episode.most:
            episode.end(TOKENS, SampleStatus.TRUNCATED)
        elif self._left_of_paths(episode) < 1:
            episode.end(PATHS, SampleStatus.TRUNCATED)

    def _read(
        self, episode: RequestEpisode, request: Mapping[str, Any], before: Node | None
    ) -> tuple[list[int], Sequence[int]]:
        """All that a request is after, and the authors of its end; nothing where it is too long."""
        if (ids := request.get("ids")) is not None:
            self.check_known(ids)
            return ids, ()
        task, path, ended = episode.task, [], True
        if before is not None:
            path = episode.forest.path(before, len(before.ids))
            ended = before.finish != "length"
        first = not episode.forest.nodes
        longest = None if first else task.data.max_prompt_tokens + episode.most - 1
        return task.read_request(episode.row, request, path, ended, longest)

    def _refuse(self, episode: RequestEpisode, name: str, why: str, alone: bool = True) -> None:
        """A request meets a limit; with `alone` the episode ends where nothing else is waited for."""
        forest = episode.forest
        if alone and not forest.waiting:
            status = SampleStatus.OK if why == TURNS else SampleStatus.TRUNCATED
            episode.end(why, status)
            return
        forest.refused[name] = (why, len(forest.nodes))

    def met_limit(self, episode: RequestEpisode) -> str:
        """The limit that ended an agent: it got no turn after it, or gave no reward. Empty: none."""
        forest = episode.forest
        last = [
            why
            for why, number in forest.refused.values()
            if number == len(forest.nodes) or not episode.forest.given
        ]
        return last[-1] if last else ""

    # -- limits ------------------------------------------------------------------------------------

    def _left(self, episode: RequestEpisode) -> int:
        """Tokens that the whole episode may still get."""
        forest = episode.forest
        waiting = sum(len(node.ids) for node in forest.waiting)
        return episode.total - forest.tokens - waiting

    def _full(self, episode: RequestEpisode) -> bool:
        """Whether not each request that waits could get a token."""
        return self._left(episode) < len(episode.forest.waiting)

    def _left_of_paths(self, episode: RequestEpisode) -> int:
        """Tokens that its paths together may still get; of one path there are always enough."""
        forest = episode.forest
        if self._path_tokens is None:
            return episode.total
        return self._path_tokens - forest.path_tokens

    def _room(self, episode: RequestEpisode, node: Node, read: int) -> int:
        """The longest turn that a request gets, in tokens; those that wait share what is left."""
        left = min(self._left(episode), self._left_of_paths(episode))
        room = min(left // len(episode.forest.waiting), episode.most - (read - node.begins))
        return min(room, episode.task.settings.max_turn_tokens or room)


def _records(store: Store, ref: BatchRef) -> list[dict[str, Any]]:
    """Who drew each row (OF_TURN)."""
    digests, workers = (ref.fetch_list(store, name) for name in ("weights_digest", "worker"))
    return [
        {"weights_digest": str(digest), "worker": str(worker), "attempt": attempt}
        for digest, worker, attempt in zip(
            digests, workers, read_numbers(store, ref, "attempt"), strict=True
        )
    ]


def _spans(flat: Sequence[int]) -> list[tuple[int, int, int]]:
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
