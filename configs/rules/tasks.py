"""Several tasks in one run: their rewards, weights and limits, and what goes with them."""

from collections.abc import Iterable

from configs.algorithm.advantages import GRPOAdvantage
from configs.data import TaskConfig, TasksSource
from configs.evaluation import SuiteConfig
from configs.rewards import SandboxConfig, UnitTestsReward
from configs.rules.rule import Rule, of_each, where
from configs.run import RunConfig


def _source(config: RunConfig) -> TasksSource:
    assert isinstance(config.data.source, TasksSource)
    return config.data.source


def _tasks(config: RunConfig) -> Iterable[tuple[str, TaskConfig]]:
    return _source(config).tasks.items()


def _limited(config: RunConfig) -> list[str]:
    """Tasks with a longest completion of their own."""
    return [name for name, task in _tasks(config) if task.max_new_tokens is not None]


def _unknown(config: RunConfig, task: TaskConfig) -> list[str]:
    known = [reward.label for reward in config.rewards.functions]
    return sorted(set(task.rewards or ()) - set(known))


def _idle(config: RunConfig) -> list[str]:
    labels = [reward.label for reward in config.rewards.functions]
    return [label for label in labels if not config.data.scored_by(label)]


def _weightless(config: RunConfig) -> list[int]:
    """Steps from which on no task has a weight."""
    tasks = _source(config).tasks.values()
    begins = sorted({1, *(step for task in tasks for step in task.from_step)})
    return [step for step in begins if not any(task.weight_at(step) for task in tasks)]


def _suites(config: RunConfig) -> list[str]:
    """Suites that would be asked, or scored, as the run's rows are."""
    return [
        name
        for name, one in config.suites.items()
        if one.task is None and (one.prompt is None or one.rewards is None)
    ]


def _of_tasks(config: RunConfig) -> Iterable[tuple[str, SuiteConfig]]:
    """Suites that are of a task."""
    return [(name, one) for name, one in config.suites.items() if one.task is not None]


def _sandboxed(
    config: RunConfig,
) -> Iterable[tuple[str, list[UnitTestsReward], SandboxConfig]]:
    """Tasks with a sandbox of their own, and the unit tests that run in it."""
    for name, task in _tasks(config):
        if task.sandbox is not None:
            scored = config.rewards.named(task.rewards).functions
            yield name, [one for one in scored if isinstance(one, UnitTestsReward)], task.sandbox


def _unplayed(config: RunConfig) -> Iterable[tuple[str, str]]:
    """Tasks that have settings of episodes, each with the first of them, where there are none."""
    own = [(name, list(task.of_episodes)) for name, task in _tasks(config) if task.of_episodes]
    return [(name, settings[0]) for name, settings in own] if config.episodes is None else []


TASKS: tuple[Rule[RunConfig], ...] = where(
    lambda config: isinstance(config.data.source, TasksSource),
    of_each(
        _tasks,
        needs=lambda config, task: not _unknown(config, task[1]),
        says=lambda config, task: (
            f"data.source.tasks.{task[0]}.rewards names {_unknown(config, task[1])[0]}, and the "
            "rewards are "
            f"{', '.join(reward.label for reward in config.rewards.functions)}. Set one of these."
        ),
    ),
    of_each(
        _tasks,
        needs=lambda config, task: task[1].rewards is None or len(task[1].rewards) > 0,
        says=lambda config, task: (
            f"data.source.tasks.{task[0]}.rewards is empty, so none of its samples would have a "
            "reward. Name some of rewards.functions, or set it to null for all."
        ),
    ),
    Rule(
        needs=lambda config: not _idle(config),
        says=lambda config: (
            f"The reward {_idle(config)[0]} scores no task. Name it in data.source.tasks.*.rewards, "
            "or remove it."
        ),
    ),
    Rule(
        needs=lambda config: not _weightless(config),
        says=lambda config: (
            f"No task has a weight from step {_weightless(config)[0]} on. Set a "
            "data.source.tasks.*.weight, or from_step, above 0."
        ),
    ),
    of_each(
        _tasks,
        needs=lambda config, task: (
            (task[1].max_prompt_tokens or 0) <= config.data.max_prompt_tokens
        ),
        says=lambda config, task: (
            f"data.source.tasks.{task[0]}.max_prompt_tokens = {task[1].max_prompt_tokens} is above "
            f"data.max_prompt_tokens = {config.data.max_prompt_tokens}, the largest of all. Set the "
            "latter higher."
        ),
    ),
    of_each(
        _tasks,
        needs=lambda config, task: (task[1].max_new_tokens or 0) <= config.rollout.max_new_tokens,
        says=lambda config, task: (
            f"data.source.tasks.{task[0]}.max_new_tokens = {task[1].max_new_tokens} is above "
            f"rollout.max_new_tokens = {config.rollout.max_new_tokens}, the largest of all. Set the "
            "latter higher."
        ),
    ),
    of_each(
        _tasks,
        needs=lambda config, task: (task[1].group_size or 0) <= config.group_size,
        says=lambda config, task: (
            f"data.source.tasks.{task[0]}.group_size = {task[1].group_size} is above group_size = "
            f"{config.group_size}, the largest of all. Set the latter higher."
        ),
    ),
    of_each(
        _sandboxed,
        needs=lambda config, own: len(own[1]) > 0,
        says=lambda config, own: (
            f"data.source.tasks.{own[0]}.sandbox is of unit tests, and no reward of kind unit_tests "
            "scores the task. Set it to null, or name such a reward in the task's rewards."
        ),
    ),
    of_each(
        _sandboxed,
        needs=lambda config, own: all(one.test_timeout <= own[2].timeout for one in own[1]),
        says=lambda config, own: (
            f"data.source.tasks.{own[0]}.sandbox.timeout = {own[2].timeout:g} s is of all tests of a "
            "sample, and one may take more (test_timeout of the reward). Set it higher."
        ),
    ),
    of_each(
        _unplayed,
        needs=lambda config, own: False,
        says=lambda config, own: (
            f"data.source.tasks.{own[0]}.{own[1]} is of episodes, and episodes = null has none. Set "
            "episodes.environment, of the tasks without one of their own: {kind: none} is an answer "
            "of one turn."
        ),
    ),
    of_each(
        _tasks,
        needs=lambda config, task: task[1].environment is None or not config.sees_frames,
        says=lambda config, task: (
            f"data.source.tasks.{task[0]}.environment is its own, and episodes.sees = frames shows "
            "images of one. Set it to null, or episodes.sees = text."
        ),
    ),
    of_each(
        _limited,
        needs=lambda config, name: (
            (penalty := config.algorithm.shaping.overlong) is None or penalty.max_tokens is not None
        ),
        says=lambda config, name: (
            "algorithm.shaping.overlong goes by rollout.max_new_tokens, and "
            f"data.source.tasks.{name} has a limit of its own. Set "
            "algorithm.shaping.overlong.max_tokens, which then holds for all tasks."
        ),
    ),
    Rule(
        needs=lambda config: config.data.epochs is None,
        says=lambda config: (
            f"data.epochs = {config.data.epochs} counts passes over one task, and here the weights "
            "say how often each comes. Set data.epochs = null, and steps."
        ),
    ),
    of_each(
        _suites,
        needs=lambda config, name: False,
        says=lambda config, name: (
            f"The suite {name} would be asked and scored as the run's rows, of which each task has "
            f"its own way. Set evaluation.suites.{name}.task to one of them, or its prompt and "
            "rewards."
        ),
    ),
    of_each(
        _of_tasks,
        needs=lambda config, suite: suite[1].task in _source(config).tasks,
        says=lambda config, suite: (
            f"evaluation.suites.{suite[0]}.task = {suite[1].task} is no task. Set it to one of "
            f"{', '.join(_source(config).tasks)}."
        ),
    ),
    of_each(
        _of_tasks,
        needs=lambda config, suite: not suite[1].own,
        says=lambda config, suite: (
            f"evaluation.suites.{suite[0]}.task = {suite[1].task} says how its rows are asked, "
            f"played and scored, and it has {suite[1].own[0]} of its own. Set the one or the "
            "other to null."
        ),
    ),
    Rule(
        needs=lambda config: config.episodes is None or config.episodes.players == 1,
        says=lambda config: (
            f"episodes.players = {getattr(config.episodes, 'players', 1)} and several tasks do not "
            "go together. Set one player, or one data.source."
        ),
    ),
)


def _compared_by_task(config: RunConfig) -> list[str]:
    """Settings by which samples are compared with those of their task."""
    advantage = config.algorithm.advantage
    if not isinstance(advantage, GRPOAdvantage):
        return []
    return [name for name in ("baseline", "normalize") if getattr(advantage, name) == "task"]


ONE_TASK: tuple[Rule[RunConfig], ...] = where(
    lambda config: not isinstance(config.data.source, TasksSource),
    of_each(
        _of_tasks,
        needs=lambda config, suite: False,
        says=lambda config, suite: (
            f"evaluation.suites.{suite[0]}.task is one of several tasks, and data.source.kind = "
            f"{config.data.source.kind} is one. Set it to null."
        ),
    ),
    of_each(
        _compared_by_task,
        needs=lambda config, name: False,
        says=lambda config, name: (
            f"algorithm.advantage.{name} = task compares within each of several tasks, and "
            f"data.source.kind = {config.data.source.kind} is one. Set it to batch."
        ),
    ),
)


def no_tasks(flow: str) -> Rule[RunConfig]:
    """The rule of a flow that trains on one task."""
    return Rule(
        needs=lambda config: not isinstance(config.data.source, TasksSource),
        says=lambda config: (
            f"data.source.kind = tasks is for refrain grpo, ppo and dapo; {flow} trains on one "
            "task. Set another source."
        ),
    )
