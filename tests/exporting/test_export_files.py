"""Where exports go: complete or invisible, never over something else, with checksums that find damage."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.exporting import FORMATS, Format
from pipeline.exporting.placing import find_place, verify

ONNX, WEIGHTS = FORMATS["onnx"], FORMATS["safetensors"]
FOLDER = Format("tree", "none", None, "a folder")


def put(output: Path, form: Format = ONNX, text: str = "weights", force: bool = False) -> None:
    place, taken = find_place(output, form, force), force
    with place.staged(needed=1) as (hidden, path):
        if form.ending:
            path.write_text(text)
        else:
            (path / "parts").mkdir()
            (path / "parts" / "a.bin").write_text(text)
            (path / "config.json").write_text("{}")
        assert taken == (output.exists() and (not output.is_dir() or any(output.iterdir())))  # nothing is visible yet
        place.publish(hidden, "# card\n")


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_file_has_its_card_and_checksum_beside_it(tmp_path: Path) -> None:
    """Guards against an export that nobody can check, or whose checksum other tools do not read."""
    put(tmp_path / "m.onnx")
    assert names(tmp_path) == ["m.onnx", "m.onnx.md", "m.onnx.sha256"]
    subprocess.run(["sha256sum", "--check", "--strict", "m.onnx.sha256"], cwd=tmp_path, check=True)
    for path in ("m.onnx", "m.onnx.sha256"):
        assert verify(tmp_path / path) == []


@pytest.mark.parametrize(
    ("form", "expected"),
    [(ONNX, ["README.md", "SHA256SUMS", "model.onnx"]), (FOLDER, ["README.md", "SHA256SUMS", "config.json", "parts/a.bin"])],
)
def test_a_folder_holds_everything(form: Format, expected: list[str], tmp_path: Path) -> None:
    """Guards against a folder that cannot be uploaded as it is; and its card may be completed."""
    put(tmp_path / "m", form)
    assert names(tmp_path / "m") == expected
    (tmp_path / "m" / "README.md").write_text("# card\nLicence: MIT\n")
    assert verify(tmp_path / "m") == verify(tmp_path / "m" / "SHA256SUMS") == []


def test_damage_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a check that passes whatever is there."""
    put(tmp_path / "m", FOLDER)
    (tmp_path / "m" / "parts" / "a.bin").write_text("weightz")
    (tmp_path / "m" / "config.json").unlink()
    changed, missing = sorted(verify(tmp_path / "m"), key=lambda sentence: "missing" in sentence)
    assert "a.bin was changed after it was written" in changed and "config.json is missing" in missing
    assert capsys.readouterr().out == ""
    sums = tmp_path / "m" / "SHA256SUMS"
    for text, expected in (
        ("", "must have a line per file"),
        ("0123  x\n", "line 1 must be"),
        (f"{'0' * 64}  ../../x\n", "line 1 must be"),
    ):
        sums.write_text(text)
        with pytest.raises(UserError, match=expected):
            verify(tmp_path / "m")
    sums.unlink()
    with pytest.raises(UserError, match="m has no checksum: .*SHA256SUMS does not exist"):
        verify(tmp_path / "m")
    with pytest.raises(UserError, match="nowhere does not exist"):
        verify(tmp_path / "nowhere")


def test_force_replaces_exports_alone(tmp_path: Path) -> None:
    """Guards against --force that removes a folder of somebody's, and an export that is half the former one."""
    for output, form in ((tmp_path / "m.onnx", ONNX), (tmp_path / "m", FOLDER)):
        put(output, form)
        with pytest.raises(UserError, match="exists: choose another --output, or add --force to replace it"):
            put(output, form)
        put(output, form, "other weights", force=True)
        assert verify(output) == []
    mine = tmp_path / "m" / "notes.txt"
    mine.write_text("mine")
    with pytest.raises(UserError, match="--force must find an export alone in .*m, got notes.txt beside it"):
        put(tmp_path / "m", FOLDER, force=True)
    assert mine.exists()
    (tmp_path / "empty").mkdir()
    put(tmp_path / "empty", FOLDER)  # a folder that was made for it


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    """Guards against half an export under its name, and hidden files that stay."""
    put(tmp_path / "m.onnx")
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    place = find_place(tmp_path / "m.onnx", ONNX, force=True)
    with pytest.raises(RuntimeError), place.staged(needed=1) as (_, path):
        path.write_text("half")
        raise RuntimeError
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
    with pytest.raises(OSError, match="No space left"), place.staged(needed=2**60):
        raise AssertionError


@pytest.mark.parametrize(
    ("output", "form", "expected"),
    [
        (
            "m.safetensors",
            ONNX,
            "--output must be a .onnx file or a folder for --format onnx, got .*m.safetensors: change it, or pass --format safe",
        ),
        ("m.onnx", FOLDER, "--output must be a folder for --format tree, got"),
        ("nowhere/m.onnx", ONNX, "the folder .*/nowhere does not exist or cannot be written"),
        ("nowhere/m", WEIGHTS, "the folder .*/nowhere does not exist or cannot be written"),
        ("taken", ONNX, "--output must be a folder, got the file"),
        ("folder.onnx", ONNX, "folder.onnx must be a file, got a folder"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(output: str, form: Format, expected: str, tmp_path: Path) -> None:
    """Guards against minutes of work before the output turns out to be none."""
    (tmp_path / "taken").touch()
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(UserError, match=expected) as error:
        find_place(tmp_path / output, form, force=False)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    """Guards against a traceback where the output cannot be written."""
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        find_place(tmp_path / "m.onnx", ONNX, force=False)
