"""S3 through s3fs: conditional writes, parallel multipart uploads, one client for all threads.

Retries are switched off in s3fs, botocore and aiohttp: `storage.objects.store` does them, in one
place, where a conditional write whose answer was lost can be told from one that another writer won.
"""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, cast

import fsspec.asyn
from aiobotocore.httpsession import AIOHTTPSession
from aiohttp import ClientSession

from storage.objects.backends import FsspecBackend, Range
from storage.objects.errors import retry
from storage.objects.usage import COUNTER

PART_BYTES = 16 * 2**20  # parts of a multipart upload; pieces of a long read
LONG_BYTES = 64 * PART_BYTES  # of a range; of a longer one the object's size is asked for first
UPLOADS = 4  # parts in flight; with PART_BYTES the memory of one upload
SINGLE_PUT_BYTES = 64 * 2**20  # larger objects go in parts
DELETE_BATCH = 1000  # keys of one DeleteObjects request, S3's limit
NOT_IMPLEMENTED = {400, 501}  # what endpoints without conditional writes answer to one
RETRYABLE_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}


class SingleSendSession(AIOHTTPSession):
    """The HTTP session: each request is sent once.

    aiohttp 3 sends a request again, once and unseen, when its connection breaks before the answer,
    and counts PUT among the requests for which that is harmless. A conditional PUT it is not: the
    first may have been carried out, the second then finds the object there, and a writer that won
    is told it lost. `storage.objects.store` tries again instead, and can tell the two cases apart.
    There is no switch for it: https://github.com/aio-libs/aiohttp/issues/10790
    """

    async def _get_session(self, proxy_url: str | None) -> ClientSession:
        session: ClientSession = await super()._get_session(proxy_url)
        session._retry_connection = False  # aiohttp has no public name for it
        return session


class S3Backend(FsspecBackend):
    """A bucket, or a prefix of one.

    The option conditional_writes = false is for endpoints that have none: `create` then looks
    before it writes, and `replace` compares before it does. Two processes can race in between, so
    only the run's lease, kept by the same means, keeps two flows on one run apart.
    """

    counts_requests = True

    def __init__(self, path: str, options: Mapping[str, object]) -> None:
        import s3fs

        settings: dict[str, Any] = dict(options)
        self.conditional = bool(settings.pop("conditional_writes", True))
        config = {
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 32,
            "http_session_cls": SingleSendSession,
        }
        config.update(settings.pop("config_kwargs", {}))
        fs = s3fs.S3FileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            max_concurrency=UPLOADS,
            config_kwargs=config,
            **settings,
        )
        fs.retries = 1
        fs.connect()  # here, once: s3fs makes its session on first use, in whichever thread
        fs.s3.meta.events.register("before-send.s3", _count)
        super().__init__(fs, path)
        self.bucket, _, self.prefix = self.root.partition("/")

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def read(self, key: str) -> bytes:
        data = self._get(key)[0]
        return super().read(key) if data is None else data  # in parallel pieces

    def _get(self, key: str) -> tuple[bytes | None, str]:
        """An object and its ETag by one request, where fsspec would make two; None: it is large."""

        async def get() -> tuple[bytes | None, str]:
            answer = await self.fs._call_s3("get_object", Bucket=self.bucket, Key=self._key(key))
            async with answer["Body"] as body:
                large = answer["ContentLength"] > PART_BYTES
                return None if large else await body.read(), answer["ETag"]

        data, etag = fsspec.asyn.sync(self.fs.loop, get)
        return data, etag

    def read_ranges(self, ranges: Sequence[Range]) -> list[memoryview | BaseException]:
        pieces: list[Range] = []
        owners: list[int] = []
        ranges = [self._within(part) if part[2] - part[1] > LONG_BYTES else part for part in ranges]
        for number, (key, start, stop) in enumerate(ranges):
            for at in range(start, max(stop, start + 1), PART_BYTES):
                pieces.append((key, at, min(at + PART_BYTES, stop)))
                owners.append(number)
        answers = [_past_the_end(part) for part in super().read_ranges(pieces)]
        parts: list[list[memoryview | BaseException]] = [[] for _ in ranges]
        for owner, part in zip(owners, answers, strict=True):
            parts[owner].append(part)
        return [_joined(group) for group in parts]

    def _within(self, part: Range) -> Range:
        """A long range cut off at the object's end: a manifest may say any number of bytes."""
        key, start, stop = part
        try:
            return key, start, min(stop, max(start, self.size(key)))
        except FileNotFoundError:  # which reading a byte of it says too
            return key, start, start + 1

    def size(self, key: str) -> int:
        return int(self._call("head_object", Key=self._key(key))["ContentLength"])

    def write(self, key: str, chunks: Sequence[memoryview]) -> None:
        self._put(key, chunks, {})

    def create(self, key: str, chunks: Sequence[memoryview]) -> None:
        if not self.conditional:
            self._create_unguarded(key, chunks)
            return
        try:
            self._put(key, chunks, {"IfNoneMatch": "*"})
        except OSError as error:
            if _status(error) == 412:
                raise FileExistsError(key) from error
            raise

    def _create_unguarded(self, key: str, chunks: Sequence[memoryview]) -> None:
        with self._lock:
            with contextlib.suppress(FileNotFoundError):
                self.size(key)
                raise FileExistsError(key)
            self._put(key, chunks, {})

    def _put(self, key: str, chunks: Sequence[memoryview], match: Mapping[str, str]) -> None:
        if sum(chunk.nbytes for chunk in chunks) <= SINGLE_PUT_BYTES:
            self._call("put_object", Key=self._key(key), Body=b"".join(chunks), **match)
            return
        with self._upload(key, match) as upload:
            for chunk in chunks:
                upload.write(chunk)

    def replace(self, key: str, data: bytes, expected: bytes) -> bool:
        if not self.conditional:
            return super().replace(key, data, expected)
        current, etag = self._get(key)
        if current != expected:
            return False
        try:
            self._call("put_object", Key=self._key(key), Body=data, IfMatch=etag)
        except OSError as error:
            if _status(error) == 412:
                return False
            raise
        return True

    def conditions_hold(self, key: str) -> bool:
        if not self.conditional:
            return True
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": f'"{"0" * 32}"'}):
            try:
                self._call("put_object", Key=self._key(key), Body=b"", **condition)
            except OSError as error:
                if _status(error) == 412:
                    continue
                if _status(error) not in NOT_IMPLEMENTED:
                    raise
            return False
        return True

    @contextlib.contextmanager
    def write_stream(self, key: str) -> Iterator[IO[bytes]]:
        with self._upload(key, {}) as upload:
            yield cast("IO[bytes]", upload)

    @contextlib.contextmanager
    def _upload(self, key: str, match: Mapping[str, str]) -> Iterator[_Upload]:
        with ThreadPoolExecutor(UPLOADS, thread_name_prefix="s3-upload") as pool:
            upload = _Upload(self, self._key(key), pool)
            try:
                yield upload
                upload.finish(match)
            except BaseException:
                upload.abort()
                raise

    def delete(self, keys: Sequence[str]) -> None:
        for at in range(0, len(keys), DELETE_BATCH):
            objects = [{"Key": self._key(key)} for key in keys[at : at + DELETE_BATCH]]
            answer = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            if answer.get("Errors"):
                first = answer["Errors"][0]
                raise OSError(f"{first.get('Key')}: {first.get('Message')}")

    def delete_unfinished(self, prefix: str) -> None:
        """Multipart uploads of writers that died, which the bucket's owner pays for."""
        uploads = self._call("list_multipart_uploads", Prefix=f"{self._key(prefix)}/")
        for upload in uploads.get("Uploads", []):
            with contextlib.suppress(FileNotFoundError):
                self._call("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])

    def transient(self, error: BaseException) -> bool:
        import aiohttp
        from botocore.exceptions import ConnectionError as BotoConnectionError
        from botocore.exceptions import HTTPClientError, IncompleteReadError
        from botocore.parsers import ResponseParserError
        from fsspec.exceptions import FSTimeoutError

        if _status(error) in RETRYABLE_STATUS:
            return True
        return isinstance(
            error,
            (
                ConnectionError,
                TimeoutError,
                FSTimeoutError,
                aiohttp.ClientError,
                BotoConnectionError,
                HTTPClientError,
                IncompleteReadError,
                ResponseParserError,
            ),
        )

    def _call(self, method: str, **kwargs: object) -> Any:
        from botocore.exceptions import NoCredentialsError, PartialCredentialsError

        try:
            return self.fs.call_s3(method, Bucket=self.bucket, **kwargs)
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise PermissionError(
                f"{error}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            ) from error

    def call_with_retries(self, method: str, **kwargs: object) -> Any:
        """For the parts of an upload: the whole of it should not start again."""
        what = f"{method} {self.root}"
        return retry(what, lambda _: self._call(method, **kwargs), self.transient)


class _Upload(io.RawIOBase):
    """A multipart upload: parts leave while more is written; the object appears at `finish`."""

    def __init__(self, backend: S3Backend, key: str, pool: ThreadPoolExecutor) -> None:
        super().__init__()
        self._backend = backend
        self._key = key
        self._pool = pool
        self._id: str | None = None
        self._buffer = bytearray()
        self._written = 0
        self._running: deque[tuple[int, Future[Any]]] = deque()
        self._parts: list[dict[str, object]] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        at = 0
        while at < view.nbytes:
            piece = view[at : at + PART_BYTES - len(self._buffer)]
            self._buffer += piece
            at += piece.nbytes
            if len(self._buffer) == PART_BYTES:
                self._send()
        self._written += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._written

    def _send(self) -> None:
        if self._id is None:
            answer = self._backend.call_with_retries("create_multipart_upload", Key=self._key)
            self._id = answer["UploadId"]
        if len(self._running) == UPLOADS:
            self._collect()
        number = len(self._parts) + len(self._running) + 1
        body, self._buffer = bytes(self._buffer), bytearray()
        future = self._pool.submit(
            self._backend.call_with_retries,
            "upload_part",
            Key=self._key,
            UploadId=self._id,
            PartNumber=number,
            Body=body,
        )
        self._running.append((number, future))

    def _collect(self) -> None:
        number, future = self._running.popleft()
        self._parts.append({"PartNumber": number, "ETag": future.result()["ETag"]})

    def finish(self, match: Mapping[str, str]) -> None:
        if self._id is None:
            body = bytes(self._buffer)
            self._backend.call_with_retries("put_object", Key=self._key, Body=body, **match)
            return
        if self._buffer:
            self._send()
        while self._running:
            self._collect()
        self._backend.call_with_retries(
            "complete_multipart_upload",
            Key=self._key,
            UploadId=self._id,
            MultipartUpload={"Parts": self._parts},
            **match,
        )

    def abort(self) -> None:
        for _, future in self._running:
            future.cancel()
            with contextlib.suppress(BaseException):
                future.result()
        if self._id is not None:
            with contextlib.suppress(OSError):  # the store's lifecycle rules remove what is left
                self._backend._call("abort_multipart_upload", Key=self._key, UploadId=self._id)


def _count(**_: object) -> None:
    """Called by botocore for each HTTP request that it sends."""
    COUNTER.add(requests=1)


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error that s3fs translated from botocore's."""
    from botocore.exceptions import ClientError

    for candidate in (error, error.__cause__):
        if isinstance(candidate, ClientError):
            return int(candidate.response["ResponseMetadata"]["HTTPStatusCode"])
    return None


def _past_the_end(part: memoryview | BaseException) -> memoryview | BaseException:
    """A range that starts after the object's last byte is empty, as it is in a local file."""
    if isinstance(part, BaseException) and _status(part) == 416:
        return memoryview(b"")
    return part


def _joined(parts: list[memoryview | BaseException]) -> memoryview | BaseException:
    views = []
    for part in parts:
        if isinstance(part, BaseException):
            return part
        views.append(part)
    return views[0] if len(views) == 1 else memoryview(bytearray().join(views))
