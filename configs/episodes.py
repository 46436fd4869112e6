"""Episodes: an environment that answers what the model writes, turn by turn."""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from configs.base import FunctionPath, ProgramPath, Settings
from configs.coding import WorkspaceConfig
from configs.storage import CONTINUE_FROM

Param = int | float | bool | str
Params = dict[str, Param | list[Param]]


class ClassEnvironment(Settings):
    """A Python class: reset(**row), public typed methods that are tools, get_reward() if it has one.

    The contract of TRL's `environment_factory`. With a method step(text) in the place of tools it is
    given each turn as text; with several players step(text, player), which says who is next.
    """

    kind: Literal["class"] = "class"
    path: FunctionPath = Field(description="The class, or a function that makes an environment.")
    params: Params = Field(default_factory=dict, description="Keyword arguments of making one.")


class ToolsEnvironment(Settings):
    """Functions that the model may call, and nothing else: TRL's `tools`.

    Reward functions score the episode, which has ended once a turn calls none.
    """

    kind: Literal["tools"] = "tools"
    functions: tuple[FunctionPath, ...] = Field(
        min_length=1,
        description="The functions, each with type hints and a docstring; they may be async.",
    )


class GymnasiumEnvironment(Settings):
    """An environment of gymnasium, with a codec between its spaces and text."""

    kind: Literal["gymnasium"] = "gymnasium"
    id: str = Field(description="Name in gymnasium's registry, such as FrozenLake-v1.")
    params: Params = Field(default_factory=dict, description="Keyword arguments of gymnasium.make.")
    codec: FunctionPath | None = Field(
        None,
        description="A class with describe(observation, info) -> str and action(text), which raises "
        "ValueError for a text that is no action. With options(row) -> dict that is what reset is "
        "given. None: discrete actions by number or name.",
    )


class TextArenaEnvironment(Settings):
    """A game of TextArena, for as many players as episodes.players says."""

    kind: Literal["textarena"] = "textarena"
    id: str = Field(description="Name in TextArena's registry, such as GuessTheNumber-v0.")
    params: Params = Field(default_factory=dict, description="Keyword arguments of textarena.make.")


class OpenEnvEnvironment(Settings):
    """An environment behind a server of OpenEnv, with a session for each episode."""

    kind: Literal["openenv"] = "openenv"
    url: str = Field(
        pattern=r"^https?://[^\s/]+", description="Of the server, such as http://localhost:8000."
    )
    params: Params = Field(
        default_factory=dict, description="Arguments of each reset, beside the row and the seed."
    )
    codec: FunctionPath | None = Field(
        None,
        description="A class with describe(observation) -> str and action(text) -> dict, which "
        "raises ValueError for a text that is no action. None: by the server's schema.",
    )


class AgentEnvironment(Settings):
    """A program that asks the model by itself, over an OpenAI-compatible API of this machine.

    A function agent(base_url, api_key, model, seed, **row) that returns the reward. Each of its
    requests is a turn of the model; those of an episode are a forest (episodes.branches).
    """

    kind: Literal["agent"] = "agent"
    path: FunctionPath = Field(description="The function; it may be async.")
    params: Params = Field(default_factory=dict, description="Keyword arguments of each call.")


class NoEnvironment(Settings):
    """None: an answer of one turn, as of one of several tasks beside others with environments."""

    kind: Literal["none"] = "none"


class WorkspaceEnvironment(Settings):
    """A row's repository in a sandbox, with a shell and files as tools (data.source.kind = coding).

    An episode has ended once a turn calls no tool; its reward is what the row's tests come to.
    """

    kind: Literal["workspace"] = "workspace"


Environment = Annotated[
    ClassEnvironment
    | ToolsEnvironment
    | GymnasiumEnvironment
    | TextArenaEnvironment
    | OpenEnvEnvironment
    | AgentEnvironment
    | NoEnvironment
    | WorkspaceEnvironment,
    Field(discriminator="kind"),
]


class OpponentConfig(Settings):
    """Who plays the seats that the policy does not: a version of it, which does not train."""

    version: str = Field(
        "start",
        pattern=CONTINUE_FROM,
        description="start: the version that the run begins with; or RUN@STEP, RUN, or "
        "models:/NAME@ALIAS, of the same store and model.",
    )
    policy_plays: Literal["in_turn"] | Annotated[int, Field(ge=0)] = Field(
        "in_turn",
        description="The policy's seat, from 0; the opponent has all others. in_turn: another one "
        "for each prompt, so that the policy plays them all.",
    )


class EpisodesConfig(Settings):
    """Answers of several turns. rollout.max_new_tokens is then the limit of a whole conversation."""

    later: ClassVar[frozenset[str]] = frozenset(
        {
            *("past_turns", "branches", "credit", "max_tokens", "workspace"),
            *("deadline", "drive", "fewest_at_once"),
        }
    )
    # What changes when episodes are played, and nothing of what they are: in no key.
    of_driving: ClassVar[frozenset[str]] = frozenset({"drive", "fewest_at_once"})

    environment: Environment = Field(
        description="What answers the model; of several tasks, those that have none of their own."
    )
    workspace: WorkspaceConfig | None = Field(
        None,
        description="How repositories are worked on and tested: of kind workspace, or of an agent "
        "that takes a workspace. None: kind workspace has the defaults, others have none.",
    )
    players: int = Field(
        1,
        ge=1,
        description="Players of an episode, all of them the model, but for those of an opponent: "
        "each has a conversation of its own, which is a sample. More than one: kinds class and "
        "textarena.",
    )
    opponent: OpponentConfig | None = Field(
        None,
        description="A frozen version that plays all seats but one; its samples do not train. None: "
        "the policy plays all.",
    )
    sees: Literal["text", "frames"] = Field(
        "text",
        description="What the policy goes by. text: the conversation. frames: it looks at images "
        "(OpenVLA); each turn is a sequence of its own, the prompt with the frame before the turn.",
    )
    max_turns: int = Field(
        8, ge=1, description="Turns of the model, of one player, after which an episode ends."
    )
    max_turn_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens of one turn; a longer turn ends the episode. None: no limit.",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Response tokens of an episode that branches, over all branches, each once; one "
        "branch has up to rollout.max_new_tokens. None: so has the episode.",
    )
    past_turns: Literal["as_sampled", "as_rendered"] = Field(
        "as_sampled",
        description="What the model reads of its earlier turns where the chat template rewrites "
        "them, as those of thinking models do. as_sampled: the tokens that it wrote, thoughts too. "
        "as_rendered: what the template makes of them, each turn after a rendering of its own; what "
        "these have in common is one sequence.",
    )
    branches: bool = Field(
        True,
        description="Whether an agent may ask for several turns at once, begin other conversations, "
        "and go on from an earlier point or with another past. false: its requests are one "
        "conversation that grows at its end; any other fails the episode.",
    )
    credit: Literal["episode", "branch"] = Field(
        "episode",
        description="Whose reward the tokens of an agent's turns get. episode: that of all, which is "
        "the sum where the agent returns rewards by branch. branch: that of their own branch, "
        "compared with the same branch of the group's other episodes.",
    )
    full_turn: Literal["ends", "counts"] = Field(
        "ends",
        description="A turn of max_turn_tokens tokens: ends the episode, as one that is too long; or "
        "counts as a turn like others, as where each action has so many tokens and no end.",
    )
    turn_timeout: float = Field(
        30.0,
        gt=0,
        description="Deadline of one answer of the environment, in seconds; beyond it the episode "
        "ends, and has failed.",
    )
    timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds of the environment in one episode, all turns together; with the answer "
        "that takes it beyond, the episode ends, and has failed unless the environment then gives it "
        "a reward.",
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="Seconds of one episode in all, of sampling its turns and of the environment; "
        "with the answer that takes it beyond, the episode ends, and has failed unless the "
        "environment then gives it a reward. None: no limit but those of turns and of the "
        "environment.",
    )
    drive: Literal["together", "apart"] = Field(
        "together",
        description="How the episodes of a shard go on. together: all of them turn by turn, in few "
        "calls, so that each turn waits for the slowest. apart: each by itself, in a call for each "
        "of its turns, and stored by itself once it is over. The samples are the same. Unless set, "
        "apart for agents and openenv, which take their time.",
    )
    seed: int = Field(0, ge=0, description="Seed of the environments, with the row's number.")
    processes: int = Field(
        2, ge=1, description="Processes of environments of each worker that has them."
    )
    at_once: int | None = Field(
        None,
        ge=1,
        description="Episodes that are played at once, of the whole run. None: no limit.",
    )
    fewest_at_once: int = Field(
        1,
        ge=1,
        description="With drive = apart, where vLLM's cache of keys and values is nearly full fewer "
        "episodes than at_once are played at once, but not fewer than this.",
    )
    memory_gib: float = Field(
        4.0, gt=0, description="Memory of one process of environments, in GiB; beyond it, it fails."
    )
    python: ProgramPath | None = Field(
        None,
        description="Interpreter that the environments run with, where their libraries do not go "
        "with Refrain's. None: this one.",
    )

    @property
    def of_requests(self) -> bool:
        """Whether an episode's turns are answers to requests, each after tokens of its own."""
        return self.environment.kind == "agent" or self.past_turns == "as_rendered"

    @property
    def are_forests(self) -> bool:
        """Whether its samples are stored as forests (storage/batches/forest.py)."""
        return self.of_requests and (self.branches or self.past_turns == "as_rendered")

    def in_keys(self, exclude: Collection[str] = ()) -> dict[str, Any]:
        return super().in_keys({*exclude, *self.of_driving})

    @model_validator(mode="after")
    def _branches_have_rewards(self) -> Self:
        if self.credit == "branch" and not (self.environment.kind == "agent" and self.branches):
            raise ValueError(
                "episodes.credit = branch is about agents that branch. Set episodes.environment.kind "
                "= agent and episodes.branches = true, or episodes.credit = episode."
            )
        return self

    @model_validator(mode="after")
    def _a_rendered_past_is_of_one_player(self) -> Self:
        if self.past_turns == "as_rendered" and (self.players > 1 or self.sees == "frames"):
            name, value = ("players", self.players) if self.players > 1 else ("sees", self.sees)
            raise ValueError(
                "episodes.past_turns = as_rendered is about one player's text, and "
                f"episodes.{name} = {value}. Set episodes.past_turns = as_sampled."
            )
        return self

    @model_validator(mode="after")
    def _fewest_are_not_more(self) -> Self:
        if self.at_once is not None and self.fewest_at_once > self.at_once:
            raise ValueError(
                f"episodes.fewest_at_once = {self.fewest_at_once} is more than episodes.at_once = "
                f"{self.at_once}. Set it to {self.at_once} or less."
            )
        return self

    @property
    def workspaces(self) -> WorkspaceConfig | None:
        """How repositories are worked on; None where none are."""
        by_kind = WorkspaceConfig() if self.environment.kind == "workspace" else None
        return self.workspace or by_kind

    @model_validator(mode="after")
    def _the_kind_has_players(self) -> Self:
        kind = self.environment.kind
        if self.players > 1 and kind not in ("class", "textarena"):
            raise ValueError(
                f"episodes.players = {self.players} takes an environment with turns of several "
                f"players, and episodes.environment.kind = {kind} has one. Set "
                "episodes.environment.kind to class or textarena, or episodes.players = 1."
            )
        return self

    @model_validator(mode="after")
    def _a_full_turn_has_a_length(self) -> Self:
        if self.full_turn == "counts" and self.max_turn_tokens is None:
            raise ValueError(
                "episodes.full_turn = counts is about turns of max_turn_tokens tokens, and "
                "episodes.max_turn_tokens = null is no number. Set it, or full_turn = ends."
            )
        return self

    @model_validator(mode="after")
    def _the_opponent_has_a_seat(self) -> Self:
        if self.opponent is None:
            return self
        seat = self.opponent.policy_plays
        if self.players == 1:
            raise ValueError(
                "episodes.opponent plays the seats that the policy does not, and episodes.players = "
                "1 has only one. Set episodes.players to 2 or more, or episodes.opponent = null."
            )
        if isinstance(seat, int) and seat >= self.players:
            raise ValueError(
                f"episodes.opponent.policy_plays = {seat} is no player: they are numbered from 0 to "
                f"{self.players - 1}. Set it to one of these, or to in_turn."
            )
        return self
