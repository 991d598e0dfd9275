"""The handshake: published vectors of its Noise pattern, and whom it refuses."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ps_server.errors import RemoteProtocolError
from ps_server.keys import KeyPair, key_bytes
from ps_server.transport.handshake import Agreement, Initiator, respond

# Noise_IK_25519_ChaChaPoly_SHA256 of the vectors of cacophony, which other libraries test as well.
INITIATOR = bytes.fromhex("e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1")
INITIATOR_EPHEMERAL = bytes.fromhex(
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"
)
RESPONDER = bytes.fromhex("4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893")
RESPONDER_EPHEMERAL = bytes.fromhex(
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"
)
FIRST = bytes.fromhex(
    "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
    "718da798efbcd91528520204f904b9bd6c7413dccdc214d951e15253e39987f1"
    "8146e8cd0873654207148333479d4d16"
    "c289f0294b29960a72f48e0b7bba2e89083169825e59642148d492020664ccf7"
)
SECOND = bytes.fromhex(
    "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
    "5361e70b2ed446e6c9ec387d1d6b3b840f194e373979d241b203c4acafccf5"
)
THERE = (b"F. A. Hayek", "050e9f3c8fac16b68dbce8f8c4bfbf6617c897f9ada4aa29aa19c8")
BACK = (b"Carl Menger", "344233a6cabb7141d80f3da2fedc311d9646bbb0f505afe403a667")

PAIR, OTHER, SHARD = KeyPair.new(), KeyPair.new(), KeyPair.new()


def secret(pair: KeyPair) -> bytes:
    return key_bytes(pair.secret)


def public(pair: KeyPair) -> bytes:
    return key_bytes(pair.public)


def echo(payload: bytes) -> bytes:
    return payload


def test_published_vectors() -> None:
    responder = respond(
        RESPONDER,
        Initiator(
            INITIATOR,
            _public_of(RESPONDER),
            b"Ludwig von Mises",
            prologue=b"John Galt",
            ephemeral=INITIATOR_EPHEMERAL,
        ).first,
        {_public_of(INITIATOR)},
        lambda _: b"Murray Rothbard",
        prologue=b"John Galt",
        ephemeral=RESPONDER_EPHEMERAL,
    )
    initiator = Initiator(
        INITIATOR,
        _public_of(RESPONDER),
        b"Ludwig von Mises",
        prologue=b"John Galt",
        ephemeral=INITIATOR_EPHEMERAL,
    )
    assert initiator.first == FIRST
    second, agreed = responder
    assert second == SECOND
    assert agreed.payload == b"Ludwig von Mises"
    ours = initiator.finish(second)
    assert ours.payload == b"Murray Rothbard"
    for key, (plain, sealed) in ((ours.send, THERE), (ours.receive, BACK)):
        assert ChaCha20Poly1305(key).encrypt(bytes(12), plain, b"").hex() == sealed
    assert (agreed.receive, agreed.send) == (ours.send, ours.receive)


def _public_of(secret_key: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret_key).public_key().public_bytes_raw()


def begin(pair: KeyPair = PAIR, shard: KeyPair = SHARD) -> Initiator:
    return Initiator(secret(pair), public(shard), b"hello")


def answer(first: bytes) -> tuple[bytes, Agreement]:
    return respond(secret(SHARD), first, {public(PAIR)}, echo)


def test_every_connection_has_keys_of_its_own() -> None:
    keys = set()
    for _ in range(3):
        initiator = begin()
        for _ in range(2):  # the second is what a repeated first message leads to
            second, agreed = answer(initiator.first)
            keys |= {agreed.send, agreed.receive}
        assert initiator.finish(second) == Agreement(
            send=agreed.receive, receive=agreed.send, peer=public(SHARD), payload=b"hello"
        )
    assert len(keys) == 12


@pytest.mark.parametrize(
    "first",
    [
        b"",
        bytes(1000),
        begin().first[:-1],
        begin(OTHER).first,
        begin(shard=OTHER).first,
        bytes(32) + begin().first[32:],
    ],
    ids=["empty", "long", "cut off", "a stranger", "for another shard", "a key that is none"],
)
def test_first_messages_that_are_refused(first: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^a handshake "):
        answer(first)


def flipped(message: bytes, place: int) -> bytes:
    return bytes([*message[:place], message[place] ^ 1, *message[place + 1 :]])


def test_any_changed_byte_is_noticed_and_the_right_message_is_still_taken() -> None:
    initiator = begin()
    for place in range(len(initiator.first)):
        with pytest.raises(RemoteProtocolError):
            answer(flipped(initiator.first, place))
    second, agreed = answer(initiator.first)
    for place in range(len(second)):
        with pytest.raises(RemoteProtocolError):
            initiator.finish(flipped(second, place))
    for wrong in (b"", second[:-1], initiator.first, answer(begin().first)[0]):
        with pytest.raises(RemoteProtocolError):
            initiator.finish(wrong)
    assert initiator.finish(second).send == agreed.receive


def test_keys_are_not_shown() -> None:
    _, agreed = answer(begin().first)
    assert "send" not in repr(agreed)
    assert "receive" not in repr(agreed)
