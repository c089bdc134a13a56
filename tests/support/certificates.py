"""A root certificate authority, and what it signed: a server and clients."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtc.runtime.client import ClientTls
from trtc.runtime.wire.tls import ServerTls


@dataclass(frozen=True)
class Certificates:
    """PEM files for 127.0.0.1."""

    folder: Path

    @property
    def trusting(self) -> ClientTls:
        """A client that shows no certificate."""
        return ClientTls(ca=self.folder / "ca.pem")

    def client(self, name: str = "client") -> ClientTls:
        return ClientTls(
            self.folder / "ca.pem", self.folder / f"{name}.pem", self.folder / f"{name}.key"
        )

    def server(self, *, mutual: bool) -> ServerTls:
        ca = self.folder / "ca.pem" if mutual else None
        return ServerTls(self.folder / "server.pem", self.folder / "server.key", ca)


def make_certificates(
    folder: Path, clients: Sequence[str] = ("client",), subjects: Mapping[str, str] | None = None
) -> Certificates:
    """Sign a server's certificate, and one for each client, with its name in the subject, unless
    `subjects` has another. All have a URI, and the server an address."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=root")
    for name in ("server", *clients):
        subject = (subjects or {}).get(name, f"/O=trtc/CN={name}")
        request = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-utf8", "-subj", subject)
        openssl("req", *key, *request)
        other = "IP:127.0.0.1" if name == "server" else f"URI:spiffe://trtc/{name}"
        (folder / "san").write_text(f"subjectAltName={other}\n")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-out", f"{name}.pem", "-extfile", "san",
        )  # fmt: skip
    return Certificates(folder)
