"""Which functions, models and judges score completions, and what becomes of a sample that they fail.

A judge is a language model that scores samples by a rubric: asked over HTTP, or on workers of the
run. A reward model is a transformers checkpoint with a head for one number. Programs that a model
wrote run in sandboxes.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from configs.base import FunctionPath, LocalFile, ModelPath, Settings
from configs.environment import refuse_password, refuse_secrets
from configs.model import PretrainedModel
from configs.rollout import RolloutConfig

START_SECONDS = 20.0  # deadline of the start of a sandbox of processes
GRACE = 10.0  # seconds beyond a program's deadline until its supervisor counts as lost

# The last such line counts. What a number goes on with, as in 7,5 or 1.2.3, makes it no number.
SCORE_LINE = r"(?i)\bscore\b[^\w-]{0,8}(-?\d+(?:\.\d+)?)(?![\d.,]*\d)"
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
# How the endpoint is asked: what an answer is does not depend on these.
HOW_ASKED = (
    "key_variable", "at_once", "requests_per_minute", "timeout", "retries", "retry_pause", "deadline",
)  # fmt: skip
OURS = ("model", "messages", "temperature", "max_tokens", "seed", "n", "stream")


ScoreName = Annotated[str, Field(description="Name under which the score is logged.")]


class NamedReward(Settings):
    """What a score that has a name by default is logged under, and what it weighs."""

    name: ScoreName
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name


class SandboxLimits(Settings):
    """What a program in a sandbox may use. Beyond it, it is stopped or its calls fail."""

    memory_mib: int = Field(
        512, ge=32, description="Memory of all processes of a program together, in MiB."
    )
    processes: int = Field(32, ge=1, description="Processes and threads at once.")
    disk_mib: int = Field(64, ge=1, description="Files that it may write, in MiB; held in memory.")
    output_kib: int = Field(
        256, ge=64, description="Of its output, and of its errors, what is kept, in KiB."
    )
    cpu_seconds: int = Field(20, ge=1, description="CPU time of each of its processes, in seconds.")
    timeout: float = Field(
        30.0, gt=0, description="Deadline of a program, in seconds; all tests of a sample together."
    )

    @property
    def longest_start(self) -> float:
        """Seconds after which one that is not ready, or that does not answer, has failed."""
        return START_SECONDS + 2 * GRACE


class ProcessSandbox(SandboxLimits):
    """Processes in Linux namespaces of their own: no network, no files but the interpreter's."""

    kind: Literal["processes"] = "processes"
    python: str | None = Field(
        None,
        pattern="^/",
        description="Interpreter of the programs, an absolute path; its folder and packages are "
        "visible in the sandbox. None: the one that Refrain's environment was made with, "
        "without that environment's packages.",
    )


class ContainerSandbox(SandboxLimits):
    """Containers of Docker or Podman, started by command."""

    kind: Literal["container"] = "container"
    command: str = Field("docker", min_length=1, description="The program: docker or podman.")
    image: str = Field(
        min_length=1, pattern="^[^-]", description="Image with Python >= 3.10, pulled before."
    )
    python: str = Field("python3", min_length=1, description="Interpreter within the image.")
    runtime: str | None = Field(
        None, description="Runtime of the containers, such as runsc (gVisor). None: the daemon's."
    )
    start_timeout: float = Field(60.0, gt=0, description="Deadline of a start, in seconds.")

    @property
    def longest_start(self) -> float:
        """As above."""
        return self.start_timeout + 2 * GRACE


SandboxConfig = Annotated[ProcessSandbox | ContainerSandbox, Field(discriminator="kind")]


class Pairwise(Settings):
    """A model that reads two answers: its number is the log-odds that the first is better."""

    template: str = Field(
        "{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\nWhich answer is better?",
        description="What the model reads: {prompt}, {first} and {second} are put in, each once. As "
        "the model was trained.",
    )
    opponents: int | None = Field(
        None,
        ge=1,
        description="Each answer of a prompt is compared with so many after it, and so with as many "
        "before it, in a circle. None: with all.",
    )

    @field_validator("template")
    @classmethod
    def _has_its_places(cls, template: str) -> str:
        for place in ("{prompt}", "{first}", "{second}"):
            if template.count(place) != 1:
                raise ValueError(
                    f"rewards.functions[].pairwise.template = {template!r} has {place} "
                    f"{template.count(place)} times. Put {{prompt}}, {{first}} and {{second}} into "
                    "it, each once."
                )
        return template


class RewardModelReward(NamedReward):
    """The number that a sequence classifier gives to prompt and completion, as it is."""

    kind: Literal["reward_model"] = "reward_model"
    name: ScoreName = "reward_model"
    model: ModelPath = Field(
        description="Hub id or directory of a transformers checkpoint of a class …ForSequence"
        "Classification with one label. It lives on the pool of cluster.roles.reward_model."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; none takes the default branch."
    )
    template: Literal["chat", "plain"] = Field(
        "chat",
        description="chat: prompt and completion as messages of the reward model's own chat "
        "template; plain: the one's text, then the other's.",
    )
    pairwise: Pairwise | None = Field(
        None,
        description="For a model that compares two answers: the score of a sample is then the mean "
        "probability that it is better than others of its prompt. None: each is scored alone.",
    )
    max_length: int = Field(
        4096, ge=2, description="Longest sample, in its tokens; a longer one is failed, not cut."
    )
    batch_tokens: int = Field(
        16384, ge=1, description="Tokens of a batch, padding included; one sample at least."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Number format of its weights."
    )

    @property
    def checkpoint(self) -> PretrainedModel:
        """Where its files are."""
        return PretrainedModel(path=self.model, revision=self.revision)


class Judging(NamedReward):
    """What judges have in common: a rubric, and how an answer becomes a score."""

    name: ScoreName = "judge"
    rubric: LocalFile = Field(
        description="File with what the judge is asked. {prompt}, {completion} and any column of "
        "the data, such as {answer}, are put in; other braces stay. It has to be under the same "
        "path on every machine that scores."
    )
    score: str = Field(
        SCORE_LINE,
        description="Regular expression with one group, the score; its last match in the answer "
        "counts. By default what stands after the word score, as in 'Score: 7'.",
    )
    scale: tuple[float, float] = Field(
        (0.0, 10.0),
        description="Lowest and highest score, which become 0 and 1. A score outside is none.",
    )
    votes: int = Field(1, ge=1, le=32, description="Answers asked for each sample.")
    combine: Literal["mean", "median"] = Field(
        "mean", description="What the votes of a sample become."
    )
    temperature: float = Field(0.0, ge=0, description="Of the judge's answers.")
    max_tokens: int = Field(512, ge=1, description="Longest answer, in tokens.")
    seed: int = Field(
        0, ge=0, description="Seed of the first vote; the others have those after it."
    )
    deadline: float = Field(
        300.0,
        gt=0,
        description="Deadline of a scoring call, all its samples and votes together, in seconds; "
        "samples that are not judged by then are failed. In the place of rewards.timeout.",
    )

    @field_validator("score")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(
                f"rewards.functions[].score = {pattern!r} is no regular expression: {error}."
            ) from None
        if groups != 1:
            raise ValueError(
                f"rewards.functions[].score = {pattern!r} has {groups} groups. Put the number, and "
                "nothing else, into round brackets; (?:…) for others."
            )
        return pattern

    @model_validator(mode="after")
    def _votes_mean_something(self) -> Self:
        low, high = self.scale
        if not low < high:
            raise ValueError(
                f"rewards.functions[].scale = [{low:g}, {high:g}] has its lowest score first, then "
                "its highest. Set it to the scores of the rubric, such as [0, 10]."
            )
        if self.votes > 1 and self.temperature == 0:
            raise ValueError(
                f"rewards.functions[].votes = {self.votes} with temperature = 0 pays for the same "
                "answer several times. Set temperature above 0, or votes = 1."
            )
        return self


class JudgeReward(Judging):
    """A model behind an OpenAI-compatible API that scores each sample by a rubric."""

    kind: Literal["judge"] = "judge"
    url: str = Field(
        description="Base address of the API: requests go to URL/chat/completions. For vLLM's own "
        "server http://HOST:8000/v1."
    )
    model: str = Field(description="Name of the model, as the API has it.")
    options: dict[str, int | float | bool | str] = Field(
        default_factory=dict,
        description="More fields of each request, such as reasoning_effort. No credentials.",
    )
    key_variable: str | None = Field(
        None,
        description="NAME of the environment variable with the key (sent as Authorization: Bearer), "
        "not the key; none sends no key.",
    )
    at_once: int = Field(
        16, ge=1, description="Requests under way at once, of all workers that score together."
    )
    requests_per_minute: float | None = Field(
        None,
        gt=0,
        description="Most requests in a minute, of all workers that score together; none: no limit.",
    )
    timeout: float = Field(60.0, gt=0, description="Deadline of one request, in seconds.")
    retries: int = Field(
        4,
        ge=0,
        description="Requests after a first one that failed: an error 408, 425, 429 or 5xx, no "
        "connection, no answer in time, or one that is no chat completion.",
    )
    retry_pause: float = Field(
        1.0,
        gt=0,
        description="Seconds before the first retry; doubles with each, up to a minute. Where the "
        "endpoint says how long to wait (Retry-After), at least that.",
    )

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        refuse_password("rewards.functions[].url", url)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ValueError(
                "rewards.functions[].url is no base address of an API: it is http:// or https://, a "
                "host and a path, without a query. Set it to the address that /chat/completions is "
                "put after, such as http://127.0.0.1:8000/v1, and give a key by key_variable."
            )
        return url.rstrip("/").removesuffix("/chat/completions")

    @field_validator("key_variable")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not VARIABLE.fullmatch(name):  # perhaps a key: it is not repeated
            raise ValueError(
                "rewards.functions[].key_variable is no name of an environment variable in capital "
                "letters. Put the key into a variable, and set key_variable to its name, such as "
                "OPENAI_API_KEY: settings are stored with the run."
            )
        return name

    @field_validator("options")
    @classmethod
    def _adds_only(
        cls, options: dict[str, int | float | bool | str]
    ) -> dict[str, int | float | bool | str]:
        refuse_secrets(
            "rewards.functions[].options", options, "name the key's variable by key_variable."
        )
        for name in OURS:
            if name in options:
                raise ValueError(
                    f"rewards.functions[].options.{name} is set by Refrain. Remove it from options."
                )
        return options


class LocalJudgeReward(Judging):
    """A frozen model that scores each sample by a rubric, on the pool of the reward models."""

    kind: Literal["local_judge"] = "local_judge"
    model: ModelPath = Field(
        description="Hub id or directory of a language model. It lives on the pool of "
        "cluster.roles.reward_model, each worker holds one."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub model; none takes the default branch."
    )
    engine: Literal["vllm", "transformers"] = Field("vllm", description="What the judge runs in.")
    template: Literal["chat", "plain"] = Field(
        "chat",
        description="chat: the rubric's text as a user's message of the judge's own chat template; "
        "plain: the text alone.",
    )
    max_length: int = Field(
        8192,
        ge=2,
        description="Longest question and answer together, in the judge's tokens; a sample whose "
        "question leaves no room for max_tokens is failed, not cut.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Number format of its weights."
    )
    max_sequences: int = Field(64, ge=1, description="Answers that it writes at once.")
    kv_cache_gib: float = Field(
        2.0, gt=0, description="Memory of vLLM's key-value cache on CPU, in GiB."
    )
    gpu_memory_utilization: float = Field(
        0.85, gt=0, le=1, description="Share of the GPU's memory that vLLM may take."
    )

    @property
    def checkpoint(self) -> PretrainedModel:
        """Where its files are."""
        return PretrainedModel(path=self.model, revision=self.revision)

    @property
    def rollout(self) -> RolloutConfig:
        """The settings of the engine that it runs in."""
        return RolloutConfig(
            engine=self.engine,
            max_new_tokens=self.max_tokens,
            seed=self.seed,
            dtype=self.dtype,
            max_sequences=self.max_sequences,
            kv_cache_gib=self.kv_cache_gib,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )

    @model_validator(mode="after")
    def _answers_have_room(self) -> Self:
        if self.max_tokens >= self.max_length:
            raise ValueError(
                f"rewards.functions[].max_tokens = {self.max_tokens} leaves no room for a question "
                f"within max_length = {self.max_length}. Set max_length higher, or max_tokens lower."
            )
        return self


class ReasoningGymReward(NamedReward):
    """The scorer of the reasoning-gym task that made the problem."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: ScoreName = "reasoning_gym"
    extract: Literal["last_integer", "last_number", "answer_tag", "whole"] = Field(
        "last_number", description="Which part of the completion is handed to the scorer."
    )


class MathReward(NamedReward):
    """1 if math-verify finds the completion's answer equal to the reference, else 0."""

    kind: Literal["math"] = "math"
    name: ScoreName = "math"
    answer_column: str = Field("answer", description="Column with the reference answer.")
    answer_after: str | None = Field(
        "####",
        description="Marker after which the reference answer stands (GSM8K); none takes the whole.",
    )


class ChoiceReward(NamedReward):
    """1 if the letter that the completion gives as its answer is the row's, else 0."""

    kind: Literal["choice"] = "choice"
    name: ScoreName = "choice"
    answer_column: str = Field("answer", description="Column with the letter of the right answer.")


class FunctionReward(Settings):
    """A user's function fn(prompts, completions, **columns) -> list[float], as TRL calls it."""

    kind: Literal["function"] = "function"
    path: FunctionPath
    name: str | None = Field(
        None, description="Name under which the score is logged; none takes the function's name."
    )
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")
    params: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="Keyword arguments passed on every call."
    )

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name or self.path.rpartition(":")[2]


class EnvironmentReward(NamedReward):
    """What an episode's environment gave: the sum of its turns' rewards."""

    kind: Literal["environment"] = "environment"
    name: ScoreName = "environment"


class UnitTestsReward(NamedReward):
    """The completion's program, run against the unit tests of its row in a sandbox."""

    kind: Literal["unit_tests"] = "unit_tests"
    name: ScoreName = "unit_tests"
    tests_column: str = Field(
        "test_list",
        description="Column with the tests: assert statements, a script with check(candidate) or "
        "test_… functions, or pairs of input and output.",
    )
    setup_column: str | None = Field(
        None, description="Column with statements that the tests need before them, such as imports."
    )
    function_column: str = Field(
        "entry_point", description="Column that names the function which check(candidate) is given."
    )
    extract: Literal["last_block", "whole"] = Field(
        "last_block", description="The program: the last fenced block of Python, or all of it."
    )
    score: Literal["share", "all"] = Field(
        "all", description="The share of the tests that pass, or 1 if all do and else 0."
    )
    test_timeout: float = Field(
        5.0,
        gt=0,
        description="Deadline of one test, in seconds. Unless set, at most sandbox.timeout.",
    )
    max_tests: int = Field(
        50, ge=1, le=100, description="Tests of a row that are run; the first ones."
    )
    at_once: int = Field(4, ge=1, description="Samples that are run at once on a reward worker.")
    sandbox: SandboxConfig = Field(
        default_factory=ProcessSandbox, description="Where the program runs, and what it may use."
    )

    @property
    def columns(self) -> list[str]:
        """Columns that every row must have."""
        return [self.tests_column, *([self.setup_column] if self.setup_column else [])]

    def seconds(self, samples: int, others: Iterable[SandboxConfig] = ()) -> float:
        """Longest time for so many samples, of which each program may hang until it is stopped.

        others: sandboxes that some tasks have in the place of this one.
        """
        longest = max(
            sandbox.timeout + sandbox.longest_start for sandbox in (self.sandbox, *others)
        )
        return -(-samples // self.at_once) * longest

    @model_validator(mode="before")
    @classmethod
    def _a_test_ends_with_its_sandbox(cls, settings: Any) -> Any:
        if not isinstance(settings, Mapping) or "test_timeout" in settings:
            return settings
        sandbox = settings.get("sandbox")
        limits = dict(sandbox) if isinstance(sandbox, Mapping | Settings) else {}
        try:
            seconds = float(limits.get("timeout", math.inf))
        except (TypeError, ValueError):  # the sandbox's settings say what is wrong
            return settings
        usual = cls.model_fields["test_timeout"].default
        return {**settings, "test_timeout": seconds} if 0 < seconds < usual else settings

    @model_validator(mode="after")
    def _tests_fit(self) -> "UnitTestsReward":
        if self.test_timeout > self.sandbox.timeout:
            raise ValueError(
                f"One test may take {self.test_timeout:g} s (test_timeout) and all of a sample "
                f"{self.sandbox.timeout:g} s (sandbox.timeout). Set sandbox.timeout higher."
            )
        return self


# What is called in a process of its own; reward models and judges of the run's own have engines.
CalledReward = (
    ReasoningGymReward
    | MathReward
    | ChoiceReward
    | FunctionReward
    | EnvironmentReward
    | UnitTestsReward
    | JudgeReward
)

EngineReward = RewardModelReward | LocalJudgeReward

Reward = Annotated[CalledReward | EngineReward, Field(discriminator="kind")]


class RewardsConfig(Settings):
    """How samples are scored."""

    functions: tuple[Reward, ...] = Field(
        description="Reward functions; a sample's reward is their weighted sum."
    )
    timeout: float = Field(
        30.0,
        gt=0,
        description="Deadline of one call of a reward function, in seconds. Unit tests have those of "
        "their sandbox.",
    )
    on_failure: Literal["drop", "complete", "abort"] = Field(
        "drop",
        description="What becomes of a group in which a sample's scoring failed: drop leaves the "
        "whole group out, complete trains on its other samples, abort ends the step.",
    )

    def named(
        self, labels: Collection[str] | None, sandbox: SandboxConfig | None = None
    ) -> "RewardsConfig":
        """Those of these names alone, None: all; with another sandbox of unit tests, if given."""
        functions = (
            reward for reward in self.functions if labels is None or reward.label in labels
        )
        labelled = (
            reward.model_copy(update={"sandbox": sandbox})
            if sandbox is not None and isinstance(reward, UnitTestsReward)
            else reward
            for reward in functions
        )
        return self.model_copy(update={"functions": tuple(labelled)})

    @property
    def on_engines(self) -> tuple[EngineReward, ...]:
        """The functions that are models, whose engines are a role of their own."""
        return tuple(reward for reward in self.functions if isinstance(reward, EngineReward))

    @property
    def models(self) -> tuple[RewardModelReward, ...]:
        """The reward models among them."""
        return tuple(reward for reward in self.functions if isinstance(reward, RewardModelReward))

    @property
    def judges(self) -> tuple[LocalJudgeReward, ...]:
        """The judges among them."""
        return tuple(reward for reward in self.functions if isinstance(reward, LocalJudgeReward))

    @model_validator(mode="after")
    def _names_differ(self) -> "RewardsConfig":
        labels = [reward.label for reward in self.functions]
        for label in labels:
            if labels.count(label) > 1:
                raise ValueError(
                    f"rewards.functions has {labels.count(label)} rewards named {label}. "
                    "Give each a name of its own with rewards.functions[].name."
                )
        return self
