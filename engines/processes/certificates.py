"""TLS between flow, scheduler and workers: which certificates, and how Dask is told.

Dask is imported late: the node process sets Dask's settings first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from configs.cluster import NoTls, TemporaryTls, Tls

if TYPE_CHECKING:
    from distributed import Security


class Certificates(BaseModel):
    """One certificate for every process of a cluster: paths of PEM files, or the PEM text itself."""

    model_config = ConfigDict(frozen=True)

    ca: str  # of the authority that signed it
    cert: str
    key: str = Field(repr=False)

    def security(self) -> Security:
        """As Dask takes it, for every role."""
        from distributed import Security

        return Security(
            require_encryption=True,
            tls_ca_file=self.ca,
            tls_client_cert=self.cert,
            tls_client_key=self.key,
            tls_scheduler_cert=self.cert,
            tls_scheduler_key=self.key,
            tls_worker_cert=self.cert,
            tls_worker_key=self.key,
        )

    def as_files(self, folder: Path) -> Certificates:
        """The same as files that only this user can read."""
        if "\n" not in self.key:
            return self
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        paths = {}
        for name, text in (("ca", self.ca), ("cert", self.cert), ("key", self.key)):
            paths[name] = str(folder / f"{name}.pem")
            descriptor = os.open(paths[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                file.write(text)
        return Certificates(**paths)


def certificates_for(tls: Tls) -> Certificates | None:
    """The certificates that the settings ask for; ValueError when a file of them is missing."""
    if isinstance(tls, NoTls):
        return None
    if isinstance(tls, TemporaryTls):
        from distributed import Security

        made = Security.temporary()
        return Certificates(ca=made.tls_ca_file, cert=made.tls_client_cert, key=made.tls_client_key)
    files = {"ca_file": tls.ca_file, "cert": tls.cert, "key": tls.key}
    for name, path in files.items():
        if not Path(path).is_file():
            raise ValueError(f"cluster.tls.{name} = {path} is no file. Set it to a PEM file.")
    return Certificates(
        ca=os.path.abspath(tls.ca_file),
        cert=os.path.abspath(tls.cert),
        key=os.path.abspath(tls.key),
    )
