"""Where MLflow finds the files of a registered version that lie in Refrain's store.

A registered version's source is its address in the store with `refrain-` before it, such as
refrain-s3://bucket/run/weights/v000013, wherever MLflow alone could not load what lies there
(docs/decisions/registered-versions.md). MLflow takes this class by the entry points of
`mlflow.artifact_repository` in pyproject.toml; it imports it with itself, so nothing of ours is
imported before a file is asked for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository

if TYPE_CHECKING:
    from storage.objects.store import Store
    from storage.runs.weights import WeightsRef


class RefrainArtifactRepository(ArtifactRepository):
    """A policy version as a model folder of MLflow's (registered_files.py), to be read alone."""

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """What of the folder is known before it is made: weights are, of a version that is whole."""
        from storage.runs.weights import open_manifest_at
        from tasks.reporting.registered_files import described, loads_as_it_lies

        store, ref = self._version()
        sizes = {name: len(data) for name, data in described(store, ref).items()}
        if loads_as_it_lies(store, ref):
            files = open_manifest_at(store, ref.key).files
            sizes |= {name: file.nbytes for name, file in files.items()}
        prefix = f"{path.strip('/')}/" if path else ""
        below = {
            name.removeprefix(prefix): n for name, n in sizes.items() if name.startswith(prefix)
        }
        entries = {}
        for name, size in sorted(below.items()):
            first, deeper, _ = name.partition("/")
            entries[first] = FileInfo(f"{prefix}{first}", bool(deeper), None if deeper else size)
        return list(entries.values())

    def download_artifacts(self, artifact_path: str, dst_path: str | None = None) -> str:
        """The folder, or one of its files, as MLflow asks for them.

        In a folder of the caller's there are files; else weights of a store on this machine's disk
        are linked, which takes no space.
        """
        from tasks.reporting import registered_files as folders

        store, ref = self._version()
        target = Path(dst_path or tempfile.mkdtemp(prefix="refrain-model-")).absolute()
        small = folders.described(store, ref)
        if artifact_path in small:
            folders.write_files({artifact_path: small[artifact_path]}, target)
            return str(target / artifact_path)
        if (
            dst_path is None
            and folders.on_this_disk(store)
            and folders.loads_as_it_lies(store, ref)
        ):
            folders.write_links(store, ref, target)
        else:
            folders.write_whole(store, ref, target)
        if not (target / artifact_path).exists():
            raise MlflowException(f"{self.artifact_uri} has no file {artifact_path}.")
        return str(target / artifact_path)

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        path = Path(self.download_artifacts(remote_file_path))
        Path(local_path).write_bytes(path.read_bytes())

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> NoReturn:
        """Refused: a policy version is final."""
        raise MlflowException(f"{self.artifact_uri} is a policy version; nothing is added to it.")

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> NoReturn:
        """Refused: a policy version is final."""
        self.log_artifact(local_dir, artifact_path)

    def _version(self) -> tuple[Store, WeightsRef]:
        from storage.objects.errors import ObjectMissing
        from tasks.reporting.registered_files import SCHEME, version_at

        uri = self.artifact_uri.removeprefix(SCHEME)
        try:
            return version_at(uri)
        except ObjectMissing:
            raise MlflowException(
                f"There is no policy version at {uri}: retention removed it, its store has been "
                "moved, or this machine does not reach it."
            ) from None
