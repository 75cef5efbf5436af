"""Place an export: write it in a hidden folder, then rename it, with its checksums; with ``--push-to-hub REPO``, push it to a
repository of the Hugging Face hub, as one commit.

An output that ends with the format's ending is a file, ``NAME``, and beside it are its card, ``NAME.md``, and its checksum,
``NAME.sha256``. Any other output is a folder with the file, ``README.md`` and ``SHA256SUMS``. Both checksums are as ``sha256sum -c``
reads them; they leave out the card, which its owner completes.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pipeline.errors import UserError, first_line
from pipeline.exporting import FORMATS, Format
from pipeline.files import check_space, check_writable, file_sha256, sync_folder
from pipeline.lazy import import_library

CARD, SUMS = "README.md", "SHA256SUMS"  # in a folder
_CARD, _SUM = ".md", ".sha256"  # beside a file


@dataclass(frozen=True)
class Place:
    """The output of an export."""

    output: Path  # as the user gave it
    file: str | None  # name of the format's file; None: the format makes a folder
    folder: bool  # whether output is one

    @property
    def card(self) -> Path:
        return self.output / CARD if self.folder else self.output.with_name(self.output.name + _CARD)

    @property
    def sums(self) -> Path:
        """The file with the checksums."""
        return self.output / SUMS if self.folder else self.output.with_name(self.output.name + _SUM)

    @property
    def loaded(self) -> str:
        """The name that the card loads: of the file, of the folder, or of the file in the folder."""
        return f"{self.output.name}/{self.file}" if self.folder and self.file else self.output.name

    def files(self) -> dict[str, Path]:
        """All files by their path in a repository, where the card is ``README.md``."""
        if not self.folder:
            return {self.output.name: self.output, self.sums.name: self.sums, CARD: self.card}
        return {path.relative_to(self.output).as_posix(): path for path in sorted(self.output.rglob("*")) if path.is_file()}

    @contextmanager
    def staged(self, needed: int) -> Iterator[tuple[Path, Path]]:
        """A hidden folder to write about ``needed`` bytes in, which is removed at the end, and the path for the format's function: a
        file in it, or the folder itself."""
        folder = self.output.absolute().parent
        check_space(folder, needed)
        hidden = folder / f".{self.output.name}.{os.getpid()}.tmp"
        hidden.mkdir()
        try:
            yield hidden, hidden / self.file if self.file else hidden
        finally:
            shutil.rmtree(hidden, ignore_errors=True)

    def publish(self, hidden: Path, card: str) -> None:
        """Add card and checksums to what is in ``hidden``, sync all of it and rename it. An existing export is replaced. Raises
        OSError: from the system; an existing export is then as it was, or has no checksum."""
        names = sorted(path.relative_to(hidden).as_posix() for path in hidden.rglob("*") if path.is_file())
        sums = "".join(f"{file_sha256(hidden / name)}  {name}\n" for name in names)
        (hidden / self.card.name).write_text(card, encoding="utf-8")
        (hidden / self.sums.name).write_text(sums, encoding="utf-8")
        for name in (*names, self.card.name, self.sums.name):
            with open(hidden / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(hidden)
        parent = self.output.absolute().parent
        if self.folder:
            former = parent / f".{self.output.name}.{os.getpid()}.former"
            if self.output.exists():
                os.replace(self.output, former)
            os.replace(hidden, self.output)
            shutil.rmtree(former, ignore_errors=True)
        else:
            self.sums.unlink(missing_ok=True)  # first and last: with it the export is complete
            for path in (self.card, self.output, self.sums):
                os.replace(hidden / path.name, path)
        sync_folder(parent)


def find_place(output: Path, form: Format, force: bool) -> Place:
    """Where an export goes, checked before the work. Raises UserError: it is taken already, or cannot be written."""
    if form.ending and output.suffix == form.ending:
        place = Place(output, output.name, folder=False)
        check_writable(output)
        taken = output.exists()
    else:
        formats = {each.ending: each.name for each in FORMATS.values() if each.ending}
        if output.suffix in formats:
            needed = f"a {form.ending} file or a folder" if form.ending else "a folder"
            problem = f"--output must be {needed} for --format {form.name}, got {output}"
            raise UserError(problem, f"change it, or pass --format {formats[output.suffix]}")
        place = Place(output, f"model{form.ending}" if form.ending else None, folder=True)
        if output.exists() and not output.is_dir():
            raise UserError(f"--output must be a folder, got the file {output}", "choose another")
        check_writable(output.absolute().parent / f".{output.name}.tmp")
        taken = output.is_dir() and any(output.iterdir())
    if taken and not force:
        raise UserError(f"{output} exists", "choose another --output, or add --force to replace it")
    if taken and place.folder:  # never remove what is no export
        known = {CARD, SUMS, *(name for _, name in _entries(place.sums))} if place.sums.is_file() else set()
        if others := place.files().keys() - known:
            problem = f"--force must find an export alone in {output}, got {min(others)} beside it"
            raise UserError(problem, "choose another --output, or move the file")
    return place


def verify(path: Path) -> list[str]:
    """Compare an export, its file or folder or the file with the checksums, with these; print each file that is whole. Returns
    a sentence for each file that is missing or differs. Raises UserError: there is no export, or it has no checksums."""
    sums = path if path.name == SUMS or path.suffix == _SUM else Place(path, None, path.is_dir()).sums
    if not path.exists():
        raise UserError(f"{path} does not exist", "pass the --output of an export")
    if not sums.is_file():
        problem = f"{path} has no checksum: {sums} does not exist"
        raise UserError(problem, "export it again, or fetch the file from where you got it")
    problems = []
    for expected, name in _entries(sums):
        file = sums.parent / name
        if not file.is_file():
            problems.append(f"{file} is missing")
        elif file_sha256(file) != expected:
            problems.append(f"{file} was changed after it was written, its checksum is not that in {sums.name}")
        else:
            print(f"whole   {file}")
    return problems


def _entries(sums: Path) -> list[tuple[str, str]]:
    """(checksum, name) of each line. Raises UserError: a line is not such a pair, or its name leads out of the folder."""
    found = []
    for number, line in enumerate(sums.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        checksum, _, name = line.partition("  ")
        if len(checksum) != 64 or not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{sums}: line {number} must be a checksum and a name", "export it again")
        found.append((checksum, name))
    if not found:
        raise UserError(f"{sums} must have a line per file, got none", "export it again")
    return found


_LOGIN = "set HF_TOKEN to a token with write permission, or log in with `hf auth login`"
_ENDPOINT = "HF_ENDPOINT"  # of another hub; huggingface_hub reads it when it is imported, here it is read when it is used


def check_hub(repo: str) -> None:
    """See, before anything is exported, that a push to ``repo``, ``NAME`` or ``OWNER/NAME``, can begin. Raises UserError:
    ``huggingface_hub`` is not installed, there is no token, or ``repo`` is not a repository's name."""
    hub = _imported()
    try:
        hub.utils.validate_repo_id(repo)
        valid = repo.count("/") <= 1
    except hub.errors.HFValidationError:
        valid = False
    if not valid:
        needed = "NAME or OWNER/NAME of letters, digits, '-', '_' and '.'"
        raise UserError(f"--push-to-hub must be {needed}, got {repo!r}", "correct it")
    if not hub.get_token():
        raise UserError(f"--push-to-hub {repo} requires a token of the Hugging Face hub, got none", _LOGIN)


def push(files: Mapping[str, Path], repo: str, message: str, private: bool = False) -> str:
    """Upload files, by their path in the repository, as one commit, so that it never has weights without their card; a ``repo`` that does not
    exist is created. Returns the commit's address. Raises UserError: as :func:`check_hub`; or the hub refuses, or is not
    reached. The files here stay as they are."""
    check_hub(repo)
    hub = _imported()
    api = hub.HfApi(endpoint=os.environ.get(_ENDPOINT) or None, library_name="pervit-pipeline")
    try:
        created = api.create_repo(repo, private=private or None, exist_ok=True)
        additions = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
        commit = api.create_commit(created.repo_id, operations=additions, commit_message=message)
    except Exception as error:  # the library's own errors, those of its HTTP client, of its threads, and of the system
        raise _refused(f"--push-to-hub {repo}", error, hub) from None
    return str(commit.commit_url)


def _refused(where: str, error: Exception, hub: ModuleType) -> UserError:
    """One sentence for what went wrong."""
    again = "the export itself is written: push it again, or upload it with `hf upload`"
    chain = [error]
    while isinstance(chain[-1].__cause__, Exception):  # an upload in a thread wraps what happened
        chain.append(chain[-1].__cause__)
    answered = next((each for each in chain if getattr(each, "response", None) is not None), None)
    root = answered or chain[-1]
    reason = (getattr(root, "server_message", None) or first_line(root)).splitlines()[0]
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
    for part in ("utils", "errors", "constants"):
        import_library(f"huggingface_hub.{part}", "--push-to-hub", "huggingface_hub", "hub")
    return import_library("huggingface_hub", "--push-to-hub", extra="hub")
