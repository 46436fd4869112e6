"""Where prompts come from and how a row becomes prompt tokens."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from configs.base import FileAddress, FunctionPath, Settings
from configs.coding import CodingSource, WorkspaceConfig
from configs.episodes import Environment, EpisodesConfig
from configs.rewards import SandboxConfig


class MultipleChoice(Settings):
    """Rows with a right answer and wrong ones become questions with letters.

    The question gets the answers after it, in an order that follows from the row alone; the column
    `answer` is the right one's letter.
    """

    question: str = Field("question", description="Column with the question.")
    right: str = Field(description="Column with the right answer.")
    wrong: tuple[str, ...] = Field(
        min_length=1, max_length=25, description="Columns with wrong ones."
    )


class _Rows(Settings):
    """What sources of stored rows have in common."""

    where: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description="Only rows whose columns have these values, as {answer_type: multipleChoice}.",
    )
    choices: MultipleChoice | None = Field(
        None,
        description="Columns of right and wrong answers, which make multiple-choice questions.",
    )


class FileSource(_Rows):
    """Rows of JSONL or Parquet files, local or at any fsspec address."""

    kind: Literal["file"] = "file"
    path: FileAddress = Field(
        description="Path or fsspec URL of a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, of a "
        "folder of them, or a pattern (data/*.parquet). Several are read in the order of their paths."
    )


class HubSource(_Rows):
    """Rows of a dataset on the Hugging Face hub (needs the extra 'hub')."""

    kind: Literal["hub"] = "hub"
    name: str = Field(description="Dataset id on the hub (org/name).")
    subset: str | None = Field(None, description="Configuration of the dataset, if it has several.")
    split: str = Field("train", description="Split to read.")
    columns: tuple[str, ...] | None = Field(
        None, description="Columns that are read; none: all, which must not hold images or sound."
    )


class ReasoningGymSource(Settings):
    """Problems made by a reasoning-gym task; nothing is downloaded."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(description="Name of the reasoning-gym dataset, such as chain_sum.")
    size: int = Field(1000, ge=1, description="Number of problems that make one epoch.")
    seed: int = Field(0, ge=0, description="Seed of the problems.")
    params: dict[str, int | float | bool | str | list[int | float | bool | str]] = Field(
        default_factory=dict, description="Parameters of the task, as reasoning-gym names them."
    )


class FunctionSource(Settings):
    """Rows that a function of yours returns: fn(**params) -> a list of dicts, or what it yields."""

    kind: Literal["function"] = "function"
    path: FunctionPath
    params: dict[str, int | float | bool | str] = Field(
        default_factory=dict, description="Keyword arguments of the call."
    )
    timeout: float = Field(
        120.0, gt=0, description="Deadline of the call, until its last row, in seconds."
    )


Source = Annotated[
    FileSource | HubSource | ReasoningGymSource | FunctionSource | CodingSource,
    Field(discriminator="kind"),
]


# Settings of data, and of episodes, that a task may have of its own.
OF_TASK = (
    *("prompt_column", "template", "system_prompt", "prompt_suffix", "chat_template_kwargs"),
    *("prefill", "max_prompt_tokens"),
)
OF_EPISODES = (
    *("environment", "workspace", "max_turns", "max_turn_tokens", "past_turns", "full_turn"),
    *("turn_timeout", "timeout", "deadline"),
)
TASK_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"


class TaskConfig(Settings):
    """One of several tasks: its rows, how often they come, how they are asked, played and scored.

    What is none is as data and episodes have it.
    """

    later: ClassVar[frozenset[str]] = frozenset({"group_size", "sandbox", *OF_EPISODES})

    source: Source | None = Field(
        None, description="Its rows; none: those of data.source.source that name it."
    )
    weight: float = Field(
        1.0, ge=0, description="Share of each step's prompts, in proportion to the other tasks'."
    )
    from_step: dict[int, float] = Field(
        default_factory=dict,
        description="Other weights from some steps on, as {100: 0.5, 200: 0}; before the first of "
        "them it is weight.",
    )
    group_size: int | None = Field(
        None, ge=1, description="Completions of each prompt; none: group_size, the largest of all."
    )
    max_new_tokens: int | None = Field(
        None,
        ge=1,
        description="Longest completion, in tokens, of all turns together; none: "
        "rollout.max_new_tokens, which is the largest of all.",
    )
    rewards: tuple[str, ...] | None = Field(
        None, description="Names of the rewards.functions that score it; none: all."
    )
    sandbox: SandboxConfig | None = Field(
        None, description="Where programs run that unit tests score; none: as the reward has it."
    )
    prompt_column: str | None = Field(None, description="As data.prompt_column.")
    template: Literal["chat", "plain"] | None = Field(None, description="As data.template.")
    system_prompt: str | None = Field(None, description="As data.system_prompt.")
    prompt_suffix: str | None = Field(None, description="As data.prompt_suffix.")
    chat_template_kwargs: dict[str, JsonValue] | None = Field(
        None, description="As data.chat_template_kwargs."
    )
    prefill: str | None = Field(None, description="As data.prefill.")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="As data.max_prompt_tokens, which is the largest of all."
    )
    environment: Environment | None = Field(
        None,
        description="What answers its turns; kind none: they are one. None: as episodes has it.",
    )
    workspace: WorkspaceConfig | None = Field(
        None, description="As episodes.workspace, whole: with a sandbox of its own."
    )
    max_turns: int | None = Field(None, ge=1, description="As episodes.max_turns.")
    max_turn_tokens: int | None = Field(None, ge=1, description="As episodes.max_turn_tokens.")
    past_turns: Literal["as_sampled", "as_rendered"] | None = Field(
        None, description="As episodes.past_turns."
    )
    full_turn: Literal["ends", "counts"] | None = Field(None, description="As episodes.full_turn.")
    turn_timeout: float | None = Field(
        None, gt=0, description="As episodes.turn_timeout, in seconds."
    )
    timeout: float | None = Field(None, gt=0, description="As episodes.timeout, in seconds.")
    deadline: float | None = Field(None, gt=0, description="As episodes.deadline, in seconds.")

    @property
    def of_episodes(self) -> dict[str, Any]:
        """What it has of its own of the settings of episodes."""
        return self.model_dump(include=set(OF_EPISODES), exclude_none=True)

    @model_validator(mode="after")
    def _weights_are_shares(self) -> "TaskConfig":
        for step, weight in self.from_step.items():
            if step < 1 or not 0 <= weight < math.inf:
                raise ValueError(
                    f"from_step has {step}: {weight:g}. It takes steps, counted from 1, and their "
                    "weights, 0 or more."
                )
        return self

    def weight_at(self, step: int) -> float:
        """The weight in a step, counted from 1."""
        begun = [start for start in self.from_step if start <= step]
        return self.from_step[max(begun)] if begun else self.weight


class SuccessCurriculum(Settings):
    """Weights that follow what is learned: largest where half of the samples are right.

    A task's weight is multiplied by max(floor, 4 p (1 - p)), p the share of its samples that were
    right in the last steps.
    """

    steps: int = Field(
        8, ge=1, description="Committed steps with samples of the task over which p is the mean."
    )
    floor: float = Field(
        0.1,
        gt=0,
        le=1,
        description="Least factor: so much of a task is asked, learned or hopeless.",
    )


class TasksSource(Settings):
    """Several tasks, each with rows, a share of each step, prompts and rewards of its own."""

    kind: Literal["tasks"] = "tasks"
    tasks: dict[Annotated[str, Field(pattern=TASK_NAME)], TaskConfig] = Field(
        min_length=1, description="By name; all else of data says what a task leaves out."
    )
    source: Annotated[FileSource | HubSource, Field(discriminator="kind")] | None = Field(
        None, description="Rows of the tasks that have no source."
    )
    task_column: str = Field("task", description="Its column that names a row's task.")
    right_from: float = Field(
        1.0, description="Reward from which on a sample is right, for task/NAME/right."
    )
    curriculum: SuccessCurriculum | None = Field(
        None, description="Weights that follow the tasks' success; none: they stay."
    )

    @model_validator(mode="after")
    def _every_task_has_rows(self) -> "TasksSource":
        for name, task in self.tasks.items():
            if task.source is None and self.source is None:
                raise ValueError(
                    f"The task {name} has no rows. Set data.source.tasks.{name}.source, or "
                    "data.source.source to a file whose column names each row's task."
                )
        return self

    def rows_of(self, name: str) -> Source:
        """The source of a task's rows."""
        if (source := self.tasks[name].source) is not None:
            return source
        assert self.source is not None, "see _every_task_has_rows"
        where = {**self.source.where, self.task_column: name}
        return self.source.model_copy(update={"where": where})


DataSource = Annotated[
    FileSource | HubSource | ReasoningGymSource | FunctionSource | CodingSource | TasksSource,
    Field(discriminator="kind"),
]


class QuarantineConfig(Settings):
    """Rows that leave the draw: each bound that is set, by the draws of a row so far."""

    failures: int | None = Field(
        None, ge=1, description="Draws in a row with a sample that failed or timed out."
    )
    no_variance: int | None = Field(
        None, ge=1, description="Draws in a row whose samples all have the same reward."
    )
    tokens: float | None = Field(
        None, gt=0, description="Response tokens of a sample, mean over a draw's; above it."
    )
    seconds: float | None = Field(
        None,
        gt=0,
        description="Seconds of a sample in its environment, mean over a draw's; above it. "
        "Episodes only.",
    )

    @model_validator(mode="after")
    def _has_a_bound(self) -> "QuarantineConfig":
        if self == QuarantineConfig.model_construct():
            raise ValueError(
                "data.quarantine has no bound, so no row would leave the draw. Set one of failures, "
                "no_variance, tokens and seconds, or data.quarantine = null."
            )
        return self


# Arguments of apply_chat_template that follow from other settings.
OWN_VARIABLES = {
    *("messages", "conversation", "chat_template", "add_generation_prompt", "tokenizer_kwargs"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}


def refuse_own_variables(where: str, variables: Mapping[str, JsonValue]) -> None:
    """ValueError for variables of a chat template that Refrain sets itself."""
    if names := sorted(OWN_VARIABLES & variables.keys()):
        raise ValueError(f"{where} names {', '.join(names)}, which Refrain sets itself. Remove it.")


class DataConfig(Settings):
    """Prompts: source, template, order."""

    later: ClassVar[frozenset[str]] = frozenset({"chat_template_kwargs", "prefill"})

    source: DataSource = Field(description="Where the rows come from.")
    prompt_column: str = Field(
        "question",
        description="Column with the prompt: a string, or a list of chat messages (role, content).",
    )
    template: Literal["chat", "plain"] = Field(
        "chat", description="chat: the tokenizer's chat template; plain: the text as it is."
    )
    system_prompt: str | None = Field(
        None, description="System message put before each prompt (template = chat only)."
    )
    prompt_suffix: str = Field("", description="Text appended to each prompt string.")
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Further variables of the chat template, as {enable_thinking: false}. A row's "
        "column of this name, an object, goes before them.",
    )
    prefill: str = Field(
        "",
        description="Text with which each answer begins, of each turn too: part of the prompt, so "
        "neither trained nor scored.",
    )
    state_column: str | None = Field(
        None,
        description="Column that names the state in which a row's turn begins: rows of equal value "
        "begin alike (gigpo). None: each prompt is a state of its own.",
    )
    max_prompt_tokens: int = Field(
        512, ge=1, description="Longest prompt, in tokens; a longer one is dropped and counted."
    )
    order: Literal["shuffled", "sequential", "difficulty"] = Field(
        "shuffled",
        description="shuffled: anew each epoch; sequential: as the source has them; difficulty: rows "
        "not seen yet, shuffled, then by the mean reward of their draws so far, the easiest first; "
        "an epoch's order is made when it begins.",
    )
    quarantine: QuarantineConfig | None = Field(
        None,
        description="When a row leaves the draw; none: never (refrain quarantine shows which).",
    )
    seed: int = Field(0, ge=0, description="Seed of the order.")
    epochs: int | None = Field(
        None, ge=1, description="Passes over the data before the run ends; none means no limit."
    )
    last_step: Literal["drop", "partial"] = Field(
        "drop",
        description="What epochs leave over for a last step, if fewer than prompts_per_step: drop: "
        "not drawn; partial: trained on.",
    )

    @property
    def keeps_history(self) -> bool:
        """Whether what became of each row is kept from step to step."""
        return self.quarantine is not None or self.order == "difficulty"

    @property
    def tasks(self) -> dict[str, "DataConfig"]:
        """By name, how the rows of each of several tasks become prompts; none: one task."""
        if not isinstance(self.source, TasksSource):
            return {}
        return {name: self._of_task(self.source, name) for name in sorted(self.source.tasks)}

    def _of_task(self, source: TasksSource, name: str) -> "DataConfig":
        changes = source.tasks[name].model_dump(include=set(OF_TASK), exclude_none=True)
        return self.model_copy(update={**changes, "source": source.rows_of(name)})

    def scored_by(self, reward: str) -> list["DataConfig"]:
        """The data that a reward function scores: of each task to which it applies, or all."""
        if not isinstance(self.source, TasksSource):
            return [self]
        return [
            data
            for name, data in self.tasks.items()
            if (names := self.rewards_of(name)) is None or reward in names
        ]

    @property
    def right_from(self) -> float:
        """Reward from which on a sample of one of several tasks is right."""
        return self.source.right_from if isinstance(self.source, TasksSource) else 1.0

    def limits(self, most: int) -> dict[str, int]:
        """The longest completion of each of several tasks, in tokens; most: of those without one."""
        tasks = self.source.tasks if isinstance(self.source, TasksSource) else {}
        return {name: task.max_new_tokens or most for name, task in tasks.items()}

    def played(self, episodes: EpisodesConfig) -> dict[str, EpisodesConfig]:
        """The episodes of each of several tasks, by name; of one task under no name.

        episodes: what a task's own settings stand in. ValueError, in a sentence, where they do not
        go together.
        """
        if not isinstance(self.source, TasksSource):
            return {"": episodes}
        by_task = {}
        for name, task in self.source.tasks.items():
            try:
                settings = episodes.model_dump() | task.of_episodes
                by_task[name] = type(episodes).model_validate(settings)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"The task {name}: {message}") from None
        return by_task

    def group_sizes(self, most: int) -> dict[str, int]:
        """Completions of a prompt of each of several tasks; most: of those without a number."""
        tasks = self.source.tasks if isinstance(self.source, TasksSource) else {}
        return {name: task.group_size or most for name, task in tasks.items()}

    def sandboxes(self, reward: str) -> dict[str, SandboxConfig]:
        """Sandboxes of their own of the tasks that a reward scores, by the tasks' names."""
        tasks = self.source.tasks if isinstance(self.source, TasksSource) else {}
        return {
            name: task.sandbox
            for name, task in tasks.items()
            if task.sandbox is not None and (task.rewards is None or reward in task.rewards)
        }

    def rewards_of(self, task: str) -> tuple[str, ...] | None:
        """Names of the reward functions that score one of several tasks; None: all."""
        assert isinstance(self.source, TasksSource)
        return self.source.tasks[task].rewards

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables_are_further_ones(cls, variables: dict[str, JsonValue]) -> dict[str, JsonValue]:
        refuse_own_variables("data.chat_template_kwargs", variables)
        return variables

    @model_validator(mode="after")
    def _template_fits(self) -> "DataConfig":
        if self.system_prompt is not None and self.template != "chat":
            raise ValueError(
                "data.system_prompt needs the chat template. "
                "Set data.template = chat, or remove data.system_prompt."
            )
        if self.chat_template_kwargs and self.template != "chat":
            raise ValueError(
                "data.chat_template_kwargs are variables of a chat template, and data.template is "
                "plain. Set data.template = chat, or remove data.chat_template_kwargs."
            )
        for name, task in self.tasks.items():
            try:
                type(self).model_validate(task.model_dump())
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"The task {name}: {message}") from None
        return self
