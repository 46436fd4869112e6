"""Environments of gymnasium and games of TextArena; both libraries are optional.

Signatures as of gymnasium 1.4 and TextArena 0.7. Runs in the process of the environments: of ours
only what needs the standard library alone is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engines.environments.contract import Given, Loaded, digest_of, library, of_players, told
from engines.environments.protocol import EnvironmentReady, EnvironmentStart, Tokens, ToolCall
from engines.processes.user_code import installed

# What gymnasium's text games call their actions, which their spaces do not say, by the class's name.
ACTIONS = {
    "FrozenLakeEnv": ("left", "down", "right", "up"),
    "CliffWalkingEnv": ("up", "right", "down", "left"),
    "TaxiEnv": ("south", "north", "east", "west", "pickup", "dropoff"),
    "BlackjackEnv": ("stick", "hit"),
}
_WORD = re.compile(r"[a-z_]\w*|-?\d+", re.IGNORECASE)


def load_gymnasium(start: EnvironmentStart, codec: Callable[..., Any] | None) -> Loaded:
    """An environment of gymnasium's registry, of which one is made to see what it is."""
    gymnasium = library("gymnasium")

    def make() -> GymnasiumAdapter:
        environment = gymnasium.make(start.id, **start.params)
        if codec is not None:
            return GymnasiumAdapter(environment, codec(), start.frames)
        if not isinstance(environment.action_space, gymnasium.spaces.Discrete):
            raise ValueError(
                f"its actions are {environment.action_space}, which take a codec. Set "
                "episodes.environment.codec"
            )
        return GymnasiumAdapter(environment, DiscreteCodec(environment), start.frames)

    first = make()
    plain, in_part, tokens = type(first.environment.unwrapped), first.several, first.by_tokens
    first.close()
    package = plain.__module__.partition(".")[0]
    ready = EnvironmentReady(
        digest=digest_of([plain, *([codec] if codec else [])]),
        packages=installed(dict.fromkeys(("gymnasium", "numpy", package))),
        tools=[],
        in_part=in_part,
        tokens=tokens,
    )
    return Loaded(make=make, ready=ready)


def load_textarena(start: EnvironmentStart, codec: Callable[..., Any] | None) -> Loaded:
    """A game of TextArena, of which one is begun to see that so many players can play it."""
    textarena = library("textarena")

    def make() -> TextArenaAdapter:
        return TextArenaAdapter(textarena.make(start.id, **start.params), start.players)

    first = make()
    first.reset({}, 0)
    ready = EnvironmentReady(
        digest=digest_of(type(layer) for layer in _layers(first.game)),
        packages=installed(["textarena"]),
        tools=[],
    )
    return Loaded(make=make, ready=ready)


class GymnasiumAdapter:
    """One environment of gymnasium, whose turns a codec makes actions of.

    A codec's action(text) is the turn's one action. One with actions(text) makes several of a turn:
    pairs of an action, and how many characters of the text there are up to its end; one with
    actions_of_tokens(ids) does it by the turn's token ids, and counts those. What comes after the
    action that ends the episode was not acted on. What options(row) gives goes to the environment's
    reset. With frames, a frame is the codec's
    frame(observation, info), if it has one; else the picture, where the environment was made with
    render_mode 'rgb_array'; else the observation.
    """

    def __init__(self, environment: Any, codec: Any, frames: bool = False) -> None:
        self.environment = environment
        self._codec = codec
        self._frames = frames
        self.by_tokens = callable(getattr(codec, "actions_of_tokens", None))
        self.several = self.by_tokens or callable(getattr(codec, "actions", None))
        self._ids: list[int] = []  # of the turn that comes next, where it goes by those

    def see(self, tokens: Tokens) -> None:
        """The tokens of the turn that comes next."""
        self._ids = list(tokens["written"])

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        given = {}
        if callable(options := getattr(self._codec, "options", None)):
            given = {"options": options(row)}
        observation, info = self.environment.reset(seed=seed, **given)
        return Given(
            observation=self._codec.describe(observation, info),
            frame=self._frame(observation, info),
        )

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        try:
            actions = self._actions(text)
        except ValueError as error:
            return Given(observation=f"That is no action: {error}")
        if not actions:
            return Given(observation="That is no action.")
        rewards, done, used = [], False, None
        for action, stop in actions:
            observation, reward, terminated, truncated, info = self.environment.step(action)
            rewards.append(reward)
            done = bool(terminated or truncated)
            if done:
                used = stop
                break
        return Given(
            observation=self._codec.describe(observation, info),
            reward=sum(rewards) if self.several else rewards[0],
            done=done,
            frame=self._frame(observation, info),
            used=used,
        )

    def finish(self) -> Given:
        return Given(observation=None)

    def close(self) -> None:
        self.environment.close()

    def _actions(self, text: str) -> list[tuple[Any, int | None]]:
        if self.by_tokens:
            return list(self._codec.actions_of_tokens(self._ids))
        if self.several:
            return list(self._codec.actions(text))
        return [(self._codec.action(text), None)]

    def _frame(self, observation: Any, info: Mapping[str, Any]) -> Any:
        if not self._frames:
            return None
        if callable(of := getattr(self._codec, "frame", None)):
            return of(observation, info)
        if self.environment.render_mode == "rgb_array":
            return self.environment.render()
        return observation


class DiscreteCodec:
    """Numbered actions, by number or by name; the last that a text names is meant.

    An observation is what the environment renders where it was made with render_mode 'ansi', and
    else its value. The first one also lists the actions.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        space = environment.action_space
        self._numbers = range(int(space.start), int(space.start) + int(space.n))
        names = _action_names(environment.unwrapped)
        self._names = dict(zip((name.lower() for name in names), self._numbers, strict=False))
        self._begun = False

    def describe(self, observation: Any, info: Mapping[str, Any]) -> str:
        ansi = self._environment.render_mode == "ansi"
        text = self._environment.render() if ansi else str(_plain(observation))
        if self._begun:
            return text
        self._begun = True
        return f"{text}\n{self._listed()}"

    def action(self, text: str) -> int:
        for word in reversed(_WORD.findall(text.lower())):
            if word in self._names:
                return self._names[word]
            if word.lstrip("-").isdecimal() and int(word) in self._numbers:
                return int(word)
        raise ValueError(f"name one. {self._listed()}")

    def _listed(self) -> str:
        named = [f"{number} {name}" for name, number in self._names.items()]
        first, last = self._numbers[0], self._numbers[-1]
        return f"Actions: {', '.join(named) if named else f'{first} to {last}'}."


def _action_names(environment: Any) -> Iterable[str]:
    """Names of the actions in their order: of a text game, or as Atari and MiniGrid tell them."""
    if type(environment).__name__ in ACTIONS:
        return ACTIONS[type(environment).__name__]
    if callable(meanings := getattr(environment, "get_action_meanings", None)):
        return list(meanings())
    members = getattr(getattr(environment, "actions", None), "__members__", {})
    return list(members)


def _plain(value: Any) -> Any:
    """An observation in numbers and lists of Python's own."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_plain, value)) if type(value) in (tuple, list) else str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


class TextArenaAdapter:
    """One game of TextArena.

    Its observations repeat the game from its beginning; a player, who has seen that, is given what
    is new, and not its own action again. With several players only the one who begins is told
    something when the game is reset: the others are at their first turn.
    """

    def __init__(self, game: Any, players: int = 1) -> None:
        self.game = game
        self._players = players
        self._next = 0
        self._seen = [""] * players
        self._acted = [""] * players

    def reset(self, row: Mapping[str, Any], seed: int) -> Given:
        self.game.reset(num_players=self._players, seed=seed)
        said = self._observation()
        if self._players == 1:
            return Given(observation=said)
        texts = [said if player == self._next else "" for player in range(self._players)]
        return Given(observation=told(self._next, texts, self._players))

    def act(self, text: str, calls: Sequence[ToolCall] | None) -> Given:
        self._acted[self._next] = text
        done, _ = self.game.step(text)
        if done:
            return self._ended()
        said = self._observation()
        if self._players == 1:
            return Given(observation=said)
        return Given(observation=told(self._next, [said], self._players))

    def finish(self) -> Given:
        """A game that is cut off has no winner, and so no reward."""
        return Given(observation=None)

    def close(self) -> None:
        """A game holds nothing; its own `close` gives the rewards."""

    def _ended(self) -> Given:
        rewards, infos = self.game.close()
        if self._players > 1:
            given = of_players(rewards, self._players)
            return Given(observation=None, rewards=given, done=True)
        reason = infos.get(0, {}).get("reason")
        return Given(observation=reason, reward=(rewards or {}).get(0), done=True)

    def _observation(self) -> Any:
        """What is new to the player whose turn it is."""
        player, found = self.game.get_observation()
        self._next = int(player)
        if isinstance(found, list):  # of a game made without wrappers: (player, message, kind)
            return "\n".join(message for who, message, _ in found if who != player)
        if not isinstance(found, str):
            return found
        before, action = self._seen[self._next], self._acted[self._next]
        new = found.removeprefix(before)
        if before and new != found and action:
            echo = re.match(rf"\n\[[^\]\n]*\] (?:{re.escape(action)}|\[{re.escape(action)}\])", new)
            new = new[echo.end() :] if echo else new
        self._seen[self._next] = found
        return new.strip("\n")


def _layers(game: Any) -> Iterable[Any]:
    """A game's wrappers, and last the game itself."""
    while True:
        yield game
        if "env" not in vars(game):
            return
        game = game.env
