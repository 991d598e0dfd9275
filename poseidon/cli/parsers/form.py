"""How a command declares its flags, how they are spelled, and how its help looks.

Flags follow gflags, as Caffe's tools do: -flag or --flag, -flag=value or -flag value, and for a
switch -flag, -flag=true or -noflag. Help has one line for each flag and fits 80 columns.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from poseidon.cli.parsers.values import TRUTH, one_of, truth
from poseidon.errors import nearest
from poseidon.hints import own_command

WIDTH = 80
Group: TypeAlias = argparse._ArgumentGroup

_OF_GLOG_SWITCHES = ("logtostderr", "alsologtostderr", "colorlogtostderr", "log_prefix")
"""Flags of Caffe's logging library that ask for what happens in any case: the log is on standard
error, in its form.
"""
_OF_GLOG = {
    "log_dir": "logs are in the job's folder, --output",
    "minloglevel": "--show_logs says whose log is shown",
    "stderrthreshold": "--show_logs says whose log is shown",
    "v": "",
    "vmodule": "",
    "logbuflevel": "",
    "logbufsecs": "",
    "max_log_size": "",
}

_COUNTED: Mapping[int | str, str] = {"?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
"""How usage shows arguments that may be missing or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of `poseidon`; its code is the module of that name in `poseidon.cli`, which has
    `run(arguments)`.

    Attributes:
        name: as it is typed.
        line: what it does, in a few words.
        description: what it does, in sentences, with the terms that its flags use.
        example: command lines that work.
        declare: adds the flags.
        verbatim: whether all words but a first --help are another program's. `words` of the
            namespace has them.
    """

    name: str
    line: str
    description: str
    example: str
    declare: Callable[[Parser], None]
    verbatim: bool = False

    def parser(self) -> Parser:
        """Return a new parser of its flags."""
        parser = Parser(self)
        self.declare(parser)
        return parser


class Parser(argparse.ArgumentParser):
    """The parser of one command. A mistake ends the process with one sentence and code 2.

    A flag may not be cut short: what `--max` stands for would change with every new flag.
    """

    def __init__(self, command: Command) -> None:
        super().__init__(prog=f"poseidon {command.name}", add_help=False, allow_abbrev=False)
        self._command = command
        self.arguments = self.add_argument_group("Arguments")
        self.set_defaults(command=command.name)
        for name in _OF_GLOG_SWITCHES:
            switch(self, name, argparse.SUPPRESS)
        for name, instead in _OF_GLOG.items():
            retired(self, name, instead)

    def section(self, title: str, terms: str = "") -> Group:
        """Add a group of flags.

        Args:
            title: its headline.
            terms: the meaning of its terms, in sentences.
        """
        return self.add_argument_group(title, terms)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the flags: `argv` has them as they were given, `notes` a sentence for each one
        without effect.
        """
        if self._command.verbatim and list(words[:1]) not in (["--help"], ["-h"]):
            name = self._command.name
            return argparse.Namespace(
                command=name, words=list(words), argv=[name, *words], notes=[]
            )
        parsed, strange = self.parse_known_args(self._spelled_out(words))
        if strange:
            self._refuse(strange)
        parsed.argv = [self._command.name, *words]
        parsed.notes = [
            action.note for action in self._actions if isinstance(action, _Retired) and action.note
        ]
        return parsed

    def flags(self) -> Iterator[argparse.Action]:
        """Return the flags that help shows."""
        return (action for action in self._actions if action.help != argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """End the process with code 2."""
        message = re.sub(r"^argument (-*\w+)\S*: ", r"\1: ", message)
        missing = message.removeprefix("the following arguments are required: ")
        if missing != message:
            names = [name.partition("/")[0] for name in missing.split(", ") if name != "..."]
            message = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
        self.exit(
            2,
            f"{self.prog}: {message.replace('expected one argument', 'expected a value')}; "
            f"see {own_command()} {self.prog.partition(' ')[2]} --help\n",
        )

    def format_help(self) -> str:
        """Return usage, description, an example, and each flag in a line."""
        command = self._command
        parts = [
            self._usage(),
            _wrapped(command.description),
            "example:\n" + textwrap.indent(command.example, "  "),
        ]
        for group in self._action_groups:
            shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            if shown:
                terms = [_wrapped(group.description)] if group.description else []
                parts.append("\n".join([f"{group.title}:", *terms, *_lines(shown)]))
        return "\n\n".join(parts) + "\n"

    def _usage(self) -> str:
        words = [f"usage: {self.prog}"]
        words += [
            _left(action) for action in self.flags() if action.option_strings and action.required
        ]
        if any(action.option_strings for action in self.flags()):
            words.append("[flags]")
        for action in self.flags():
            if not action.option_strings:
                words.append(_COUNTED.get(action.nargs or "", "{}").format(_left(action)))
        return " ".join(words)

    def _spelled_out(self, words: Sequence[str]) -> list[str]:
        """Return the arguments with a value for each switch, so that none takes the next
        argument as its own.
        """
        rest, done = list(words), list[str]()
        while rest:
            word = rest.pop(0)
            if word == "--" or not re.match(r"--?[a-zA-Z]", word):
                done.append(word)
                if self._takes_the_rest:
                    return [*done, *rest]
                if not any(not action.option_strings for action in self._actions):
                    self._refuse([word])
                continue
            name, equals, value = word.lstrip("-").partition("=")
            action = self._action(name)
            if action is None and not isinstance(self._action(name.removeprefix("no")), _Switch):
                self._refuse([word])  # before a flag is found missing, for which this one may stand
            plain, off = self._action(name.removeprefix("no")), name.startswith("no")
            if action is None and off and isinstance(plain, _Switch) and not equals:
                done.append(f"--{name.removeprefix('no')}=false")
            elif isinstance(action, _Switch) and not equals:
                own = bool(rest) and rest[0].lower() in (*TRUTH, *(action.choices or ()))
                done.append(f"--{name}={rest.pop(0) if own else 'true'}")
            else:
                done.append(
                    word if action is None else f"{action.option_strings[0]}{equals}{value}"
                )
                if action is not None and not equals and action.nargs is None and rest:
                    done.append(rest.pop(0))
        return done

    @property
    def _takes_the_rest(self) -> bool:
        return any(action.nargs == argparse.REMAINDER for action in self._actions)

    def _action(self, name: str) -> argparse.Action | None:
        known = self._option_string_actions
        return known.get(f"--{name}") or known.get(f"-{name}")

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        """End the process because of arguments that no flag of this command takes."""
        name = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
        if name is None:
            files = [
                action for action in self.flags() if action.required and action.metavar == "FILE"
            ]
            hint = f", did you mean {files[0].option_strings[0]}={words[0]}?" if files else ""
            self.error(f"did not expect '{' '.join(words)}'{hint}")
        known = [
            action.option_strings[0].lstrip("-") for action in self.flags() if action.option_strings
        ]
        near = nearest(name.lstrip("-").replace("-", "_"), known)
        hint = f", did you mean --{near}?" if near else ""
        if any(isinstance(action, _SolverField) for action in self._actions):
            hint = _setting(name.lstrip("-").replace("-", "_"), words[0].partition("=")[2]) or hint
        if not near and any(action.dest == "script" for action in self._actions):
            hint = "; the script's own flags come after the script"
        self.error(f"unknown flag {name}{hint}")


class _Switch(argparse._StoreAction):
    """A flag that is on without a value."""


class _Retired(argparse._StoreAction):
    """A flag that is taken and does nothing."""

    instead = ""
    note = ""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Note it once."""
        name = self.option_strings[0]
        self.note = f"{name} has no effect here" + (f": {self.instead}" if self.instead else "")


class _RetiredSwitch(_Retired, _Switch):
    """One that is on without a value."""


class _SolverField(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        """Add it to the settings, in the order of the command line."""
        name = self.option_strings[0].lstrip("-")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), f"{name}={values}"])


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print the help and end."""
        parser.print_help()
        parser.exit()


def flag(group: Group | Parser, name: str, text: str, **settings: Any) -> None:
    """Add a flag with a value."""
    group.add_argument(
        f"--{name}",
        f"-{name}",
        *_dashed(name),
        dest=settings.pop("dest", name),
        help=text,
        **settings,
    )


def solver_flag(group: Group | Parser, name: str, text: str, **settings: Any) -> None:
    """Add a flag for a field of the solver: --display=5 for --set display=5."""
    flag(group, name, text, dest="settings", action=_SolverField, **settings)


def switch(
    group: Group | Parser, name: str, text: str, *, default: bool | None = False, **settings: Any
) -> None:
    """Add a flag that is on without a value, and on or off with one."""
    settings = {"dest": name, "type": truth, "default": default, **settings}
    group.add_argument(
        f"--{name}", f"-{name}", *_dashed(name), help=text, action=_Switch, **settings
    )


def retired(group: Group | Parser, name: str, instead: str = "", *, alone: bool = False) -> None:
    """Add a flag of Caffe or of the original Poseidon that scripts pass and nothing here needs.

    Args:
        group: what it is added to.
        name: of the flag.
        instead: half a sentence on what to use; may be empty.
        alone: it may stand without a value.
    """
    kind = _RetiredSwitch if alone else _Retired
    action = group.add_argument(f"--{name}", f"-{name}", help=argparse.SUPPRESS, action=kind)
    assert isinstance(action, _Retired)
    action.instead = instead


def chosen(
    group: Group | Parser,
    name: str,
    text: str,
    choices: Sequence[str],
    *,
    instead: Mapping[str, str] | None = None,
    **settings: Any,
) -> None:
    """Add a flag with these values; see `one_of`."""
    flag(group, name, text, type=one_of(choices, instead), choices=choices, **settings)


def word(parser: Parser, name: str, text: str, **settings: Any) -> None:
    """Add an argument without a flag."""
    parser.arguments.add_argument(name, help=text, **settings)


def takes_value(action: argparse.Action) -> bool:
    """Return whether a flag is shown with a value."""
    return bool(action.option_strings) and action.nargs != 0 and not isinstance(action, _Switch)


def help_flag(parser: Parser) -> None:
    """Add --help, which comes last."""
    group = parser.section("Help")
    group.add_argument("--help", "-help", "-h", action=_Help, nargs=0, help="show this and end")


def overview(title: str, groups: Mapping[str, Sequence[Command]], example: str) -> str:
    """Return the help of `poseidon` itself: each command in a line."""
    column = 4 + max(len(command.name) for commands in groups.values() for command in commands)
    parts = [title, "usage: poseidon COMMAND [flags]\n       poseidon COMMAND --help", example]
    for headline, commands in groups.items():
        lines = [f"  {command.name}".ljust(column) + command.line for command in commands]
        parts.append("\n".join([f"{headline}:", *lines]))
    return "\n\n".join(parts) + "\n"


def _setting(name: str, value: str) -> str:
    """Return a hint for a flag that is named like a field of the solver; empty for another flag."""
    from poseidon.proto.caffe_pb2 import (
        SolverParameter,
    )  # an import of protobuf takes longer than the flags

    field = {"lr": "base_lr", "learning_rate": "base_lr", "iterations": "max_iter"}.get(name, name)
    if field not in SolverParameter.DESCRIPTOR.fields_by_name:
        return ""
    return f", did you mean --set {field}={value or 'VALUE'}?"


def _dashed(name: str) -> list[str]:
    return [f"--{name.replace('_', '-')}"] if "_" in name else []


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _left(action: argparse.Action) -> str:
    """Return the beginning of a flag's line in the help."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    name = action.option_strings[0]
    if isinstance(action, _Switch):
        return f"--[no]{name.removeprefix('--')}" if action.default else name
    return name if action.nargs == 0 else f"{name}={action.metavar or 'X'}"


def _lines(actions: Sequence[argparse.Action]) -> Iterator[str]:
    column = 4 + max(len(_left(action)) for action in actions)
    for action in actions:
        first, *others = textwrap.wrap(
            action.help or "", WIDTH - column, break_on_hyphens=False
        ) or [""]
        yield f"  {_left(action)}".ljust(column) + first
        yield from (" " * column + line for line in others)
