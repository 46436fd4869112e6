"""What has to hold between the parts of a run's settings, as tables: one rule, one sentence.

A feature's rules stand in a module of its name beside this one, those of a flow's own settings with
these; a class of settings lists the tables of its features as `rules`. What a section can say of
itself alone is a validator of that section.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S")  # the settings
T = TypeVar("T")  # a part of them, such as one guard


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[S]):
    """What settings need, and what a person is told where they do not have it."""

    needs: Callable[[S], bool]  # whether it holds
    says: Callable[
        [S], str
    ]  # one sentence: what, which value, what to set; asked only where it fails
    # It is newer than some stored runs, or no fault of a run that has made steps: a run that begins
    # is refused by it, and a stored one is read and goes on.
    new_runs_only: bool = False

    def fault(self, settings: S) -> str | None:
        """The sentence; None where the rule holds."""
        return None if self.needs(settings) else self.says(settings)


class Ruled(Protocol):
    """Settings with rules."""

    @property
    def rules(self) -> tuple[Rule[Any], ...]:
        """All of them, in the order in which they are asked."""
        ...


def check_rules(settings: Ruled, *, new_run: bool = False) -> None:
    """ValueError with the sentence of the first rule that does not hold.

    new_run: ask the rules that are only for a run that begins, and not those that were asked when the
    settings were read.
    """
    for rule in settings.rules:
        if rule.new_runs_only == new_run and (fault := rule.fault(settings)) is not None:
            raise ValueError(fault)


def of_each(
    parts: Callable[[S], Iterable[T]],
    *,
    needs: Callable[[S, T], bool],
    says: Callable[[S, T], str],
    new_runs_only: bool = False,
) -> Rule[S]:
    """A rule of every one of some parts, which speaks of the first that breaks it."""

    def broken(settings: S) -> Iterable[T]:
        return (part for part in parts(settings) if not needs(settings, part))

    return Rule(
        needs=lambda settings: next(iter(broken(settings)), None) is None,
        says=lambda settings: says(settings, next(iter(broken(settings)))),
        new_runs_only=new_runs_only,
    )


def where(applies: Callable[[S], bool], *rules: Rule[S]) -> tuple[Rule[S], ...]:
    """Rules that are asked only of some settings."""

    def only(rule: Rule[S]) -> Rule[S]:
        return replace(rule, needs=lambda settings: not applies(settings) or rule.needs(settings))

    return tuple(only(rule) for rule in rules)
