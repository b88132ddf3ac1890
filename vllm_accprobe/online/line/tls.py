"""Who may speak with whom: certificates on both sides, or nobody but this machine.

The problem: captured tensors are users' prompts, and a receiver that takes anything from anybody is a hole. The idea:
Python's own TLS, at least 1.2, where each side shows a certificate that the same ca.crt signed, and the sender checks
that the receiver's is for the host that it called. Without a folder of certificates the line is plain, and then both
ends must be this machine. Not here: connections (receiver.py, sender.py).
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from pathlib import Path

CA = "ca.crt"
SERVER, CLIENT = "server", "client"
_ALERTS = {
    "CERTIFICATE_REQUIRED": "it showed no certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it showed no certificate",
    "CERTIFICATE_EXPIRED": "its certificate has expired", "UNKNOWN_CA": "its certificate is not signed by this ca.crt",
    "BAD_CERTIFICATE": "its certificate is not accepted", "CERTIFICATE_UNKNOWN": "its certificate is not accepted",
    "HTTP_REQUEST": "it speaks HTTP, not TLS", "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it speaks no TLS from 1.2 on", "UNEXPECTED_EOF": "it closed the line",
    "HTTPS_PROXY_REQUEST": "it speaks HTTP, not TLS", "UNSUPPORTED_CERTIFICATE": "its certificate is for another use",
}  # fmt: skip


class TlsError(Exception):
    """One line: what is wrong with the certificates here, or with the other side's."""


def context(folder: Path, side: str) -> ssl.SSLContext:
    """folder: has ca.crt and SIDE.crt, SIDE.key; side: SERVER or CLIENT. Raises TlsError."""
    names = [folder / name for name in (CA, f"{side}.crt", f"{side}.key")]
    missing = [path.name for path in names if not path.is_file()]
    if missing:
        more = " (msprobe's server.key and server.crt alone hide the line, and prove to nobody who is there)"
        raise TlsError(f"{folder} has no {', no '.join(missing)}: docs/online.md tells how to make them"
                       f"{more if CA in missing or side == CLIENT else ''}")  # fmt: skip
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == SERVER else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.verify_mode = ssl.CERT_REQUIRED  # of the client, too; the client's context checks the host's name besides
    ca, crt, key = map(str, names)
    pair = f"{side}.crt and {side}.key", lambda: made.load_cert_chain(crt, key, password=lambda: "")
    for what, load in ((CA, lambda: made.load_verify_locations(ca)), pair):
        try:
            load()
        except (ssl.SSLError, OSError, ValueError, TypeError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise TlsError(f"{folder}: {what} cannot be used: {str(reason).lower().replace('_', ' ')}") from None
    return made


def told(error: Exception) -> str:
    """Why a handshake failed, or a line that had just begun, in words of the one who was refused or refuses."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate refused: {error.verify_message.rstrip('.')}"
    if isinstance(error, TimeoutError):
        return "no handshake in time"
    reason = str(getattr(error, "reason", "") or "")
    for word, said in _ALERTS.items():
        if word in reason:
            return said
    return reason.lower().replace("_", " ") or str(getattr(error, "strerror", None) or error or "it closed the line")


def is_refusal(error: Exception) -> bool:
    """Whether the other side's TLS refused this one's certificate: trying again would not help."""
    return isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in str(getattr(error, "reason", ""))


def require_loopback(host: str, what: str) -> None:
    """Raises TlsError where ``host`` is not this machine alone."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise TlsError(f"{what} {host}: {getattr(error, 'strerror', None) or error}") from None
    if not all(ipaddress.ip_address(str(a).partition("%")[0]).is_loopback for a in found):
        raise TlsError(f"{what} {host} is not this machine, and without certificates nothing goes over a network: name "
                       "their folder with --tls (msprobe's tls_path)")  # fmt: skip
