"""``--push-to-hub REPO``: an export with its card and checksum into a repository of the Hugging Face hub, as one commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from pipeline.errors import UserError, first_line

_LOGIN = "set HF_TOKEN to a token with write permission, or log in with `hf auth login`"
_ENDPOINT = "HF_ENDPOINT"  # of another hub; huggingface_hub reads it when it is imported, here it is read when it is used


def check_hub(repo: str) -> None:
    """See, before anything is exported, that a push can begin.

    Args:
        repo: ``NAME`` or ``OWNER/NAME``.

    Raises:
        UserError: ``huggingface_hub`` is not installed, there is no token, or ``repo`` is no name of a repository.
    """
    hub = _imported()
    try:
        hub.utils.validate_repo_id(repo)
    except hub.errors.HFValidationError:
        raise UserError(
            f"--push-to-hub must be NAME or OWNER/NAME of letters, digits, '-', '_' and '.', got {repo!r}", "correct it"
        ) from None
    if repo.count("/") > 1:
        raise UserError(f"--push-to-hub must be NAME or OWNER/NAME, got {repo!r}", "correct it")
    if not hub.get_token():
        raise UserError(f"--push-to-hub {repo} requires a token of the Hugging Face hub, got none", _LOGIN)


def push(files: Mapping[str, Path], repo: str, message: str, private: bool = False) -> str:
    """Upload files as one commit, so that a repository never has weights without their card.

    Args:
        files: path in the repository -> file here. The card's is ``README.md``.
        repo: created if it does not exist.
        message: of the commit.
        private: of a repository that is created.

    Returns:
        The commit's address.

    Raises:
        UserError: as :func:`check_hub`; or the hub refuses, or is not reached. The files here stay as they are.
    """
    check_hub(repo)
    hub = _imported()
    api = hub.HfApi(endpoint=os.environ.get(_ENDPOINT) or None, library_name="pervit-pipeline")
    where = f"--push-to-hub {repo}"
    try:
        created = api.create_repo(repo, private=private or None, exist_ok=True)
        additions = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        commit = api.create_commit(created.repo_id, operations=additions, commit_message=message)
    except Exception as error:  # the library's own errors, those of its HTTP client, of its threads, and of the system
        raise _refused(where, error, hub) from None
    return str(commit.commit_url)


def _refused(where: str, error: Exception, hub: ModuleType) -> UserError:
    """One sentence for what went wrong."""
    again = "the export itself is written: push it again, or upload it with `hf upload`"
    chain = [error]
    while isinstance(chain[-1].__cause__, Exception):  # an upload in a thread wraps what happened
        chain.append(chain[-1].__cause__)
    answered = next((each for each in chain if getattr(each, "response", None) is not None), None)
    root = answered or chain[-1]
    said = getattr(root, "server_message", None) or first_line(root)
    reason = said.splitlines()[0]
    if answered is not None:
        status = answered.response.status_code  # type: ignore[attr-defined]
        if status in (401, 403):
            return UserError(f"{where}: the hub refuses the token ({status}, {reason})", f"{_LOGIN}; {again}")
        return UserError(f"{where}: the hub refuses ({status}, {reason})", again)
    if isinstance(root, OSError) or type(root).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
        endpoint = os.environ.get(_ENDPOINT) or hub.constants.ENDPOINT
        return UserError(f"{where}: the hub at {endpoint} is not reached ({reason})", again)
    return UserError(f"{where}: the upload failed ({reason})", again)


def _imported() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ModuleNotFoundError as error:
        if error.name != "huggingface_hub":
            raise
        raise UserError(
            "--push-to-hub requires huggingface_hub, which is not installed", "pip install 'pervit-pipeline[hub]'"
        ) from None
    return huggingface_hub
