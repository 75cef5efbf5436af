"""Files are whole or not there, and a disk that refuses is one sentence; on real file systems that are full or read-only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.files import GrowingFile, cut_behind_rows, replace_file, replace_text
from support.launching import REPOSITORY, clean_environment

# Whole or old: replaces a file of 4 MB again and again; each content is one byte repeated.
REPLACER = """
import sys
from pathlib import Path
from pipeline.files import replace_file
for number in range(10**6):
    replace_file(Path(sys.argv[1]), lambda file: [file.write(bytes([number % 256]) * 4096) for _ in range(1024)])
    print(number, flush=True)
"""

# In a mount namespace of its own, with a file system of 1 MB that gets full, and is read-only for a while.
DISK = """
import json, os, subprocess, sys
from pathlib import Path
from pipeline.errors import UserError
from pipeline.files import GrowingFile, replace_text, write_error

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
said = {}

def attempt(name, action):
    try:
        action()
        said[name] = None
    except UserError as error:
        said[name] = str(error)
    except OSError as error:
        said[name] = str(write_error(Path(error.filename), error))

rows, whole = disk / "rows.jsonl", disk / "whole.txt"
replace_text(whole, "before")
file = GrowingFile(rows)
file.add(b"first\\n")
file.flush()
filler = open(disk / "filler", "wb", buffering=0)
try:
    while filler.write(bytes(4096)):
        pass
except OSError:
    pass
file.add(b"x" * 100_000 + b"\\n")
attempt("full, rows", file.flush)
attempt("full, whole", lambda: replace_text(whole, "y" * 100_000))
said["full, contents"] = [rows.read_text(), whole.read_text(), sorted(os.listdir(disk))]
os.ftruncate(filler.fileno(), 0)
filler.close()
file.add(b"second\\n")
attempt("space again", file.flush)
os.close(file._descriptor)  # the system makes nothing read-only that is open for writing
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
attempt("read-only, rows", lambda: GrowingFile(rows))
attempt("read-only, whole", lambda: replace_text(whole, "z"))
said["read-only, contents"] = [rows.read_text(), whole.read_text()]
print(json.dumps(said))
"""


def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """Guards against half a manifest or config after a kill in the middle of writing it."""
    path = tmp_path / "file"
    for delay in (0.0, 0.001, 0.003, 0.007, 0.013):
        command = [sys.executable, "-c", REPLACER, str(path)]
        with subprocess.Popen(command, env=clean_environment(PYTHONPATH=str(REPOSITORY)), stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert len(content) == 4096 * 1024 and len(set(content)) == 1


def test_a_writer_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    """Guards against a temporary file for each failure, and against an old file that is lost to it."""
    replace_text(tmp_path / "file", "before")

    def fail(file) -> None:
        file.write(b"half")
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        replace_file(tmp_path / "file", fail)
    assert (tmp_path / "file").read_text() == "before" and os.listdir(tmp_path) == ["file"]


def test_a_full_disk_and_a_read_only_one_are_named_and_harm_nothing(tmp_path: Path) -> None:
    """Guards against "writing a file: No space left on device", against half a row, and against an old file lost to a full disk."""
    command = ["unshare", "--mount", sys.executable, "-c", DISK, str(tmp_path)]
    if subprocess.run([*command[:2], "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    result = subprocess.run(command, env=clean_environment(PYTHONPATH=str(REPOSITORY)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    for name, file in (("full, rows", "rows.jsonl"), ("full, whole", "whole.txt")):
        assert (
            f"{file} cannot be written: its disk is full (0.0 MB free, No space left on device): free some space" in said[name]
        )
    assert said["full, contents"] == ["first\n", "before", ["filler", "rows.jsonl", "whole.txt"]]
    assert said["space again"] is None
    for name, file in (("read-only, rows", "rows.jsonl"), ("read-only, whole", "whole.txt")):
        assert f"{file} cannot be written (Read-only file system): see to its permissions and its file system" in said[name]
    whole_rows = (
        "first\n" + "x" * 100_000 + "\nsecond\n"
    )  # what the full disk refused was kept, and written when there was space
    assert said["read-only, contents"] == [whole_rows, "before"]


@pytest.mark.parametrize("fault", ["file removed", "file replaced", "folder removed", "folder moved"])
def test_rows_of_a_file_that_is_gone_are_not_lost_without_a_word(fault: str, tmp_path: Path) -> None:
    """Guards against a week of rows written into a file that has no name any more."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "rows"
    file = GrowingFile(path)
    file.add(b"first\n")
    file.flush(to_disk=True)
    if fault == "folder moved":
        folder.rename(tmp_path / "elsewhere")
    else:
        path.unlink()
    if fault == "file replaced":
        path.write_text("another's\n")
    if fault == "folder removed":
        folder.rmdir()
    file.add(b"second\n")
    with pytest.raises(UserError, match="folder/rows cannot be written: it, or its folder, was removed while the run went on"):
        file.flush()
    if fault == "file replaced":
        assert path.read_text() == "another's\n"


@pytest.mark.parametrize(
    "behind",
    [
        b"",
        b'{"a": 3',
        bytes(5000),
        b'{"a": 3' + bytes(100),
        bytes(5000) + b"\n",
        b'{"a"' + bytes(9) + b"\n\0\n",
        b'{"a": 3' + bytes(4096) + b'": 9}\n{"a": 10}\n',
    ],
)
def test_a_file_of_rows_is_cut_behind_the_last_whole_one(behind: bytes, tmp_path: Path) -> None:
    """Guards against a row that is joined to what a kill or a power failure has left before it, and against whole rows that are lost."""
    path = tmp_path / "rows.jsonl"
    cut_behind_rows(path)
    assert not path.exists()
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n' + behind)
    cut_behind_rows(path)
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'
    path.write_bytes(behind)
    cut_behind_rows(path)
    assert path.read_bytes() == b""
