"""The certificates of one run: an authority of its own, and credentials that bind a key to a name within the run.

Credentials travel to a host over the channel of the engine that starts it (standard input of ssh, of a Slurm step).
`cryptography` comes with the extra `hosts`.
"""

import datetime
import os
import ssl
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import msgspec

from argosy.core import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

HEAD = "head"
"""The name of the agent that heads the run."""
LIFE_DAYS = 400.0
EARLY = datetime.timedelta(hours=1)
"""Clocks of hosts differ."""


class Credentials(msgspec.Struct, frozen=True):
    """What proves to others of a run who one is. PEM texts; the key is secret."""

    run: str
    name: str
    certificate: str
    key: str
    authority: str


class RunAuthority(msgspec.Struct, frozen=True):
    """Issues the credentials of one run. Its key is secret."""

    run: str
    certificate: str
    key: str

    def issue(self, name: str, *, life_days: float = LIFE_DAYS) -> Credentials:
        """Credentials for a member; only those of `HEAD` can serve, only the others can connect to it."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        authority = x509.load_pem_x509_certificate(self.certificate.encode())
        signer = serialization.load_pem_private_key(self.key.encode(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        usage = ExtendedKeyUsageOID.SERVER_AUTH if name == HEAD else ExtendedKeyUsageOID.CLIENT_AUTH
        certificate = (
            _builder(f"argosy {self.run}", authority.subject, life_days)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(_uri(self.run, name))]), critical=False
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
            .sign(signer, hashes.SHA256())
        )
        return Credentials(self.run, name, _pem(certificate), _key_pem(key), self.certificate)


def create_authority(run: str) -> RunAuthority:
    """Make the authority of a run.

    Raises:
        ConfigError: `cryptography` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise ConfigError("runs on several hosts need `cryptography`", hint="pip install cryptography") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"argosy {os.urandom(4).hex()} {run}"
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, subject, LIFE_DAYS)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return RunAuthority(run, _pem(certificate), _key_pem(key))


def tls_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS 1.3 with certificates on both sides, for the server if these are the head's credentials."""
    server = credentials.name == HEAD
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # `member_name` checks the name, which is no host name.
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.authority)
    fd = os.memfd_create("argosy-credentials", os.MFD_CLOEXEC)
    try:  # ssl reads files only.
        os.write(fd, (credentials.certificate + credentials.key).encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    if server:
        context.num_tickets = 0
    return context


def member_name(connection: ssl.SSLSocket, run: str) -> str | None:
    """The name in the run that the peer's certificate is bound to; None if it has none. Call it after the handshake."""
    alternatives = (connection.getpeercert() or {}).get("subjectAltName", ())
    prefix = _uri(run, "")
    for entry in alternatives:
        kind, value = str(entry[0]), str(entry[1])
        if kind == "URI" and value.startswith(prefix) and len(alternatives) == 1:
            return unquote(value.removeprefix(prefix))
    return None


def _uri(run: str, name: str) -> str:
    return f"argosy://{quote(run, safe='')}/{quote(name, safe='')}"


def _builder(name: str, issuer: "x509.Name", life_days: float) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])]))
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + datetime.timedelta(days=life_days))
    )


def _pem(certificate: "x509.Certificate") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()


def _key_pem(key: "ec.EllipticCurvePrivateKey") -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
