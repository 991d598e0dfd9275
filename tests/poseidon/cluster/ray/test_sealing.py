"""What a launcher and an actor of Ray send each other is sealed."""

from __future__ import annotations

import pytest

from poseidon.cluster.ray.sealing import ChannelKeys, Seal, SealError


def _channel(name: str = "programs") -> tuple[tuple[Seal, Seal], tuple[Seal, Seal]]:
    launcher, actor = ChannelKeys(), ChannelKeys()
    return launcher.seals(actor.public, name), actor.seals(launcher.public, name)


def test_both_sides_open_what_the_other_has_sealed() -> None:
    (send, receive), (actor_send, actor_receive) = _channel()
    for number in range(3):
        header, payload = {"kind": "input", "program": number}, bytes([number]) * number
        assert actor_receive.open(send.seal(header, payload)) == (header, payload)
        assert receive.open(actor_send.seal(header)) == (header, b"")


def test_nothing_of_a_message_can_be_read() -> None:
    (send, _), _ = _channel()
    sealed = send.seal({"token": "secret-header"}, b"secret-payload")
    assert b"secret" not in sealed


@pytest.mark.parametrize("fault", ["changed", "repeated", "lost", "returned", "another channel"])
def test_a_message_that_is_not_the_next_one_is_refused(fault: str) -> None:
    launcher, actor = ChannelKeys(), ChannelKeys()
    send, receive = launcher.seals(actor.public, "programs")
    _, actor_receive = actor.seals(
        launcher.public, "files" if fault == "another channel" else "programs"
    )
    sealed = send.seal({}, b"1")
    if fault == "changed":
        sealed = bytes([sealed[0] ^ 1]) + sealed[1:]
    elif fault == "repeated":
        actor_receive.open(sealed)
    elif fault == "lost":
        sealed = send.seal({}, b"2")
    with pytest.raises(SealError):
        (receive if fault == "returned" else actor_receive).open(sealed)


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(SealError, match="not a public key"):
        ChannelKeys().seals(b"short", "programs")
