"""The HTTP session of S3: each request is sent once. Needs the package s3fs.

aiohttp 3 sends a request again, once and unseen, when its connection breaks before the answer, and
counts PUT among the requests for which that is harmless. A conditional PUT it is not: the first may
have been carried out, the second then finds the object there, and a writer that won is told it lost.
"""

from __future__ import annotations

from aiobotocore.httpsession import AIOHTTPSession
from aiohttp import ClientSession


class SingleSendSession(AIOHTTPSession):
    """Leaves what to try again to `storage.objects.store`, which can tell the two cases apart."""

    async def _get_session(self, proxy_url: str | None) -> ClientSession:
        session: ClientSession = await super()._get_session(proxy_url)
        session._retry_connection = False  # aiohttp has no public name for it
        return session
