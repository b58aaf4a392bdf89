"""The library's messages in the words of the shell: they name arguments of Python, and a command has options."""

import re
from collections.abc import Mapping, Sequence

import click

# What a message is about comes first, up to a colon; it may have spaces, and is left as it is.
_PATH = re.compile(r"((?:\A|(?<=: ))(?:[A-Za-z][\w+.-]*:)?[/\\].*?(?=: ))")
# Not within other paths, such as /data/step=3.
_ARGUMENT = re.compile(r"(?<![^\s(])([a-z_]+)=(True|'[^']*'|\"[^\"]*\"|[\w.+-]*[\w]|(?=$|[\s;,.)]))")
_NO_OPTION = re.compile(
    r"(?:[;,:]|,? or) pass [a-z_]+=[^;\n]*"
    r"|, or pass a store that is registered with [^;\n]*"
    r"| \(reading needs no Checkpointer: [^)]*\)"
    r"|\bsee best\(unscored=\): "
    r"| to continue from there"
    r"| to Checkpointer\b"
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
        if name not in options:
            return match[0]
        return options[name].opts[-1] + ("" if value in ("", "True") else f" {value.removeprefix('math.')}")

    def rule(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return f"--{name}" + (f" {match[3]}" if match[3] else "") if name in options else match[0]

    parts = _PATH.split(text)  # paths are the odd ones
    parts[::2] = (_NO_OPTION.sub("", _RULE.sub(rule, _ARGUMENT.sub(option, part))) for part in parts[::2])
    text = "".join(parts)
    return text.replace("math.inf", "inf") if "max_expansion" in options else text
