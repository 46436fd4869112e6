"""Language models that score samples by a rubric: asked over HTTP, or on workers of the run."""

import re
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from configs.base import LocalFile, ModelPath, Settings
from configs.environment import refuse_password, refuse_secrets
from configs.model import PretrainedModel
from configs.rollout import RolloutConfig

# The last such line counts. What a number goes on with, as in 7,5 or 1.2.3, makes it no number.
SCORE_LINE = r"(?i)\bscore\b[^\w-]{0,8}(-?\d+(?:\.\d+)?)(?![\d.,]*\d)"
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
# How the endpoint is asked: what an answer is does not depend on these.
HOW_ASKED = (
    "key_variable", "at_once", "requests_per_minute", "timeout", "retries", "retry_pause", "deadline",
)  # fmt: skip
OURS = ("model", "messages", "temperature", "max_tokens", "seed", "n", "stream")


class Judging(Settings):
    """What judges have in common: a rubric, and how an answer becomes a score."""

    name: str = Field("judge", description="Name under which the score is logged.")
    weight: float = Field(1.0, description="Factor in the weighted sum of rewards.")
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

    @property
    def label(self) -> str:
        """Name under which the score is logged."""
        return self.name

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
