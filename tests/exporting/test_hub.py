"""An export is pushed to the Hugging Face hub, here a local server that speaks its protocol."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import export
from pipeline.errors import UserError
from pipeline.exporting.placing import check_hub, push
from support.fake_hub import FakeHub
from support.launching import REPOSITORY
from support.small_model import write_model

constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub (extra `hub`) is not installed")


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A token, no other login, and uploads over HTTP: the other protocol's client is a binary that needs its own server."""
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """An export of three files."""
    contents = {
        "README.md": b"# A model\n",
        "model.safetensors": bytes(range(256)) * 64,
        "SHA256SUMS": b"abc  model.safetensors\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in contents}


def test_one_commit_has_weights_card_and_checksum(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against weights without their card, and against a token that is left out or sent elsewhere."""
    with FakeHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        url = push(files, "a-model", "PerViT-T, step 7", private=True)
    assert hub.repositories == {"someone/a-model": {name: path.read_bytes() for name, path in files.items()}}
    assert [commit["summary"] for commit in hub.commits] == ["PerViT-T, step 7"]
    assert url == f"{hub.endpoint}/someone/a-model/commit/{'c' * 40}"
    asked = [path for _, path, _ in hub.requests]
    assert [asked.count(path) for path in ("/api/repos/create", "/api/models/someone/a-model/commit/main")] == [1, 1]
    assert any(path.startswith("/large/") for path in asked)
    assert all(token == "Bearer hf_secret" for _, path, token in hub.requests if path.startswith("/api/"))


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        ({"create": (401, "Invalid credentials")}, "the hub refuses the token (401, Invalid credentials"),
        ({"create": (403, "You don't have the rights")}, "the hub refuses the token (403, "),
        ({"commit": (412, "A commit has happened since")}, "the hub refuses (412, A commit has happened since"),
        ({"large": (400, "quota exceeded")}, "the hub refuses (400, "),
    ],
    ids=["token", "rights", "commit", "upload"],
)
def test_a_refusal_is_one_sentence(refuse: dict, said: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of the library, and against the belief that nothing was exported."""
    with FakeHub(refuse) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        with pytest.raises(UserError) as error:
            push(files, "a-model", "a message")
    assert said in str(error.value) and "--push-to-hub a-model" in str(error.value)
    assert "the export itself is written" in str(error.value) and "\n" not in str(error.value)
    assert not hub.commits


def test_a_hub_that_is_not_there(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub() as hub:
        endpoint = hub.endpoint
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UserError, match=rf"the hub at {endpoint} is not reached \(.*the export itself is written") as error:
        push(files, "a-model", "a message")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("output", ["model.safetensors", "folder"])
def test_the_command_exports_and_pushes(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Guards against a pushed file without its card and checksum, and a card under the name that it has beside a file."""
    source = write_model(tmp_path / "source.safetensors", ["cat", "dog"])
    arguments = [source, "--format", "safetensors", "--output", tmp_path / output, "--push-to-hub", "a-model"]
    monkeypatch.setattr(sys, "argv", ["pipeline.export", *map(str, arguments)])
    with FakeHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert export.main() == 0
    written = (
        {path.name: path.read_bytes() for path in (tmp_path / output).iterdir()}
        if output == "folder"
        else {
            "README.md": (tmp_path / "model.safetensors.md").read_bytes(),
            "model.safetensors": (tmp_path / output).read_bytes(),
            "model.safetensors.sha256": (tmp_path / "model.safetensors.sha256").read_bytes(),
        }
    )
    assert len(written) == 3 and hub.repositories == {"someone/a-model": written}
    assert [commit["summary"] for commit in hub.commits] == ["pervit_t, safetensors, step 0"]
    assert f"pushed: {hub.endpoint}/someone/a-model/commit/" in capsys.readouterr().out


def test_a_missing_token_and_a_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both before anything is exported."""
    with pytest.raises(UserError, match="--push-to-hub must be NAME or OWNER/NAME .*, got 'a model'"):
        check_hub("a model")
    with pytest.raises(UserError, match="--push-to-hub must be NAME or OWNER/NAME.*, got 'a/b/c'"):
        check_hub("a/b/c")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="requires a token of the Hugging Face hub, got none: set HF_TOKEN"):
        check_hub("a-model")


def test_timm_loads_what_was_pushed(tmp_path: Path) -> None:
    """From the fake hub, through timm's own download; guards against a layout that only local folders have."""
    pytest.importorskip("timm", reason="timm is not installed")
    from support.timm_folders import export_small

    folder = export_small("convit_ti", tmp_path / "folder")
    with FakeHub() as hub:
        hub.repositories["someone/small"] = {path.name: path.read_bytes() for path in folder.iterdir()}
        code = "import sys, timm; model = timm.create_model('hf-hub:someone/small', pretrained=True, cache_dir=sys.argv[1])\nprint(model.pretrained_cfg['label_names'])"
        environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "PATH": "/usr/bin",
            "HF_HOME": str(tmp_path / "home"),
        }
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "cache")],
            env=environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([*"abcde"])
