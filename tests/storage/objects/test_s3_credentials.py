"""An S3 store without credentials is one sentence, before anything is asked of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.objects.store import Store, StoreError


def test_a_store_without_credentials_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/none")
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/none")
    with pytest.raises(StoreError, match="cannot be written: .*credentials.* AWS_ACCESS_KEY_ID"):
        Store("s3://bucket/runs", {"endpoint_url": "http://127.0.0.1:9"}).check_writable()
