"""Copy a shard set into a store: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX.

    pervit upload-shards DIR URL

Every file is compared with DIR/manifest.json and uploaded as a whole; the manifest is last, so that a set that can be read is
complete. After an interruption, the same command continues with what is missing. Training reads the set with data.path=URL.

Examples:
    pervit upload-shards data/imagenet s3://bucket/imagenet
    pervit upload-shards data/imagenet gs://bucket/sets/imagenet
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError, counted
from pipeline.stores.place import Place, RemotePath, check_bucket, is_remote, parse_place, place_argument

if TYPE_CHECKING:
    from pipeline.shards.manifest import ShardManifest


def main() -> None:
    parser = command_parser("data_prep.upload_shards", __doc__)
    parser.add_argument("folder", help="the shard set: the folder that holds manifest.json")
    parser.add_argument("url", type=place_argument, help="where to copy it to")
    args = parser.parse_args()
    if is_remote(args.folder):
        raise UserError(
            f"the shard set must be in a folder, got the URL {args.folder}",
            "copy it with the store's own tool, or into a folder first",
        )
    upload(Path(args.folder), args.url)


def upload(folder: Path, url: Place | str) -> None:
    """Copy a shard set into a store.

    Args:
        folder: holds the set.
        url: of the store.

    Raises:
        UserError: the folder has no complete set, the place holds another one, or it cannot be written.
    """
    from tqdm import tqdm

    from data_prep.store_output import checked_size, put_file, told
    from pipeline.shards.manifest import MANIFEST, ShardManifest
    from pipeline.stores.store import Store

    place = parse_place(url)
    check_bucket(place)
    assert isinstance(place, RemotePath)
    manifest = ShardManifest.read(folder)
    content = (folder / MANIFEST).read_bytes()
    store = Store(place, probe="")
    with told(place, "read"):
        there = {name: size for name, (size, _) in store.objects().items()}
        present = bytes(store.fetch(MANIFEST).data) if MANIFEST in there else b""
    if present == content:
        print(f"{place} holds this set already, nothing was uploaded")
        return
    if present:
        raise UserError(f"{place} holds another shard set", "choose another URL, or remove what is there")
    if unfinished := [name for name in there if name.endswith("-in-progress")]:
        raise UserError(
            f"{place / unfinished[0]} says that a set is being written there by the sharder",
            "choose another URL, or remove what is there",
        )
    files = dict(_files(folder, manifest))

    def copy(name: str) -> int:
        path, sha256 = folder / name, files[name]
        size = checked_size(path, sha256)
        with told(place, "read", name):
            if there.get(name) == size and store.describe(name)[1] == sha256:
                return 0
        put_file(store, place, name, path, sha256)
        return size

    sent = kept = 0
    with tqdm(total=len(files), desc="uploading", unit=" files", disable=None) as bar:
        for part in _in_parts(sorted(files), 8):
            for result in store.threads.map(copy, part):
                if isinstance(result, BaseException):
                    raise result
                sent, kept = sent + result, kept + (result == 0)
                bar.update()
    with told(place, "written", MANIFEST):
        store.put(MANIFEST, content)
    again = f", {counted(kept, 'file')} kept from an earlier run" if kept else ""
    print(f"{place}: {counted(len(files) + 1, 'file')}, {(sent + len(content)) / 1e6:.1f} MB uploaded{again}")


def _files(folder: Path, manifest: ShardManifest) -> Iterator[tuple[str, str]]:
    """Name and SHA-256 of all files of a set but its manifest; empty for the lists, whose SHA-256 the manifest does not have."""
    from pipeline.shards.manifest import REENCODED, REJECTED

    for split in manifest.splits.values():
        yield split.samples_file, split.samples_sha256
        for shard in split.shards:
            yield shard.file, shard.sha256
            yield shard.idx_file, shard.idx_sha256
    for name in (REJECTED, REENCODED):
        if (folder / name).exists():
            yield name, ""


def _in_parts(names: list[str], size: int) -> Iterator[list[str]]:
    for first in range(0, len(names), size):
        yield names[first : first + size]


if __name__ == "__main__":
    run_command(main)
