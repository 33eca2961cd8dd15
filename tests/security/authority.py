"""Certificates as an operator would make them: one authority, and a certificate for each process that it signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from biphase.rpc.tls import Tls

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Issued:
    """Paths of a certificate and its key."""

    cert: str
    key: str

    def tls(self, ca: str, name: str = "biphase") -> Tls:
        return Tls.read(self.cert, self.key, ca, name)

    def flags(self, ca: str) -> tuple[str, ...]:
        return ("--tls-cert", self.cert, "--tls-key", self.key, "--tls-ca", ca)


class Authority:
    """Its own key and certificate in `folder`, and what it issues beside them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.ca = str(folder / "ca.crt")
        self._openssl("req", "-x509", *_KEY, "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt")

    def issue(self, name: str, san: str = "DNS:biphase", *, days: int = 2) -> Issued:
        (self._folder / f"{name}.ext").write_text(f"subjectAltName={san}\n")
        self._openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        self._openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days",
            str(days), "-extfile", f"{name}.ext", "-out", f"{name}.crt",
        )  # fmt: skip
        return Issued(str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key"))

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)
