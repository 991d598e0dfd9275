#!/bin/sh
# An sshd of the current user, without root, by which `poseidon train` reaches this container; docs/containers.md.
#   ssh_server.sh keys FOLDER PORT HOST...             make keys, known_hosts and config in FOLDER, once
#   ssh_server.sh serve FOLDER PORT [sshd options]     serve with them
set -eu
usage="expected: keys FOLDER PORT HOST... or: serve FOLDER PORT"
what=${1:?$usage} folder=${2:?$usage} port=${3:?$usage}
shift 3
case $what in
keys)
    : "${1:?$usage}"
    umask 077
    for key in host client; do
        test -f "$folder/$key" || ssh-keygen -q -t ed25519 -N '' -C "$key" -f "$folder/$key"
    done
    public=$(cut -d ' ' -f 1,2 "$folder/host.pub")
    for host; do
        echo "[$host]:$port $public"
    done > "$folder/known_hosts"
    cat > "$folder/config" << END
Host *
    Port $port
    IdentityFile $folder/client
    IdentitiesOnly yes
    UserKnownHostsFile $folder/known_hosts
END
    ;;
serve)
    exec "$(PATH=$PATH:/usr/sbin command -v sshd)" -D -e -f /dev/null -p "$port" -h "$folder/host" \
        -o AuthorizedKeysFile="$folder/client.pub" -o StrictModes=no -o PidFile=none -o UsePAM=no \
        -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o MaxSessions=100 \
        -o Subsystem="sftp internal-sftp" "$@"
    ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
