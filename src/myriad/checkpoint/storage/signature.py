"""``signature.json``: who made the files of a folder. Without torch.

    {"format": "myriad-signature-1", "algorithm": "ed25519" or "hmac-sha256", "key": KEY_ID,
     "files": {NAME: {"bytes", "sha256"}, ...},              every file of the folder but this one
     "signature": over all of that, as canonical JSON}

The hashes of a manifest find damage, not forgery: who changes a file can write a manifest that fits. A
signature proves that the files are those of who has the key. An Ed25519 key is for published weights, as a
reader needs the public part alone; a secret is for the machines of one group. A file that is not signed, is
missing or differs is a problem, so nothing can be added beside signed files.
"""

import hashlib
import hmac
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.checkpoint.format.checkpoint_manifest import MANIFEST
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint, open_checkpoint
from myriad.checkpoint.storage.storage_backends import LocalStorage
from myriad.errors import BadInputError
from myriad.system.whole_file import parse_json, read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = [
    "SIGNATURE",
    "SignatureKey",
    "check_signature",
    "is_signed_export",
    "load_key",
    "load_signing_key",
    "parse_signature",
    "require_signature",
    "sign",
]

SIGNATURE = "signature.json"
_FORMAT, _ED25519, _HMAC = "myriad-signature-1", "ed25519", "hmac-sha256"
_PURPOSE = b"myriad signature of files\0"
_KEY_BYTES, _LEAST_SECRET_BYTES, _SIGNATURE_BYTES = 2**14, 32, 2**26
_MOST_FILES, _MOST = 100_000, 2**62
_READ_BYTES = 2**22
_SHA256, _HEX = re.compile("[0-9a-f]{64}"), re.compile("([0-9a-f]{2}){1,64}")


@dataclass(frozen=True)
class SignatureKey:
    """A key that checks signatures and, if it is a secret or a private key, makes them."""

    algorithm: str
    secret: bytes = b""
    private: "Ed25519PrivateKey | None" = None
    public: "Ed25519PublicKey | None" = None

    @property
    def key_id(self) -> str:
        """Name of the key, equal for the private and the public part."""
        if self.public is None:
            return hmac.digest(self.secret, b"myriad name of a key", "sha256").hex()[:32]
        return hashlib.sha256(self.public.public_bytes_raw()).hexdigest()[:32]

    def sign(self, content: bytes) -> bytes:
        """Return the signature of these bytes."""
        if self.private is not None:
            return self.private.sign(_PURPOSE + content)
        assert self.secret, "a public key does not sign"
        return hmac.digest(self.secret, _PURPOSE + content, "sha256")

    def is_right(self, content: bytes, signature: bytes) -> bool:
        """Return whether this is the key's signature of these bytes."""
        if self.public is None:
            return hmac.compare_digest(self.sign(content), signature)
        from cryptography.exceptions import InvalidSignature

        try:
            self.public.verify(signature, _PURPOSE + content)
        except InvalidSignature:
            return False
        return True


def load_key(path: Path, option: str) -> SignatureKey:
    """Read a key: Ed25519 in PEM, else a secret of at least 32 bytes, such as that of a run.

    Raises `BadInputError`, which names the option."""
    try:
        content = read_regular(path, _KEY_BYTES)
    except OSError as error:
        raise BadInputError(option, str(path), f"cannot be read: {error.strerror}") from None
    if content.lstrip().startswith(b"-----BEGIN"):
        return _load_pem(content, path, option)
    secret = content.strip()
    if len(secret) < _LEAST_SECRET_BYTES:
        allowed = f"must be an Ed25519 key in PEM, or a secret of at least {_LEAST_SECRET_BYTES} bytes"
        raise BadInputError(option, str(path), allowed)
    return SignatureKey(_HMAC, secret)


def load_signing_key(path: Path, option: str) -> SignatureKey:
    """Read a key that can sign. Raises `BadInputError`, which names the option."""
    key = load_key(path, option)
    if key.public is not None and key.private is None:
        raise BadInputError(option, str(path), "must be a private key: a public one does not sign")
    return key


def _load_pem(content: bytes, path: Path, option: str) -> SignatureKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    found: Any = None
    try:
        if b"PRIVATE KEY" in content:
            found = serialization.load_pem_private_key(content, None)
        else:
            found = serialization.load_pem_public_key(content)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
        raise BadInputError(option, str(path), f"not a readable key without a password: {error}") from None
    if isinstance(found, Ed25519PrivateKey):
        return SignatureKey(_ED25519, private=found, public=found.public_key())
    if not isinstance(found, Ed25519PublicKey):
        raise BadInputError(option, str(path), "must be an Ed25519 key: openssl genpkey -algorithm ed25519")
    return SignatureKey(_ED25519, public=found)


def is_signed_export(path: str) -> bool:
    """Whether a path is a local folder with a signature that is not a checkpoint of Myriad."""
    folder = Path(path)
    try:
        return (folder / SIGNATURE).is_file() and not (folder / MANIFEST).is_file()
    except (OSError, ValueError):  # not a file name
        return False


def sign(folder: Checkpoint, key: SignatureKey) -> int:
    """Write the signature of all files in a folder, and return their number. Raises ``OSError``."""
    files = {}
    for name in _files_of(folder):
        size, sha256 = _hash_of(folder, name)
        files[name] = {"bytes": size, "sha256": sha256}
    signed = {"format": _FORMAT, "algorithm": key.algorithm, "key": key.key_id, "files": files}
    content = signed | {"signature": key.sign(_canonical(signed)).hex()}
    folder.storage.put(folder.at(SIGNATURE), json.dumps(content, indent=1, sort_keys=True).encode() + b"\n")
    return len(files)


def _canonical(signed: Mapping[str, Any]) -> bytes:
    return json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()


def check_signature(folder: Checkpoint, key: SignatureKey) -> list[str]:
    """Return the problems of a signed folder; empty: every file is as who has the key signed it."""
    where = f"{folder.name}/{SIGNATURE}"
    try:
        size = folder.storage.size(folder.at(SIGNATURE))
        if size is None:
            return [f"{where}: missing: the folder is not signed"]
        if size > _SIGNATURE_BYTES:
            return [f"{where}: not readable ({size} bytes; at most {_SIGNATURE_BYTES})"]
        files = parse_signature(folder.storage.read(folder.at(SIGNATURE)), key)
    except (OSError, ValueError) as error:
        return [f"{where}: {error}"]
    try:
        present = set(_files_of(folder))
    except OSError as error:
        return [f"{folder.where}: not readable ({error})"]
    problems = [f"{folder.name}/{name}: is not signed" for name in sorted(present - files.keys())]
    return problems + [problem for name in sorted(files) for problem in _problems(folder, name, files[name])]


def require_signature(folder: Path, key: SignatureKey, option: str) -> None:
    """Raise `BadInputError` unless every file of a folder is as the owner of the key signed it."""
    if problems := check_signature(open_checkpoint(folder.absolute()), key):
        more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        raise BadInputError(option, str(folder), f"must be signed with this key: {problems[0]}{more}")


def parse_signature(content: bytes, key: SignatureKey) -> dict[str, tuple[int, str]]:
    """Return the size and hash of each signed file. Raises ``ValueError`` unless the key signed them."""
    found = parse_json(content)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise ValueError(f"not a signature of the format {_FORMAT}")
    signature = found.pop("signature", None)
    if found.get("algorithm") != key.algorithm or found.get("key") != key.key_id:
        theirs = f"{found.get('algorithm')!r:.20}, {found.get('key')!r:.40}"
        raise ValueError(f"signed with another key: {theirs}, not {key.algorithm!r}, {key.key_id!r}")
    if not isinstance(signature, str) or not _HEX.fullmatch(signature):
        raise ValueError("signature must be hexadecimal digits")
    if not key.is_right(_canonical(found), bytes.fromhex(signature)):
        raise ValueError("the signature is wrong: its files or names were changed")
    files = found.get("files")
    if not isinstance(files, dict) or len(files) > _MOST_FILES:
        raise ValueError(f"files must be an object of at most {_MOST_FILES:,}")
    return {name: _record(name, value) for name, value in files.items()}


def _record(name: str, value: object) -> tuple[int, str]:
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r:.80} is not a file of the folder")
    size, sha256 = (value.get("bytes"), value.get("sha256")) if isinstance(value, dict) else (None, None)
    if type(size) is not int or not 0 <= size <= _MOST:
        raise ValueError(f"{name}: bytes must be a whole number of 0 or more")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"{name}: sha256 must be 64 hexadecimal digits")
    return size, sha256


def _problems(folder: Checkpoint, name: str, record: tuple[int, str]) -> Iterator[str]:
    where, (expected, _) = f"{folder.name}/{name}", record
    try:
        size = folder.storage.size(folder.at(name))
        if size is None:
            yield f"{where}: missing"
        elif size != expected:
            yield f"{where}: {size} bytes instead of the {expected} that were signed"
        elif _hash_of(folder, name) != record:
            yield f"{where}: its bytes are not those that were signed"
    except OSError as error:
        yield f"{where}: not readable ({error})"


def _files_of(folder: Checkpoint) -> list[str]:
    """Return every file of a folder but its signature, also in folders of a local one. Raises ``OSError``,
    also for a link, which may lead to a file elsewhere."""
    if isinstance(folder.storage, LocalStorage):
        root = folder.storage.root / folder.name
        names = [path.relative_to(root).as_posix() for path in _walk(root)]
    else:
        names = folder.storage.names(folder.name)
    return sorted(name for name in names if name != SIGNATURE)


def _walk(root: Path) -> Iterator[Path]:
    with os.scandir(root) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
            yield Path(entry.path)
        else:
            raise OSError(f"{entry.path} is not a regular file")


def _hash_of(folder: Checkpoint, name: str) -> tuple[int, str]:
    """Return the size and SHA-256 of a file."""
    digest, size, block = hashlib.sha256(), 0, memoryview(bytearray(_READ_BYTES))
    known = folder.storage.size(folder.at(name)) or 0
    while size < known:
        count = folder.storage.read_into(folder.at(name), size, block[: min(_READ_BYTES, known - size)])
        if not count:
            break
        digest.update(block[:count])
        size += count
    return size, digest.hexdigest()
