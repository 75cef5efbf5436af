"""URLs of data: told from paths, and free of secrets."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.stores.place import RemotePath, parse_place, place_argument


def test_urls_and_paths_are_told_apart() -> None:
    """Guards against a bucket taken for a folder, whose name Path would shorten to one slash."""
    for url in ("s3://bucket/a/b", "gs://bucket", "az://container/x", "https://host:8443/x", "http://127.0.0.1:80/x"):
        place = parse_place(url + "/")
        assert isinstance(place, RemotePath) and str(place) == url
        assert str(place / "manifest.json") == f"{url}/manifest.json"
    for path in ("data/imagenet", "/data/s3:", "C:x"):
        assert parse_place(path) == Path(path)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "ftp://host/x",
            "ftp://host/x must be a folder, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or https://HOST/PATH, got the scheme 'ftp'",
        ),
        ("s3://", "s3:// must name a bucket"),
        ("https:///x", "https:///x must name a host"),
        ("s3:/bucket/x", "s3:/bucket/x must have two slashes after the scheme, got one"),
        ("http://example.org/x", "http://example.org/x must be encrypted"),
        ("https://me:SECRET@host/x", "https://host/x must not hold a user or a password"),
        ("https://me:SEC RET@host/x", "https://host/x must not hold a user or a password"),
        ("https://SECRET@host/x", "https://host/x must not hold a user or a password"),
        ("https://host/x?X-Amz-Signature=SECRET", "https://host/x must not have a query"),
        ("s3://bucket/x#SECRET", "s3://bucket/x must not have a query"),
        ("https://[SECRET/x", "is not a URL"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_sentence_without_its_secrets(url: str, sentence: str) -> None:
    """Guards against passwords and signatures in logs, in the configs of runs and on terminals."""
    with pytest.raises(UserError) as error:
        parse_place(url)
    assert sentence in str(error.value)
    if not url.startswith("https://["):
        assert "SECRET" not in str(error.value)
    with pytest.raises(argparse.ArgumentTypeError) as refused:  # argparse has a message of its own for a ValueError
        place_argument(url)
    assert str(refused.value) == str(error.value)
