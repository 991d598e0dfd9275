"""What a launcher and an actor of Ray send each other is sealed."""

from __future__ import annotations

import pytest

from poseidon.cluster.ray.sealing import ChannelKeys, Seal, SealError


def _channel() -> tuple[tuple[Seal, Seal], tuple[Seal, Seal]]:
    launcher, actor = ChannelKeys(), ChannelKeys()
    return launcher.seals(actor.public), actor.seals(launcher.public)


def test_both_sides_open_what_the_other_has_sealed() -> None:
    (send, receive), (actor_send, actor_receive) = _channel()
    for number in range(3):
        message = bytes([number]) * number
        assert actor_receive.open(send.seal(message)) == message
        assert receive.open(actor_send.seal(message)) == message


def test_nothing_of_a_message_can_be_read() -> None:
    (send, _), _ = _channel()
    assert b"secret" not in send.seal(b"secret token")


@pytest.mark.parametrize(
    "fault", ["changed", "cut", "empty", "repeated", "lost", "returned", "another channel"]
)
def test_a_message_that_is_not_the_next_one_is_refused(fault: str) -> None:
    (send, receive), (_, actor_receive) = _channel()
    sealed = send.seal(b"1")
    if fault == "changed":
        sealed = bytes([sealed[0] ^ 1]) + sealed[1:]
    elif fault == "cut":
        sealed = sealed[:-1]
    elif fault == "empty":
        sealed = b""
    elif fault == "repeated":
        actor_receive.open(sealed)
    elif fault == "lost":
        sealed = send.seal(b"2")
    elif fault == "another channel":
        sealed = _channel()[0][0].seal(b"1")
    with pytest.raises(SealError):
        (receive if fault == "returned" else actor_receive).open(sealed)


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(SealError, match="not a public key"):
        ChannelKeys().seals(b"short")
