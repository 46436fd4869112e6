"""Who listens to a run: a line for each that shows it.

Called where a run is put together. A run, its tasks and an evaluation tell, and import none of these.
"""

from __future__ import annotations

from functools import partial

from configs.grpo import GRPOConfig
from storage.runs.run_store import RunStore
from tasks.reporting.artifacts import EvaluationPages, Pages, PrefectEvents
from tasks.reporting.mlflow_page import ReopenedPage, RunTracker
from tasks.reporting.other_trackers import OtherTracker
from tasks.reporting.progress import ProgressLine, ProgressTracker, ProgressWatch
from tasks.reporting.prometheus import LiveMetrics
from tasks.reporting.terminal import Terminal
from tasks.run.events import Listeners, Reporting, Reports
from tasks.run.facts import RunFacts
from tasks.run.features import features_of


def reporting_on(terminal: Terminal) -> Reporting:
    """What a run is given: all that shows it, its lines on this terminal."""
    return partial(_reports, terminal)


def _reports(terminal: Terminal, facts: RunFacts) -> Reports:
    """In the order in which they hear of an event."""
    listeners = Listeners()
    ProgressLine(terminal, facts.config.steps).listen(listeners)
    tracker = ProgressTracker(facts.config.steps, facts.epoch)
    tracker.listen(listeners)
    ProgressWatch(terminal, tracker, facts.files).listen(listeners)
    page = RunTracker(facts, terminal.say)
    page.listen(listeners)
    for kind in dict.fromkeys(facts.config.tracking.also):
        OtherTracker(kind, facts.config, facts.files, terminal.say).listen(facts, listeners)
    Pages(facts).listen(listeners)
    EvaluationPages(facts.files, facts.config).listen(listeners)
    PrefectEvents(facts.name).listen(listeners)
    LiveMetrics(facts, listeners.tell).listen(listeners)
    if facts.config.tracking.otlp_endpoint is not None:
        from tasks.reporting.traces import StepTraces  # an extra's packages, by this setting alone

        StepTraces(facts, facts.config.tracking.otlp_endpoint, listeners.tell).listen(listeners)
    reports = Reports(listeners=listeners, tracking=page)
    for feature in features_of(facts.config):
        feature.listen(facts, reports)
    return reports


def evaluation_listeners(
    terminal: Terminal, name: str, files: RunStore, config: GRPOConfig
) -> Listeners:
    """Who listens where versions of a run of the past are evaluated; name: of this back-fill."""
    listeners = Listeners()
    ProgressLine(terminal, 0).listen(listeners)
    ReopenedPage(config.tracking, files, listeners.tell).listen(listeners)
    for kind in dict.fromkeys(config.tracking.also):
        OtherTracker(kind, config, files, terminal.say).listen_to_back_fill(listeners)
    EvaluationPages(files, config).listen(listeners)
    PrefectEvents(name).listen(listeners)
    return listeners
