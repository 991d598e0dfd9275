"""`poseidon completion`: a script that completes commands, flags and their values in bash or zsh.

Both are made from the parsers, so that they know what `--help` shows, and run no Python while a
user types.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable

from poseidon.cli.main import COMMANDS
from poseidon.cli.parsers.form import Command
from poseidon.flags.flag import Flag, Takes

FILES = ("FILE", "FILES", "DIR")
"""What a value is called that is a path."""


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    print(bash_script() if arguments.shell == "bash" else zsh_script())
    return 0


def bash_script() -> str:
    """For bash: a function, and the line that binds it."""
    flags, values = [], []
    for command in COMMANDS.values():
        parser = command.parser()
        names = [
            flag.title + ("=" if _takes_value(flag) else "")
            for flag in parser.flags()
            if not flag.takes.is_word
        ]
        flags.append(f"        {command.name}) flags='{' '.join(names)}' ;;")
        first = next((flag for flag in parser.flags() if flag.takes.is_word), None)
        for flag in parser.flags():
            place = "" if flag.takes.is_word else flag.name
            if flag.choices and (place or flag is first):
                values.append(
                    f"        {command.name}:{place}) values='{' '.join(flag.choices)}' ;;"
                )
            elif _takes_value(flag) and flag.metavar not in FILES:
                values.append(f"        {command.name}:{place}) values=' ' ;;")
    return "\n".join(
        [_BASH_HEAD.format(commands=" ".join(COMMANDS)), *flags, _BASH_MIDDLE, *values, _BASH_END]
    )


def zsh_script() -> str:
    """For zsh: a file `_poseidon` of its function path."""
    lines = [_ZSH_HEAD]
    lines += [
        f"    {shlex.quote(f'{command.name}:{command.line}')}" for command in COMMANDS.values()
    ]
    lines.append(_ZSH_MIDDLE)
    for command in COMMANDS.values():
        specs = " \\\n        ".join([*map(shlex.quote, _zsh_specs(command)), "'*:file:_files'"])
        lines.append(f"    {command.name}) _arguments \\\n        {specs} ;;")
    return "\n".join([*lines, _ZSH_END])


def _zsh_specs(command: Command) -> Iterable[str]:
    place = 0
    for flag in command.parser().flags():
        values = f"({' '.join(flag.choices)})" if flag.choices else " "
        if flag.takes.is_word:
            place += 1
            if flag.choices:
                yield f"{place}:{flag.metavar}:{values}"
            continue
        text = flag.text.replace("[", r"\[").replace("]", r"\]").replace(":", r"\:")
        if not _takes_value(flag):
            yield f"{flag.title}[{text}]"
        else:
            values = "_files" if flag.metavar in FILES and not flag.choices else values
            yield f"{flag.title}=[{text}]:{flag.metavar}:{values}"


def _takes_value(flag: Flag) -> bool:
    return flag.takes in (Takes.VALUE, Takes.VALUES)


_BASH_HEAD = """# Completion of poseidon in bash; `poseidon completion bash` prints it.
_poseidon() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" flag="" flags="" values="" word
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W '{commands} --help --version' -- "$current"))
        return
    fi
    for word in "${{COMP_WORDS[@]:2:COMP_CWORD-2}}"; do  # the job of `poseidon worker`
        [[ $command == worker && ( $word == train || $word == run ) ]] && command=$word
    done
    # bash takes --flag=value for three words.
    if [[ $current == "=" ]]; then
        flag=$before current=""
    elif [[ $before == "=" ]]; then
        flag=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [[ $before == -* ]]; then
        flag=$before
    fi
    case $command in"""
_BASH_MIDDLE = """    esac
    if [[ $current == -* && -z $flag || $current == --* ]]; then
        [[ $current != --* ]] && flags=${flags//--/-}
        COMPREPLY=($(compgen -W "$flags" -- "$current"))
        [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
        return
    fi
    flag=${flag#-}
    case $command:${flag#-} in"""
_BASH_END = """    esac
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$current"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
        compopt -o filenames 2>/dev/null
    fi
}
complete -F _poseidon poseidon"""
_ZSH_HEAD = """#compdef poseidon
# Completion of poseidon in zsh; `poseidon completion zsh` prints it.
_poseidon() {
  local -a commands
  commands=("""
_ZSH_MIDDLE = """  )
  if (( CURRENT == 2 )); then
    _describe -t commands command commands
    return
  fi
  shift words
  (( CURRENT-- ))
  case $words[1] in"""
_ZSH_END = """  esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
  _poseidon "$@"
else
  compdef _poseidon poseidon
fi"""
