"""Which backend keeps a store, by the scheme of its address."""

from __future__ import annotations

from collections.abc import Mapping

from storage.objects.backends import Backend, FsspecBackend, LocalBackend
from storage.objects.errors import StoreError


def open_backend(uri: str, options: Mapping[str, object]) -> Backend:
    """The backend of a store address. The caller keeps one per process and address."""
    protocol, _, path = uri.partition("://")
    if protocol == "file":
        return LocalBackend(path)
    if protocol in ("s3", "s3a"):
        from storage.objects.s3 import S3Backend

        try:
            return S3Backend(path, options)
        except ImportError as error:
            raise StoreError(
                f"{uri} needs the package s3fs. Install it: pip install 'refrain-rl[s3]'."
            ) from error
    import fsspec

    # fsspec keeps one instance per thread; a store is used from many threads and wants one.
    fs = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    return FsspecBackend(fs, fs._strip_protocol(uri))
