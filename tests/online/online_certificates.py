"""Certificates made on the spot: an authority, a server's for a name, a client's; good, expired or another's."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """Signs; ``folder`` writes what one side needs."""

    def __init__(self, name: str = "an authority") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = _name(name)
        now = datetime.datetime.now(datetime.timezone.utc)
        self.certificate = (
            x509.CertificateBuilder().subject_name(self.name).issuer_name(self.name).public_key(self.key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - 9 * DAY).not_valid_after(now + 9 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )  # fmt: skip

    def folder(
        self, where: Path, side: str, *, names: tuple[str, ...] = ("localhost", "127.0.0.1"), expired: bool = False,
        trusts: Authority | None = None,
    ) -> Path:  # fmt: skip
        """ca.crt (of ``trusts``, itself by default), SIDE.crt and SIDE.key in ``where``."""
        where.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.timezone.utc)
        first, last = (now - 3 * DAY, now - DAY) if expired else (now - DAY, now + 3 * DAY)
        use = ExtendedKeyUsageOID.SERVER_AUTH if side == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
        made = (
            x509.CertificateBuilder().subject_name(_name(side)).issuer_name(self.name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(first).not_valid_after(last)
            .add_extension(x509.SubjectAlternativeName([_alternative(n) for n in names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )  # fmt: skip
        pem = serialization.Encoding.PEM
        (where / "ca.crt").write_bytes((trusts or self).certificate.public_bytes(pem))
        (where / f"{side}.crt").write_bytes(made.public_bytes(pem))
        (where / f"{side}.key").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return where


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
