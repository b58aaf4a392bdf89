"""Rewrites messages of the library for the shell: they name Python arguments, but a command has options."""

import ast
import re
import shlex
from collections.abc import Mapping, Sequence

import click

# A message begins with a path, up to a colon. The path may have spaces, and stays as it is.
_MESSAGE_PATH = re.compile(r"((?:\A|(?<=: ))(?:[A-Za-z][\w+.-]*:)?[/\\].*?(?=: ))")
# An argument inside another path, such as /data/step=3, does not match.
_PYTHON_ARGUMENT = re.compile(r"(?<![^\s(])([a-z_]+)=(True|'[^']*'|\"[^\"]*\"|[\w.+-]*[\w]|(?=$|[\s;,.)]))")
_PYTHON_ADVICE = re.compile(
    r"(?:[;,:]|,? or) pass [a-z_]+=[^;\n]*"
    r"|, or pass a store that is registered with [^;\n]*"
    r"| \(reading needs no Checkpointer: [^)]*\)"
    r"|, or clip them with rules before the cast: \[[^\n]*\]"
    r"| to continue from there"
    r"| to Checkpointer\b"
)
_SOURCE_FORMAT = re.compile(r"\bformat=(?P<name>'[^']*') \(treering\.convert: source_format=\)")
_TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_PYTHON_RULE = re.compile(
    rf"\b(?:tr|treering)\.rules\.(?P<rule>drop|rename)\b(?:\((?P<old>{_TEXT})(?:, (?P<new>{_TEXT}))?\))?"
    rf"|\b(?P<text>drop)\((?P<glob>{_TEXT})\)"  # as a rule is named in an error about it
)


def to_shell_wording(text: str, commands: Mapping[str, click.Command], arguments: Sequence[str]) -> str:
    """Replaces Python's arguments and rules in a message by the options of the command.

    Advice to pass an argument is removed if the command has no option for it.
    """
    command = next((commands[one] for one in arguments if one in commands), None)
    options = {option.name: option for option in command.params if option.name} if command else {}

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2]
        if name not in options:
            return match[0]
        return options[name].opts[-1] + ("" if value in ("", "True") else f" {value.removeprefix('math.')}")

    def rule(match: re.Match[str]) -> str:
        name = match["rule"] or match["text"]
        if name not in options:
            return match[0]
        values = [ast.literal_eval(value) for value in (match["old"], match["new"]) if value is not None]
        return f"--{name} {match['glob'] or (shlex.quote('='.join(values)) if values else '')}".rstrip()

    argument = "source_format" if "source_format" in options else "format"
    text = _SOURCE_FORMAT.sub(rf"{argument}=\g<name>", text)
    parts = _MESSAGE_PATH.split(text)  # The pattern has one group, so every second part is a path.
    parts[::2] = (
        _PYTHON_ADVICE.sub("", _PYTHON_RULE.sub(rule, _PYTHON_ARGUMENT.sub(option, part))) for part in parts[::2]
    )
    text = "".join(parts)
    return text.replace("math.inf", "inf") if "max_expansion" in options else text
