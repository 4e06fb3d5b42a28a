"""The keys of a trial federation: a certificate authority, the server's certificate, and a key pair for every site."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hansa.core.errors import HansaError
from hansa.runs.store import io

AUTHORITY_NAME, DAYS = "Hansa trial authority", 365
LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Keys:
    """A folder of keys. That of a site has ``ca.crt``, the authority's certificate, and ``node.key``; that of the
    server has ``ca.crt``, ``server.crt``, ``server.key`` and the sites' public keys."""

    folder: Path

    def path(self, name: str) -> Path:
        """Return the path of a file of the folder."""
        path = self.folder.absolute() / name
        if not path.is_file():
            raise HansaError(f"{path}: no such file. Create the keys of a trial federation with `hansa keys`.")
        return path

    def private_key(self) -> Any:
        """Return the private key of the site."""
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key

        path = self.path("node.key")
        try:
            return load_ssh_private_key(path.read_bytes(), None)
        except Exception as error:  # cryptography has many: no key, another format, a passphrase
            raise HansaError(f"{path}: is not a private key of OpenSSH without a passphrase ({error}).") from error

    def public_key(self, site: str) -> Any:
        """Return the public key of a site."""
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        path = self.path(f"sites/{site}.pub")
        try:
            return load_ssh_public_key(path.read_bytes())
        except ValueError as error:
            raise HansaError(f"{path}: is not a public key of OpenSSH ({error}).") from error


def trial_key(site: str) -> Any:
    """Return the private key of a site in trials without keys: everybody can compute it from the name."""
    from cryptography.hazmat.primitives.asymmetric import ec

    number = int.from_bytes(hashlib.sha384(f"hansa trial {site}".encode()).digest()) >> 8
    return ec.derive_private_key(number + 1, ec.SECP384R1())


def make_keys(folder: Path | str, sites: Sequence[str], hosts: Sequence[str] = LOOPBACK) -> list[Path]:
    """Write the keys of a trial federation: a folder for the server, one per site, and the authority's own key.

    The caller has all private keys. In production each site creates its own pair and sends the public key.

    Args:
        folder: A new or empty folder.
        sites: The names of the sites.
        hosts: The names and addresses of the server. localhost and 127.0.0.1, where the server connects to its own
            SuperLink, are always added.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise HansaError("keys need cryptography, which Flower installs: pip install 'hansa[flower]'.") from error
    home = Path(folder)
    hosts = list(dict.fromkeys([*hosts, *LOOPBACK]))
    for name in sites:
        if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name == "server":
            raise HansaError(f"site {name!r}: expected letters, digits, dots and dashes, and not 'server'.")
    if home.exists() and any(home.iterdir()):
        raise HansaError(f"{home}: is not empty, and existing keys are not overwritten. Name a new folder.")
    pem, openssh = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
    unlocked, now = serialization.NoEncryption(), datetime.datetime.now(datetime.UTC)

    def certificate(subject: str, key: Any, issuer_key: Any, *extensions: tuple[Any, bool]) -> bytes:
        owner, issuer = (
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (subject, AUTHORITY_NAME)
        )
        builder = x509.CertificateBuilder().subject_name(owner).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=DAYS))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return bytes(builder.sign(issuer_key, hashes.SHA384()).public_bytes(pem))

    authority_key, server_key, *site_keys = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2 + len(sites)))
    authority = certificate(
        AUTHORITY_NAME, authority_key, authority_key,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.KeyUsage(True, False, False, False, False, True, True, False, False), True),
        (x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), False),
    )  # fmt: skip
    server = certificate(
        hosts[0], server_key, authority_key,
        (x509.SubjectAlternativeName([_host(host, x509) for host in hosts]), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
    )  # fmt: skip
    private = serialization.PrivateFormat
    files = {
        "ca.key": authority_key.private_bytes(pem, private.PKCS8, unlocked),
        "server/ca.crt": authority,
        "server/server.crt": server,
        "server/server.key": server_key.private_bytes(pem, private.PKCS8, unlocked),
    }
    for name, key in zip(sites, site_keys, strict=True):
        public = key.public_key().public_bytes(openssh, serialization.PublicFormat.OpenSSH) + b"\n"
        files[f"{name}/ca.crt"] = authority
        files[f"{name}/node.key"] = key.private_bytes(pem, private.OpenSSH, unlocked)
        files[f"{name}/node.pub"] = files[f"server/sites/{name}.pub"] = public
    for name, data in files.items():
        path = home / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        io.write_file(path, data)
        path.chmod(0o600)
    return [home / name for name in files]


def _host(text: str, x509: Any) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)
