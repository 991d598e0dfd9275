"""Keys: anything else is refused, files are private, secrets are not shown."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ps_server.errors import SpecError
from ps_server.json_fields import fields_of, plain, value_of
from ps_server.keys import JobKeys, KeyPair, Keyring, check_public, read_keyring, write_keyring


def test_a_job_has_a_pair_for_each_and_tells_each_its_own_secret_only() -> None:
    keys = JobKeys.new(workers=2, shards=3)
    secrets = {pair.secret for pair in (*keys.workers, *keys.shards)}
    assert len(secrets) == 5
    for ring in (keys.of_worker(1), keys.of_shard(2)):
        told = json.dumps(fields_of(ring), default=plain)
        assert {secret for secret in secrets if secret in told} == {ring.own.secret}
        assert value_of(Keyring, json.loads(told)) == ring
    assert keys.of_worker(1).expect == tuple(pair.public for pair in keys.shards)
    assert keys.of_shard(2).admit == tuple(pair.public for pair in keys.workers)


def test_no_secret_is_shown() -> None:
    keys = JobKeys.new(workers=1, shards=1)
    for thing in (keys, keys.workers[0], keys.of_worker(0)):
        assert keys.workers[0].secret not in repr(thing)


@pytest.mark.parametrize(
    "key", ["", "a" * 63, "a" * 65, "a" * 63 + "\n", "a" * 63 + "g", "a" * 63 + "A", "ä" * 64]
)
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(SpecError, match="is not a public key"):
        check_public(key)


def test_a_pair_must_be_one() -> None:
    with pytest.raises(SpecError, match="is not the one of public key"):
        KeyPair(public=KeyPair.new().public, secret=KeyPair.new().secret)


def test_two_workers_with_one_key() -> None:
    own = KeyPair.new()
    with pytest.raises(SpecError, match="same public key"):
        Keyring(own=own, admit=(own.public, own.public))


def test_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    ring, path = JobKeys.new(workers=2, shards=1).of_worker(0), tmp_path / "keys"
    write_keyring(path, ring)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keyring(path) == ring
    with pytest.raises(SpecError, match="cannot write"):
        write_keyring(path, ring)
    os.chmod(path, 0o640)
    with pytest.raises(SpecError, match="can be read by others"):
        read_keyring(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"own": "s3cret"}', '{"own": {"public": "a", "secret": "s3cret"}}']
)
def test_a_file_with_something_else_is_not_quoted(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(SpecError, match="holds no keys") as caught:
        read_keyring(path)
    assert "s3cret" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        read_keyring(tmp_path / "keys")
