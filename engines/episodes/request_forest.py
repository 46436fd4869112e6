"""The requests of an episode, each where its tokens go on from those of others: a forest.

A request asks for a turn of the model after a whole sequence of tokens. What of it stands already,
in the prompt or in an earlier request and its turn, is shared, token by token; the rest of it and the
turn are a node. So each token stands once, in its true context, whether an agent asks in parallel,
begins another conversation, or has another past than it had. storage/batches/forest.py says how
forests are stored.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from storage.batches.columns import Author
from storage.batches.forest import LENGTHS, PARENTS
from storage.batches.sampling_mask import NO_TOKENS, SamplingMask

Span = tuple[int, int, int]  # policy version, and from which token to which it wrote


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """What a request added to the forest, and the turn that answered it.

    Example: after the prompt [5, 6] the policy wrote 7 8, and was told 2, before it wrote 9
        Node(before=None, at=2, ids=[7, 8]), and after it Node(before=it, at=2, said=1, ids=[2, 9])
    """

    name: str  # of the request
    before: Node | None  # it goes on after the first `at` tokens of this one; None: of the prompt
    at: int
    ids: list[int]  # [T] tokens that are new in the request, and then those of the turn
    said: int  # how many of them are the request's
    authors: bytes  # [T]
    begins: int = 0  # tokens of its path with which its conversation began
    told: str = ""  # what the environment said for it, where that is kept
    branch: str = ""  # what its agent calls the part of the episode that it is of
    state: int = 0  # number of the sequence after which the turn was asked for
    again: int = 0  # how often a turn was asked for after that sequence before
    finish: str = ""  # why the engine stopped; empty: it waits for its turn
    logprobs: list[float] = field(default_factory=list)  # of the turn's tokens
    spans: list[Span] = field(default_factory=list)  # over the turn's tokens
    mask: SamplingMask | None = None  # of the turn's tokens

    @property
    def written(self) -> list[int]:
        """The turn's tokens."""
        return self.ids[self.said :]


def state_of(ids: Sequence[int]) -> int:
    """Number of a sequence of tokens, in [0, 2**63)."""
    digest = hashlib.blake2b(np.array(ids, np.int32).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RequestForest:
    """The requests of one episode: those that were answered, in order, and those that wait."""

    def __init__(self, prompt: list[int]) -> None:
        """prompt: token ids of the episode's prompt."""
        self.prompt = prompt
        self.nodes: list[Node] = []
        self.waiting: list[Node] = []
        # By name, of requests that met a limit: which, and how many had been answered.
        self.refused: dict[str, tuple[str, int]] = {}
        self.given: dict[str, float] = {}  # rewards of an agent, by branch
        self._after: dict[Node | None, list[Node]] = {}  # answered nodes, by the one before

    @property
    def tokens(self) -> int:
        """Of all answered nodes."""
        return sum(len(node.ids) for node in self.nodes)

    @property
    def path_tokens(self) -> int:
        """Tokens of all its paths, those that several share counted in each."""
        nodes = [*self.nodes, *self.waiting]
        followed = {(node.before, node.at) for node in nodes}
        ends = [node for node in nodes if (node, len(node.ids)) not in followed]
        return sum(map(self._path_length, ends))

    @staticmethod
    def _path_length(node: Node) -> int:
        """Tokens from the beginning of a node's conversation to its end."""
        length, at, before = len(node.ids), node.at, node.before
        while before is not None:
            length, at, before = length + at, before.at, before.before
        return length + at

    @property
    def names(self) -> set[str]:
        """Of all requests."""
        return {*(node.name for node in (*self.nodes, *self.waiting)), *self.refused}

    def path(self, node: Node | None, at: int) -> list[int]:
        """The tokens up to the first `at` ones of a node, from the beginning of its conversation."""
        parts = []
        while node is not None:
            parts.append(node.ids[:at])
            at, node = node.at, node.before
        return [id for part in [self.prompt[:at], *reversed(parts)] for id in part]

    def read(self, node: Node) -> list[int]:
        """The tokens after which a node's turn was asked for."""
        return self.path(node, node.said)

    def place(self, ids: Sequence[int]) -> tuple[Node | None, int, int]:
        """The longest beginning of a sequence that stands: where it ends, and its tokens.

        After the prompt [5, 6] and a node [7, 8], [5, 6, 7, 9] has three: (node, 1, 3).
        """
        best: tuple[int, Node | None, int] = (-1, None, 0)
        open: list[tuple[Node | None, int]] = [(None, 0)]  # nodes that begin after so many tokens
        while open:
            node, start = open.pop()
            own = self.prompt if node is None else node.ids
            equal = _common(own, ids[start : start + len(own)])
            if start + equal > best[0]:
                best = (start + equal, node, equal)
            open += [
                (other, start + other.at)
                for other in reversed(self._after.get(node, []))
                if other.at <= equal
            ]
        tokens, node, at = best
        return node, at, tokens

    def ask(self, name: str, ids: Sequence[int], authors: Sequence[int] = (), **more: Any) -> Node:
        """A request for a turn after a sequence becomes one that waits.

        authors: of the last tokens of it; the others are the environment's.
        """
        before, at, standing = self.place(ids)
        new = list(ids[standing:])
        own = bytes(authors[max(0, len(authors) - len(new)) :])
        node = Node(
            name=name,
            before=before,
            at=at,
            ids=new,
            said=len(new),
            authors=own.rjust(len(new), bytes([Author.ENVIRONMENT])),
            state=state_of(ids),
            **more,
        )
        node.again = sum(other.state == node.state for other in (*self.nodes, *self.waiting))
        self.waiting.append(node)
        return node

    def answer(self, node: Node, ids: Sequence[int], authors: bytes, finish: str) -> None:
        """A turn for a request that waits; what another has brought in since is shared with it."""
        self.waiting.remove(node)
        whole = self.read(node)
        before, at, standing = self.place(whole)
        new = whole[standing:]
        node.before, node.at, node.said = before, at, len(new)
        node.authors = node.authors[len(node.authors) - len(new) :] + authors
        node.ids, node.finish = [*new, *ids], finish
        self._add(node)

    def _add(self, node: Node) -> None:
        self.nodes.append(node)
        self._after.setdefault(node.before, []).append(node)

    def in_order(self) -> RequestForest:
        """The same in an order that does not tell when each request came.

        First the conversation that began with the prompt, turn by turn, each with all that goes on
        from it; what goes on from one place by the length of what was read, and its number.
        """
        ordered = RequestForest(self.prompt)
        ordered.refused, ordered.given = dict(sorted(self.refused.items())), self.given
        after: dict[Node | None, list[Node]] = {}
        paths = {node: self.read(node) for node in self.nodes}
        for node in self.nodes:
            after.setdefault(turn_before(node), []).append(node)
        open: list[Node | None] = [None]
        while open:
            if (last := open.pop()) is not None:
                ordered._add(ordered._moved(last, paths[last], self._authors(last)))
            following = after.get(last, [])
            following.sort(key=lambda node: (len(paths[node]), node.state, node.again))
            if last is None:
                following.sort(key=lambda node: paths[node] != self.prompt)
            open += reversed(following)
        return ordered

    def _moved(self, node: Node, path: list[int], authors: bytes) -> Node:
        """A node of another forest with the same prompt as one of this."""
        before, at, standing = self.place(path)
        new = path[standing:]
        return Node(
            name=node.name,
            before=before,
            at=at,
            ids=[*new, *node.written],
            said=len(new),
            authors=authors[len(authors) - len(new) :] + node.authors[node.said :],
            begins=node.begins,
            told=node.told,
            branch=node.branch,
            state=node.state,
            again=node.again,
            finish=node.finish,
            logprobs=node.logprobs,
            spans=node.spans,
            mask=node.mask,
        )

    def _authors(self, node: Node) -> bytes:
        """Of the tokens after which a node's turn was asked for; the environment's in the prompt."""
        parts, own, at = [], node, node.said
        while True:
            parts.append(own.authors[:at])
            at = own.at
            if own.before is None:
                break
            own = own.before
        return b"".join([bytes([Author.ENVIRONMENT]) * at, *reversed(parts)])

    # -- as columns --------------------------------------------------------------------------------

    @property
    def starts(self) -> dict[Node, int]:
        """Number of the first token of each node, in prompt and nodes laid end to end."""
        ends = itertools.accumulate((len(node.ids) for node in self.nodes), initial=0)
        return {node: len(self.prompt) + end for node, end in zip(self.nodes, ends, strict=False)}

    @property
    def is_one_path(self) -> bool:
        """Whether each request goes on from all that stood before it."""
        ends = [(None, len(self.prompt)), *((node, len(node.ids)) for node in self.nodes)]
        return (
            all(
                (node.before, node.at) == end
                for node, end in zip((*self.nodes, *self.waiting), ends, strict=False)
            )
            and len(self.waiting) <= 1
        )

    def columns(self) -> dict[str, Any]:
        """A row's values of the columns over its tokens and nodes, by name."""
        starts = self.starts
        parents = [
            node.at + (0 if node.before is None else starts[node.before]) for node in self.nodes
        ]
        spans: list[Span] = []
        for node in self.nodes:
            first = starts[node] - len(self.prompt) + node.said
            spans += [(version, first + a, first + b) for version, a, b in node.spans]
        lengths = [len(node.ids) for node in self.nodes]
        numbers = np.arange(len(self.nodes))
        return {
            "response_ids": np.array([id for node in self.nodes for id in node.ids], np.int32),
            "rollout_logprobs": np.array(
                [p for node in self.nodes for p in (*[0.0] * node.said, *node.logprobs)], np.float32
            ),
            "weight_spans": np.array(spans, np.int64).reshape(-1),
            LENGTHS: np.array(lengths, np.int64),
            PARENTS: np.array(parents, np.int64),
            "turn_ids": np.repeat(numbers, lengths).astype(np.int64),
            "turn_states": np.repeat([node.state for node in self.nodes], lengths).astype(np.int64),
            "requests": self._to_json(),
        }

    @property
    def authors(self) -> bytes:
        """[R] of all tokens of the nodes."""
        return b"".join(node.authors for node in self.nodes)

    @property
    def mask(self) -> SamplingMask | None:
        """[R] of all tokens of the nodes; None where it is not known."""
        whole = NO_TOKENS
        for node in self.nodes:
            if node.mask is None:
                return None
            whole = whole.extended(len(whole) + node.said).followed_by(node.mask)
        return whole

    def _to_json(self) -> dict[str, Any]:
        """What no other column has."""
        numbers = {node: number for number, node in enumerate(self.nodes)}
        return {
            "answered": [{**_kept(node), "tokens": len(node.ids)} for node in self.nodes],
            "waiting": [
                {
                    **_kept(node),
                    "before": None if node.before is None else numbers[node.before],
                    "at": node.at,
                    "ids": node.ids,
                    "authors": list(node.authors),
                }
                for node in self.waiting
            ],
            "refused": self.refused,
            "given": self.given,
        }

    @classmethod
    def of(
        cls,
        prompt: list[int],
        ids: list[int],
        logprobs: list[float],
        authors: bytes,
        spans: Sequence[Span],
        parents: Sequence[int] | None,
        requests: Mapping[str, Any],
        mask: SamplingMask | None = None,
    ) -> RequestForest:
        """A row's forest from its columns, as `columns` has them; without parents it is one path."""
        forest = cls(prompt)
        start = 0
        for number, answered in enumerate(requests["answered"]):
            about = dict(answered)
            said, stop = about["said"], start + about.pop("tokens")
            before, at = forest._node_at(
                len(prompt) + start if parents is None else parents[number]
            )
            own = [
                (v, a - start - said, b - start - said) for v, a, b in spans if start <= a < stop
            ]
            forest._add(
                Node(
                    before=before,
                    at=at,
                    ids=ids[start:stop],
                    authors=authors[start:stop],
                    logprobs=logprobs[start + said : stop],
                    spans=own,
                    mask=None if mask is None else mask.between(start + said, stop),
                    **about,
                )
            )
            start = stop
        for about in requests["waiting"]:
            place = about["before"]
            before = None if place is None else forest.nodes[place]
            place_of = {"before": before, "authors": bytes(about["authors"])}
            forest.waiting.append(Node(**{**about, **place_of}))
        forest.given = dict(requests["given"])
        forest.refused = {
            name: (why, number) for name, (why, number) in requests["refused"].items()
        }
        return forest

    def _node_at(self, parent: int) -> tuple[Node | None, int]:
        """The node that has token number parent - 1, and how many of its tokens are up to there."""
        last: tuple[Node | None, int] = (None, parent)
        for node, start in self.starts.items():
            if start < parent:
                last = (node, parent - start)
        return last


def _kept(node: Node) -> dict[str, Any]:
    """What is kept of a node beside its tokens and its place."""
    return {
        "name": node.name,
        "said": node.said,
        "begins": node.begins,
        "told": node.told,
        "branch": node.branch,
        "state": node.state,
        "again": node.again,
        "finish": node.finish,
    }


def turn_before(node: Node) -> Node | None:
    """The last request whose turn is part of what a node's turn was asked for after, as a whole."""
    before, at = node.before, node.at
    while before is not None and at < len(before.ids):
        at, before = before.at, before.before
    return before


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """With how many equal ids two sequences begin."""
    if first[: len(second)] == second[: len(first)]:
        return min(len(first), len(second))
    pairs: Iterator[tuple[int, int]] = zip(first, second, strict=False)
    return next(place for place, (a, b) in enumerate(pairs) if a != b)
