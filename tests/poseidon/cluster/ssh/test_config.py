"""~/.ssh/config and the machinefile's words: which host is dialled how."""

from __future__ import annotations

import base64
import hmac
import random
import subprocess
from pathlib import Path

import pytest

from poseidon.cluster.machinefile import Host, SshSettings
from poseidon.cluster.ssh.config import (
    Endpoint,
    HostKey,
    SshConfig,
    host_name,
    kinds_known,
    parse_known_hosts,
    rejection,
    shell_command,
)
from poseidon.errors import JobError

SHELLS = ["sh", "bash", "dash"] + [
    pytest.param(shell, marks=pytest.mark.needs(shell)) for shell in ("fish", "ksh", "tcsh", "zsh")
]
SIGNS = " \"'`$\\!*?[]{}()<>|&;#~=%@^-+,.:/aZ09\u00e9\u4e2d\U0001f600"
WORDS = [
    "",
    "-",
    "--option=x",
    "$(touch /tmp/never)",
    "`id`",
    "a;b",
    "a&&b",
    "${HOME}",
    "~",
    "~root",
    "!!",
    "it's",
    "\\",
    "\\\\'",
    "'\\''",
    "*",
    "if",
    "=ls",
    "%1",
    "^a^b",
    "a\u00a0b",
    "{a,b}",
    ">file",
    "#comment",
    "a b  c",
]


def _taken_apart(shell: str, argv: list[str]) -> list[str]:
    """What the shell makes of the line; `printf` writes each word with an end that no word can
    hold.
    """
    line = shell_command(["/usr/bin/printf", "%s\\0", *argv])
    done = subprocess.run([shell, "-c", line], capture_output=True, timeout=60, check=True)
    return done.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("shell", SHELLS)
def test_known_dangers(shell: str) -> None:
    assert _taken_apart(shell, WORDS) == WORDS


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("seed", range(3))
def test_random_words(shell: str, seed: int) -> None:
    chance = random.Random(seed)
    words = ["".join(chance.choices(SIGNS, k=chance.randrange(12))) for _ in range(1000)]
    assert _taken_apart(shell, words) == words


@pytest.mark.parametrize("program", ["if", "while", "echo hello", "$SHELL", "a=b"])
def test_the_first_word_is_a_program_and_nothing_else(program: str) -> None:
    done = subprocess.run(
        ["sh", "-c", shell_command([program])], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 127, done


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "\0", "\x1b[0m", "\x7f", "\udc80"])
def test_what_no_shell_can_be_given(word: str) -> None:
    with pytest.raises(JobError, match="control character"):
        shell_command(["true", word])


@pytest.mark.parametrize("argv", [[], [""], ["-c", "x"]])
def test_no_program(argv: list[str]) -> None:
    with pytest.raises(JobError, match="is not a command"):
        shell_command(argv)


def _endpoint(tmp_path: Path, text: str, client: Host | None = None) -> Endpoint:
    file = tmp_path / "config"
    file.write_text(text)
    config = SshConfig(SshSettings(config=file))
    return config.endpoint(client or Host(id=0, address="node3", port=0))


def test_what_the_configuration_says(tmp_path: Path) -> None:
    found = _endpoint(
        tmp_path,
        "Host other\n  User nobody\nHost node*\n  HostName 10.0.0.3\n  User ml\n  Port 2222\n  "
        "IdentityFile ~/k\n"
        "  IdentitiesOnly yes\n  HostKeyAlias the-node\n  UserKnownHostsFile /a /b\n  ProxyJump "
        "j1,me@j2:23\n",
    )
    assert (found.name, found.host, found.user, found.port) == ("node3", "10.0.0.3", "ml", 2222)
    assert (found.identities, found.with_agent) == ((Path.home() / "k",), False)
    assert (found.alias, found.known_hosts[:2]) == ("the-node", (Path("/a"), Path("/b")))
    assert found.jumps == ("j1", "me@j2:23")
    assert found.label == "ml@10.0.0.3:2222"


def test_paths_with_blanks_are_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "more hosts").write_text("Host node3\n  User included\n")
    found = _endpoint(
        tmp_path,
        f'Include "{tmp_path}/more hosts"\n'
        "IdentityFile \"~/my keys/id\"\nidentityfile = '/their keys/id'\nIdentityFile /plain\n"
        'UserKnownHostsFile "/my keys/hosts" "/a"  /b\nGlobalKnownHostsFile "/all hosts"\n',
    )
    assert found.user == "included"
    assert found.identities == (Path.home() / "my keys/id", Path("/their keys/id"), Path("/plain"))
    assert found.known_hosts == tuple(map(Path, ("/my keys/hosts", "/a", "/b", "/all hosts")))


def test_the_machinefile_goes_before_the_configuration(tmp_path: Path) -> None:
    client = Host(id=0, address="node3", port=0, user="file", ssh_port=2300)
    found = _endpoint(tmp_path, "Host *\n  User config\n  Port 2222\n", client)
    assert (found.user, found.port) == ("file", 2300)


def test_what_nothing_says(tmp_path: Path) -> None:
    found = _endpoint(tmp_path, "")
    assert (found.host, found.port, found.alias, found.jumps, found.proxy_command) == (
        "node3",
        22,
        "node3",
        (),
        "",
    )
    assert found.with_agent and [path.name for path in found.identities] == [
        "id_ed25519",
        "id_ecdsa",
        "id_rsa",
    ]
    assert found.known_hosts[0] == Path.home() / ".ssh" / "known_hosts"


def test_none_switches_a_proxy_off(tmp_path: Path) -> None:
    found = _endpoint(tmp_path, "Host *\n  ProxyJump none\n  ProxyCommand none\n")
    assert (found.jumps, found.proxy_command) == ((), "")


def test_includes_stand_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "one.conf").write_text("Host node3\n  User included\n")
    (tmp_path / "loop.conf").write_text(f"Include {tmp_path}/loop.conf\n")
    found = _endpoint(
        tmp_path,
        f"Include {tmp_path}/one.con? {tmp_path}/loop.conf {tmp_path}/absent\nHost *\n  User late\n",
    )
    assert found.user == "included"


@pytest.mark.parametrize("text", ["Match final all\n  User ml\n", "match final\n  User ml\n"])
def test_what_is_matched_last_as_in_the_files_of_red_hat(tmp_path: Path, text: str) -> None:
    assert _endpoint(tmp_path, text).user == "ml"
    assert _endpoint(tmp_path, f"{text}Host node3\n  User own\n").user == "own"


def test_a_name_is_not_canonicalized(tmp_path: Path) -> None:
    lines = "CanonicalizeHostname yes\nCanonicalDomains invalid\n"
    assert _endpoint(tmp_path, f"{lines}Host node3\n  HostName 10.0.0.3\n").host == "10.0.0.3"


def test_strict_host_key_checking_cannot_be_switched_off(tmp_path: Path) -> None:
    text = "Host *\n  StrictHostKeyChecking no\n"
    assert _endpoint(tmp_path, text) == _endpoint(tmp_path, "")


@pytest.mark.parametrize("words", ["", "-oProxyCommand=x", "a:b:c", "a:99999999"])
def test_jumps_that_are_none(tmp_path: Path, words: str) -> None:
    (tmp_path / "config").write_text("")
    with pytest.raises(JobError, match="ProxyJump"):
        SshConfig(SshSettings(config=tmp_path / "config")).jump(words)


def test_jumps(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("")
    config = SshConfig(SshSettings(config=tmp_path / "config"))
    assert config.jump("ml@[::1]:23").label == "ml@[::1]:23"
    assert config.jump("ssh://ml@gate").label == "ml@gate"


@pytest.mark.parametrize(
    "text", ["Host *\n  Port many\n", "unparsable\n", 'UserKnownHostsFile "/a b\n']
)
def test_a_wrong_line_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(JobError, match="config: "):
        _endpoint(tmp_path, text)


def test_a_wrong_port_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"illegal settings for node3: Port 22x is not a number$"):
        _endpoint(tmp_path, "Host *\n  Port 22x\n")


def test_an_absent_file_of_the_user_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no SSH configuration"):
        SshConfig(SshSettings(config=tmp_path / "absent"))


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


def test_a_key_cannot_be_added_to_the_null_device() -> None:
    text = rejection((), "node3", KEY, Path("/dev/null"))
    assert text is not None
    assert f"{KEY.fingerprint} is not known, and UserKnownHostsFile /dev/null keeps none" in text
    assert text.endswith(f"echo 'node3 ssh-ed25519 {KEY.base64}' >> THAT_FILE")


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
