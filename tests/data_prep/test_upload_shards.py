"""A shard set in a store is complete or cannot be read; an interrupted upload goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

from data_prep.upload_shards import upload
from pipeline.errors import UserError
from pipeline.shards.shard_set import ShardSet
from pipeline.stores import store
from support.http_proxy import Fault, HttpProxy, Request
from support.stores import BUCKET, s3_server

URL = f"s3://{BUCKET}/digits"


def test_an_interrupted_upload_goes_on(
    copied_shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against half a set that can be read, and against uploading terabytes again."""
    monkeypatch.setattr(store, "PATIENCE", 0.5)
    refused = True

    def refuse(request: Request) -> Fault | None:
        return Fault(status=403) if refused and request.method == "PUT" and "train-000002.tar" in request.path else None

    with s3_server(monkeypatch) as port, HttpProxy(port, 0, refuse) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(UserError, match="s3://bucket/digits refuses access"):
            upload(copied_shards, URL)
        with pytest.raises(UserError, match="manifest.json is missing"):
            ShardSet(URL, "train")
        refused, before = False, len(proxy.requests)
        upload(copied_shards, URL)
        written = [request.path for request in proxy.requests[before:] if request.method == "PUT"]
        assert 0 < len(written) < 8 and written[-1].endswith("manifest.json")  # of 13
        assert "kept from an earlier run" in capsys.readouterr().out
        remote, local = ShardSet(URL, "val"), ShardSet(copied_shards, "val")
        assert remote.identity() == local.identity()
        assert all((remote.read(index) == local.read(index)).all() for index in (0, 17, 358))
        upload(copied_shards, URL)
        assert "holds this set already" in capsys.readouterr().out
        manifest = copied_shards / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"version"', ' "version"'))
        with pytest.raises(UserError, match="s3://bucket/digits holds another shard set"):
            upload(copied_shards, URL)
        (copied_shards / "val-000000.tar").write_bytes(b"x")
        with pytest.raises(UserError, match="val-000000.tar was changed after it was written"):
            upload(copied_shards, f"s3://{BUCKET}/other")


def test_a_web_server_is_not_written_to(copied_shards: Path) -> None:
    """Guards against a traceback for a URL that can only be read."""
    with pytest.raises(UserError, match=r"the URL must be s3://BUCKET/PREFIX, gs:// or az://, got https://host/x"):
        upload(copied_shards, "https://host/x")


@pytest.mark.parametrize("use", [upload, lambda folder, url: ShardSet(url, "train")], ids=["writing", "reading"])
def test_a_bucket_that_does_not_exist(
    use: Callable[[Path, str], object], copied_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against ten minutes of tries for a mistyped name, and against looking for a manifest in it."""
    with (
        s3_server(monkeypatch),
        pytest.raises(UserError, match="^s3://bukket/x cannot be opened: bukket does not exist: create it"),
    ):
        use(copied_shards, "s3://bukket/x")
