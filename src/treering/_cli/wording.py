"""The library's messages in the words of the shell: they name arguments of Python, and a command has options."""

import re
from collections.abc import Iterator, Mapping, Sequence

import click

# Not within a path such as /data/step=3.
_ARGUMENT = re.compile(r"(?<![^\s(])([a-z_]+)=(True|'[^']*'|\"[^\"]*\"|[\w.+-]*[\w])")
_NO_OPTION = re.compile(
    r"(?:[;,:]|,? or) pass [a-z_]+=[^;\n]*"
    r"|, or give Checkpointer the prefix"
    r"|, or pass a store that is registered with [^;\n]*"
    r"| \(reading needs no Checkpointer: [^)]*\)"
    r"|\bsee best\(unscored=\): "
)
_RULE = re.compile(r"\b(?:treering\.rules\.(drop|rename)\b|(drop)\((?=['\"])('[^']*'|\"[^\"]*\")\))")


def in_shell(text: str, commands: Mapping[str, click.Command], arguments: Sequence[str]) -> str:
    """Returns a message for the caller of a command: with its options in the place of Python's arguments and rules.

    Advice to pass an argument that the command has no option for is left out.
    """
    command = next((commands[one] for one in arguments if one in commands), None)
    options = {option.name: option for option in command.params if option.name} if command else {}

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        own = next((one for one in _meant(options, name) if _is_given(one, value, arguments)), name)
        if own not in options:
            return match[0]
        return options[own].opts[-1] + ("" if value == "True" else f" {value.removeprefix('math.')}")

    def rule(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return f"--{name}" + (f" {match[3]}" if match[3] else "") if name in options else match[0]

    text = _NO_OPTION.sub("", _RULE.sub(rule, _ARGUMENT.sub(option, text)))
    return text.replace("math.inf", "inf") if "max_expansion" in options else text


def _meant(options: Mapping[str, click.Parameter], name: str) -> Iterator[str]:
    """Yields the options that an argument may come from: `source_format` is the `format` to read."""
    return (one for one in options if one == name or one.endswith(f"_{name}"))


def _is_given(option: str, value: str, arguments: Sequence[str]) -> bool:
    """Whether the caller has given this value for an option."""
    words, own = " ".join(arguments).replace("=", " "), value.strip("'\"")
    return f"--{option.replace('_', '-')} {own}" in words
