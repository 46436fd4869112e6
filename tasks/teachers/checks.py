"""The checks of a distillation's teachers before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from configs.distill import DistillConfig
from configs.grpo import GRPOConfig
from configs.model import RandomModel
from configs.teachers import TeacherConfig
from engines.data.dataset_answers import answers_of
from engines.models.checkpoints import check_model, present
from engines.models.facts import ModelFacts, model_facts
from engines.models.tokens import check_same_tokens, model_tokens
from engines.teachers.client import check_digest, probed, tokens_of
from storage.objects.documents import Row
from storage.objects.store import Store
from storage.prompts.datasets import open_source
from storage.prompts.source import PromptSource
from tasks.run.features import Finding
from tasks.run.preflight import check_vllm, check_vllm_on_cpu
from tasks.run.roles import FrozenModel
from tasks.teachers.models import address_of, distillation, resolved

ROWS = 1024  # of the data that are read at once


def check_teachers(config: GRPOConfig) -> list[Finding]:
    """Whether teachers are there, and fit the student and the rows. ValueError, one sentence."""
    own = distillation(config)
    store = Store(config.store.uri, config.store.options)
    found = _teachers_fit(own, store, open_source(config.data.source))
    gpus = config.cluster.pools[config.cluster.roles.pool_of("teacher")].gpus
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens + 1
    for name, engine in own.vllm_teachers.items():
        facts = model_facts(resolved(store, own, name).model)
        if facts is None:
            continue
        settings = engine.engine_of(config.rollout, 0)
        check_vllm(facts, longest, f"teachers.{name}.engine")
        if not gpus:
            check_vllm_on_cpu(settings, facts, longest, f"teachers.{name}.engine")
    return [Finding(check="teachers", found=found)]


def _teachers_fit(config: DistillConfig, store: Store, source: PromptSource) -> str:
    """Whether teachers are there, and fit the student and the rows. ValueError, one sentence."""
    said = []
    for name, settings in config.teachers.items():
        if settings.service is not None:
            said.append(f"{name}: {_checked_service(config, store, name, settings)}")
            continue
        teacher = resolved(store, config, name)
        try:
            check_model(teacher.model)
        except ValueError as error:
            raise ValueError(str(error).replace("model.", f"teachers.{name}.model.")) from None
        said.append(f"{name}: {_checked(config, teacher)}")
    if config.teacher_column is not None:
        source.check_columns([config.teacher_column])
        _check_rows(config, source)
    if config.off_policy is not None:
        column = config.off_policy.column
        source.check_columns([column])
        for number, row in _rows(source):
            answers_of(row, column, config.group_size, f"Row {number} of {source.name}")
    return "; ".join(said)


def _checked(config: DistillConfig, teacher: FrozenModel) -> str:
    """What was found of a teacher's tokens and sizes."""
    facts = model_facts(teacher.model)
    if facts is not None:
        _check_sizes(config, teacher.name, facts)
    if isinstance(config.model, RandomModel) and isinstance(teacher.model, RandomModel):
        return "the student's tokenizer"
    places = [present(model) for model in (config.model, teacher.model)]
    student, tokens = (None if place is None else model_tokens(place) for place in places)
    if student is None or tokens is None:
        return "its tokenizer is compared with the student's when engines start"
    check_same_tokens(student, tokens, teacher.name)
    return f"the student's tokenizer, {tokens.digest}"


def _checked_service(config: DistillConfig, store: Store, name: str, teacher: TeacherConfig) -> str:
    """What a service teaches by, if it can teach this run."""
    address, dtype = address_of(name, teacher), config.rollout.dtype
    facts = probed(address, store, dtype)
    check_digest(address, facts, teacher.digest, dtype)
    _check_length(config, name, facts.positions)
    _check_words(config, name, facts.rows)
    place = present(config.model)
    student = None if place is None else model_tokens(place)
    if student is not None:
        check_same_tokens(student, tokens_of(address), name)
    compared = "" if student is not None else "; tokenizers are compared when engines start"
    return f"{facts.model} at {address.url}, {facts.taken} of {facts.places} places taken{compared}"


def _check_sizes(config: DistillConfig, name: str, facts: ModelFacts) -> None:
    """Whether a teacher reads samples as long as the student's, and has as many words as wanted."""
    _check_length(config, name, facts.positions)
    known = None if facts.shape is None else facts.shape.vocabulary
    _check_words(config, name, known if facts.rows is None else facts.rows)


def _check_length(config: DistillConfig, name: str, positions: int | None) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    drawn = 1 if name in config.vllm_teachers else 0  # beyond those scored, whatever it is asked
    if positions is not None and longest + drawn > positions:
        more = ", with one more that vLLM draws" if drawn else ""
        raise ValueError(
            f"The longest sample has data.max_prompt_tokens + rollout.max_new_tokens = {longest} "
            f"tokens, and the teacher {name} reads {positions}{more}. Set one of them lower."
        )


def _check_words(config: DistillConfig, name: str, words: int | None) -> None:
    top_k = config.algorithm.distillation.top_k
    if words is not None and top_k >= words:
        raise ValueError(
            f"algorithm.distillation.loss.top_k = {top_k}, and the teacher {name} has {words} "
            "words, of which some have to be left for the tail. Set it lower."
        )


def _check_rows(config: DistillConfig, source: PromptSource) -> None:
    """Whether every row names a teacher."""
    column = config.teacher_column
    assert column is not None
    for number, row in _rows(source):
        teacher_of(row, column, config.teachers, f"Row {number} of {source.name}")


def _rows(source: PromptSource) -> Iterator[tuple[int, Row]]:
    """Every row with its number; some are read at a time."""
    for start in range(0, len(source), ROWS):
        numbers = range(start, min(start + ROWS, len(source)))
        yield from zip(numbers, source.rows(numbers), strict=True)


def teacher_of(
    row: Mapping[str, object], column: str, teachers: Mapping[str, object], where: str
) -> str:
    """The name of a row's teacher; ValueError for one that there is not."""
    named = row.get(column)
    if not isinstance(named, str) or named not in teachers:
        raise ValueError(
            f"{where} has {column} = {named!r}, and the teachers are {', '.join(teachers)}. Name one "
            "of them in each row, or set teacher_column to another column."
        )
    return named
