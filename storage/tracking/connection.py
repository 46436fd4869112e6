"""Where MLflow is: its address, a client there, and the tables of new databases, Prefect's too.

MLflow is imported when a client is made, never before: that takes seconds.

The first migrations of MLflow's and Prefect's SQLite databases take 2 s and 5 s of CPU in each new
folder, and lead to the same tables every time. So the first database of each release of theirs is
made as a template in the user's cache folder; where nothing can be kept there, each is made anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Self

from configs.environment import cache_folder
from configs.process import private_folder

if TYPE_CHECKING:
    from mlflow import MlflowClient

_SQLITE = "sqlite:///"


def new_database(database: Path, package: str, migrate: Callable[[Path], object]) -> None:
    """Make a database with its tables, unless there is a file already.

    Args:
        database: Where it comes to lie, whole or not at all.
        package: The distribution whose release says which tables it has.
        migrate: Makes all tables in a new file, and leaves the file closed.
    """
    if database.exists():
        return
    try:
        template = private_folder(cache_folder()) / f"{package}-{version(package)}.db"
        if not template.exists():
            _appear(template, migrate)
        _appear(database, partial(shutil.copyfile, template))
    except (OSError, RuntimeError):  # no cache folder, or no home that it could be in
        _appear(database, migrate)


def _appear(file: Path, make: Callable[[Path], object]) -> None:
    """Have a file made beside its place and put there; the first of several stays."""
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f"{file.name}-") as beside:
        draft = Path(beside, file.name)
        make(draft)
        try:
            os.link(draft, file)
        except OSError:  # another has made it, or the file system has no links
            if not file.exists():
                draft.rename(file)


class TrackingError(RuntimeError):
    """A tracker did not do what was asked."""


class TrackerUnusable(TrackingError):
    """Nor will it: its package cannot be imported, or it takes no run at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackingAddress:
    """An address of MLflow's."""

    uri: str  # as MLflow takes it; a file's path is absolute
    database: Path | None  # SQLite's file; None: a server

    @classmethod
    def of(cls, uri: str) -> Self:
        """By tracking.uri. ValueError when the address is none that MLflow can use."""
        if "://" not in uri:
            raise ValueError(
                f"tracking.uri is {uri}. Set it to sqlite:///<file> or to the address of an "
                "MLflow server, such as http://localhost:5000."
            )
        if not uri.startswith(_SQLITE):
            return cls(uri=uri, database=None)
        database = Path(uri.removeprefix(_SQLITE)).absolute()
        return cls(uri=f"{_SQLITE}{database}", database=database)

    @property
    def name(self) -> str:
        """Of the tracker."""
        return "MLflow"

    @property
    def where(self) -> str:
        """Its name, and at which address."""
        return f"MLflow at {self.uri}"

    def check_answers(self) -> None:
        """Raise TrackingError, a short sentence, for a server that does not answer within 10 s.

        MLflow itself would try for minutes.
        """
        if not self.uri.startswith("http"):
            return
        try:
            health = f"{self.uri.rstrip('/')}/health"
            with urllib.request.urlopen(health, timeout=10, context=_trusted()):
                pass
        except urllib.error.HTTPError:
            pass  # it answers, if only to refuse: credentials are MLflow's affair
        except OSError as error:
            raise TrackingError(
                f"The MLflow server at {self.uri} does not answer ({error}). Start it, or set "
                "tracking.uri to a file such as sqlite:///.refrain/mlflow.db."
            ) from None

    def connect(self) -> MlflowClient:
        """A client at the address; the first one makes the tables of a new SQLite database.

        The registry of models is there too, whatever MLFLOW_REGISTRY_URI says.
        """
        for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"):
            os.environ.setdefault(name, "true")  # MLflow has no other switch; read at its import
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        if self.database is None:
            self.check_answers()
            return MlflowClient(self.uri, self.uri)
        self.database.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.database.with_suffix(".lock")):
            new_database(self.database, "mlflow-skinny", _make_tables)
            client = MlflowClient(self.uri, self.uri)
            client.search_experiments(max_results=1)  # the first use creates the tables
        return client


def has_pages() -> bool:
    """Whether the mlflow that is installed brings its web pages; mlflow-skinny has none."""
    import mlflow

    return Path(mlflow.__file__).with_name("server").joinpath("js", "build").is_dir()


@contextmanager
def as_tracking_errors(uri: str) -> Iterator[None]:
    """Say of what MLflow raises in the body where it was."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise TrackingError(f"MLflow at {uri} failed: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock: MLflow 3.17 does not guard a database's first migration against another's.

    Not reported to MLflow; seen by others: https://github.com/daizutabi/hydraflow/issues/245
    """
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_tables(database: Path) -> None:
    """MLflow's tables in a new database, without the experiment that it adds at the first use."""
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(f"{_SQLITE}{database}")
    _initialize_tables(engine)
    engine.dispose()


def _trusted() -> ssl.SSLContext:
    """What MLflow's own client trusts, by its variables."""
    from mlflow.environment_variables import (
        MLFLOW_TRACKING_INSECURE_TLS,
        MLFLOW_TRACKING_SERVER_CERT_PATH,
    )

    context = ssl.create_default_context(cafile=MLFLOW_TRACKING_SERVER_CERT_PATH.get())
    if MLFLOW_TRACKING_INSECURE_TLS.get():
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
