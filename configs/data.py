"""Where prompts come from and how a row becomes prompt tokens."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from configs.base import FileAddress, FunctionPath, Settings


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
    FileSource | HubSource | ReasoningGymSource | FunctionSource, Field(discriminator="kind")
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


def refuse_own_variables(where: str, given: Mapping[str, JsonValue]) -> None:
    """ValueError for variables of a chat template that Refrain sets itself."""
    if own := sorted(OWN_VARIABLES & given.keys()):
        raise ValueError(f"{where} names {', '.join(own)}, which Refrain sets itself. Remove it.")


class DataConfig(Settings):
    """Prompts: source, template, order."""

    later: ClassVar[frozenset[str]] = frozenset({"chat_template_kwargs", "prefill"})

    source: Source = Field(description="Where the rows come from.")
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

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables_are_further_ones(cls, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        refuse_own_variables("data.chat_template_kwargs", given)
        return given

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
        return self
