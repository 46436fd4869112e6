"""A dossier of a run, as a folder and as a model card on the hub."""

from __future__ import annotations

import hashlib
from pathlib import Path

from configs.overrides import ConfigError
from storage.audit.audit import audit
from storage.audit.dossier import VERIFY, write_dossier
from tasks.commands.command import Answer, Request, text


def answer(request: Request) -> Answer:
    """Audit the run, write its dossier, and push it if that was asked for."""
    files, arguments = request.files, request.arguments
    folder = Path(arguments.to).expanduser().absolute()
    if folder.exists():
        raise ConfigError(f"--to: {folder} is there already. Name a folder that is not.")
    token = None if arguments.push is None else login()
    audited = audit(files)
    digest = write_dossier(files, audited, folder)
    lines = [text(f"Dossier of {files.run}: {folder}"), text(f"  sha256 of SHA256SUMS  {digest}")]
    script = hashlib.sha256((folder / VERIFY).read_bytes()).hexdigest()
    lines.append(text(f"  sha256 of {VERIFY}   {script}"))
    lines += [text(problem.message, "bold red") for problem in audited.problems]
    pushed = None
    if token is not None:
        pushed = push(folder, arguments.push, token)
        lines.append(text(f"  {pushed}"))
    return Answer(
        record={
            "run": files.run,
            "folder": str(folder),
            "sha256": digest,
            "verify_sha256": script,
            "good": audited.good,
            "pushed": pushed,
        },
        shown=lines,
        good=audited.good,
    )


def login() -> str:
    """The token of the hub. ConfigError where nobody is logged in."""
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        raise ConfigError("--push needs a login at the hub. Run: hf auth login")
    return token


def push(folder: Path, repository: str, token: str, endpoint: str | None = None) -> str:
    """Upload a dossier as the files of a model repository, made private if it is new; its address.

    endpoint: of another hub. ConfigError where the hub refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    hub = HfApi(endpoint=endpoint, token=token)
    try:
        repo = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=repo.repo_id, folder_path=folder, commit_message="Dossier of a Refrain run"
        )
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(f"--push {repository}: the hub refused: {error}") from error
    return str(repo)
