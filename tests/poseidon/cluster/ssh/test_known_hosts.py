"""known_hosts: whom a line names, and what is objected to."""

from __future__ import annotations

import base64
import hmac
from pathlib import Path

import pytest

from poseidon.cluster.ssh.known_hosts import (
    HostKey,
    host_name,
    kinds_known,
    parse_known_hosts,
    rejection,
)

KEY = HostKey(kind="ssh-ed25519", blob=b"the key")
OTHER = HostKey(kind="ssh-ed25519", blob=b"another key")
FILE = Path("/home/ml/.ssh/known_hosts")


def _line(patterns: str, key: HostKey = KEY) -> str:
    return f"{patterns} {key.kind} {key.base64} comment"


def _hashed(name: str) -> str:
    salt = b"0123456789abcdef0123"
    digest = hmac.digest(salt, name.encode(), "sha1")
    return "|1|" + "|".join(base64.b64encode(part).decode() for part in (salt, digest))


@pytest.mark.parametrize(
    ("patterns", "host", "named"),
    [
        ("node3", "node3", True),
        ("node3", "node33", False),
        ("a,node3,b", "node3", True),
        ("NODE3", "node3", True),
        ("node*", "node3", True),
        ("node?", "node3", True),
        ("*,!node3", "node3", False),
        ("*,!node3", "node4", True),
        ("*,![node3]:2222", "[node3]:2222", False),
        ("[node3]:2222", "[node3]:2222", True),
        ("[node3]:2222", "node3", False),
        ("node3", "[node3]:2222", False),
        ("[node3]:*", "[node3]:2222", True),
        ("::1", "::1", True),
        (_hashed("node3"), "node3", True),
        (_hashed("node3"), "node4", False),
        ("|1|broken", "node3", False),
        ("|1|!|!", "node3", False),
    ],
)
def test_whom_a_line_names(patterns: str, host: str, named: bool) -> None:
    known = parse_known_hosts([_line(patterns)])
    assert (rejection(known, host, KEY, FILE) is None) is named
    assert kinds_known(known, host) == (("ssh-ed25519",) if named else ())


def test_names() -> None:
    assert host_name("Node3", 22) == "node3"
    assert host_name("fe80::1", 2222) == "[fe80::1]:2222"


@pytest.mark.parametrize(
    "line",
    ["", "# node3 ssh-ed25519 "
"AAAA", "node3", "node3 ssh-ed25519", "node3 ssh-ed25519 "
"!!!", "@cert-authority " + _line("node3")],
)  # fmt: skip
def test_lines_that_vouch_for_nobody(line: str) -> None:
    assert rejection(parse_known_hosts([line]), "node3", KEY, FILE) is not None


def test_an_unknown_key_comes_with_its_fingerprint_and_the_command() -> None:
    text = rejection((), "[node3]:22", KEY, FILE)
    assert text is not None
    assert f"ssh-ed25519 {KEY.fingerprint} is not known" in text
    assert text.endswith(f"echo '[node3]:22 ssh-ed25519 {KEY.base64}' >> {FILE}")


def test_a_changed_key_comes_with_both_fingerprints() -> None:
    text = rejection(parse_known_hosts([_line("node3", OTHER)]), "node3", KEY, FILE)
    assert text is not None
    assert f"has changed from {OTHER.fingerprint} to ssh-ed25519 {KEY.fingerprint}" in text
    assert f"ssh-keygen -R node3 -f {FILE} && echo" in text


def test_a_second_key_of_another_kind_is_unknown_not_changed() -> None:
    rsa = HostKey(kind="ssh-rsa", blob=b"rsa")
    text = rejection(parse_known_hosts([_line("node3", rsa)]), "node3", KEY, FILE)
    assert text is not None and "is not known" in text


def test_a_revoked_key_is_refused_though_another_line_has_it() -> None:
    known = parse_known_hosts([_line("node3"), "@revoked " + _line("*")])
    text = rejection(known, "node3", KEY, FILE)
    assert text is not None and "revoked" in text


def test_the_fingerprint_is_that_of_ssh_keygen() -> None:
    # ssh-keygen -lf of this key says the same.
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIBhQInfn3yM5sEh+fCxE+xlMlVCu474N5eDCqloxUKe3")
    key = HostKey(kind="ssh-ed25519", blob=blob)
    assert key.fingerprint == "SHA256:wgwFM860kYiC7iNFUDk/RBevebLLS/iG3H8XPAmStrc"
