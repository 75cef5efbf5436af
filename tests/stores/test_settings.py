"""Settings of stores in the environment."""

from __future__ import annotations

import pytest

from pipeline.errors import UserError
from pipeline.stores.opening import check_settings
from pipeline.stores.place import RemotePath


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1:9000", "http://", "http://h:99999", "http://h:x", "http://a b", "ftp://h"]
)
def test_an_address_that_is_none_is_one_sentence(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the client library, which panics with a stack of Rust's."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(UserError, match="^AWS_ENDPOINT_URL must be the address of a store, https://HOST or"):
        check_settings(RemotePath("s3://bucket/set"))
    check_settings(RemotePath("gs://bucket/set"))  # which it is not for


@pytest.mark.parametrize(
    "address", ["", "https://store.example", "http://127.0.0.1:9000", "http://[::1]:9000/path", "https://a_b.c:443/"]
)
def test_an_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an address of a store that is refused."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    check_settings(RemotePath("s3://bucket/set"))
