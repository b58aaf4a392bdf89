"""The command `treering`: its subcommands and exit codes. It prints errors without tracebacks."""

import ast
import contextlib
import difflib
import io
import logging
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence

import click
from click.shell_completion import get_completion_class

from .._printable import safe, safe_lines
from .._version import __version__
from ..errors import TreeringError
from . import contents, copying, deleting, listing, runs, verifying, viewing
from .output import FAILED, say

# A message begins with a path, up to a colon. The path may have spaces, and stays as it is.
_MESSAGE_PATH = re.compile(r"((?:\A|(?<=: ))(?:[A-Za-z][\w+.-]*:)?[/\\].*?(?=: ))")
# An argument inside another path, such as /data/step=3, does not match.
_PYTHON_ARGUMENT = re.compile(r"(?<![^\s(])([a-z_]+)=(True|'[^']*'|\"[^\"]*\"|[\w.+-]*[\w]|(?=$|[\s;,.)]))")
_PYTHON_ADVICE = re.compile(
    r"(?:[;,:]|,? or) pass [a-z_]+=[^;\n]*"
    r"|, or pass a store that is registered with [^;\n]*"
    r"|; treering\.stores\.register adds one|, or pass a store of obstore"
    r"| \(reading needs no Checkpointer: [^)]*\)"
    r"| \(tr\.open: [^\n]*\)"
    r"|, or clip them with rules before the cast: \[[^\n]*\]"
    r"| to continue from there"
    r"| to Checkpointer\b"
)
_SOURCE_FORMAT = re.compile(r"\bformat=(?P<name>'[^']*') \(treering\.convert: source_format=\)")
_TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_PYTHON_RULE = re.compile(
    rf"\b(?:tr|treering)\.rules\.(?P<rule>drop|rename)\b(?:\((?P<old>{_TEXT})(?:, (?P<new>{_TEXT}))?\))?"
    rf"|\b(?P<text>drop|rename)\((?P<glob>{_TEXT})(?:, …)?\)"  # as a rule is named in an error about it
)
_NO_COMMAND = re.compile(r"No such command '(.*)'\.")
_NAME = "treering"
_COMPLETE_VARIABLE = "_TREERING_COMPLETE"  # set by the shell that asks for completions
_SIGPIPE = getattr(signal, "SIGPIPE", 13)


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
        if name not in options and match["text"]:
            return match[0]
        values = [ast.literal_eval(value) for value in (match["old"], match["new"]) if value is not None]
        said = f"--{name} {match['glob'] or (shlex.quote('='.join(values)) if values else '')}".rstrip()
        return said if name in options else f"`treering convert {said}`"

    argument = "source_format" if "source_format" in options else "format"
    text = _SOURCE_FORMAT.sub(rf"{argument}=\g<name>", text)
    parts = _MESSAGE_PATH.split(text)  # The pattern has one group, so every second part is a path.
    parts[::2] = (
        _PYTHON_ADVICE.sub("", _PYTHON_RULE.sub(rule, _PYTHON_ARGUMENT.sub(option, part))) for part in parts[::2]
    )
    text = "".join(parts)
    return text.replace("math.inf", "inf") if "max_expansion" in options else text


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name=_NAME)
@click.option("--debug", is_flag=True, help="Print the traceback of an error, and log each action.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Look into checkpoints of JAX programs, and manage the runs that they belong to.

    A path is a file, a directory or a URL (s3://, gs://, az://, https://), in any format: Treering's own, Orbax, T5X,
    Flax, Equinox, Levanter, FJFormer, safetensors, TensorFlow. If a command expects a checkpoint, a run stands for its
    latest valid step.

    Exit codes: 0 done; 1 the answer is no (diff: they differ, verify: there is damage, cp and convert: steps are left
    behind, migrate: something is left to do by hand); 2 wrong usage; 3 an error, which is printed; 130 interrupted; 141
    the reader of the output has gone.
    """
    context.obj = debug


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a SHELL. For bash: eval "$(treering completion bash)" in ~/.bashrc."""
    kind = get_completion_class(shell)
    assert kind is not None
    say(kind(cli, {}, _NAME, _COMPLETE_VARIABLE).source())


for module in (listing, contents, verifying, runs, deleting, viewing, copying):
    for command in module.COMMANDS:
        cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with these arguments, by default the program's, and returns its exit code."""
    if _COMPLETE_VARIABLE in os.environ:
        cli.main(prog_name=_NAME, complete_var=_COMPLETE_VARIABLE)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _prepare_streams()
    try:
        return _run(arguments, "--debug" in arguments)
    except BrokenPipeError:  # The reader of stdout or stderr has gone, such as `head`.
        _discard_output()
        return 128 + _SIGPIPE
    except (KeyboardInterrupt, click.Abort):
        say("interrupted", err=True)
        return 130


def _run(arguments: list[str], debug: bool) -> int:
    """Runs the command and returns its exit code. Prints errors and returns their exit code."""
    said: list[str] = []
    try:
        with _log_on_stderr(arguments, debug, said):
            return _invoke(arguments)
    except (BrokenPipeError, click.Abort):
        raise
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        if isinstance(error, click.BadOptionUsage):  # Of "requires 2 arguments", say which.
            command = next((cli.commands[one] for one in arguments if one in cli.commands), cli)
            named = [one for one in command.params if error.option_name in one.opts and one.nargs > 1]
            more = "".join(f" Expected {error.option_name} {one.metavar}." for one in named)
            error = click.BadOptionUsage(error.option_name, error.message + more, error.ctx)
        elif isinstance(error, click.NoSuchOption) and error.option_name == "--step":
            is_list = error.ctx is not None and error.ctx.command.name == "ls"
            instead = "`treering show` has it" if is_list else "PATH may be a step, such as RUN/step-00001000"
            error = click.UsageError(f"No such option '--step'; {instead}", error.ctx)
        elif isinstance(error, click.UsageError) and (unknown := _NO_COMMAND.fullmatch(error.message)):
            similar = difflib.get_close_matches(unknown[1], cli.commands, n=1)
            meant = f"perhaps '{similar[0]}'" if similar else f"there are {', '.join(sorted(cli.commands))}"
            error = click.UsageError(f"{error.message.removesuffix('.')}; {meant}", error.ctx)
        elif isinstance(error, click.UsageError) and re.search(r"unexpected extra arguments? \(.*\d\)", error.message):
            options = [] if error.ctx is None else error.ctx.command.params
            if step := next((one for one in options if one.opts[0] in ("--step", "--steps")), None):
                error = click.UsageError(f"{error.message}. Steps are {step.opts[0]} {step.metavar}", error.ctx)
        error.show()
        return error.exit_code
    except (TreeringError, OSError, ImportError, MemoryError) as error:
        what = str(error) if isinstance(error, TreeringError | OSError) else repr(error)
        what = to_shell_wording(what, cli.commands, arguments)
        if debug or not any(line.endswith(f": {what}") for line in said):  # The log may have said it, with the step.
            _say_error(debug, what)
        for note in getattr(error, "__notes__", ()) if isinstance(error, TreeringError) else ():
            say(click.style(safe(note), dim=True), err=True)
        return FAILED
    except Exception as error:
        _say_error(debug, f"a defect of Treering: {error!r}. Report it with the output of --debug.")
        return FAILED


def _say_error(debug: bool, what: str) -> None:
    if debug:
        say(safe_lines(traceback.format_exc()), err=True)
    say(f"{click.style('error:', fg='red')} {safe_lines(what)}", err=True)


def _prepare_streams() -> None:
    """Makes the standard streams usable. One may be closed, unbuffered, or in an encoding that lacks characters."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            # It stays open as long as the program runs.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif isinstance(getattr(stream, "buffer", None), io.FileIO) and mode == "w":
            # With PYTHONUNBUFFERED, Python loses the rest of a text without an error if its reader goes away.
            raw = io.FileIO(stream.fileno(), mode, closefd=False)
            buffered = io.TextIOWrapper(
                io.BufferedWriter(raw), stream.encoding, errors="backslashreplace", line_buffering=True
            )
            setattr(sys, name, buffered)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Drops what stdout still buffers. Otherwise the last flush of the interpreter fails."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _invoke(arguments: list[str]) -> int:
    try:
        with cli.make_context(_NAME, arguments) as context:
            return cli.invoke(context) or 0
    finally:
        try:
            sys.stdout.flush()
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # For instance, the disk is full.
                _discard_output()
            raise


class _StderrHandler(logging.Handler):
    """Prints each log record as a line. It looks up the stream for each record, because tests replace it."""

    def __init__(self, arguments: Sequence[str], said: list[str]):
        super().__init__()
        self._arguments, self._said = arguments, said

    def emit(self, record: logging.LogRecord) -> None:
        message = to_shell_wording(record.getMessage(), cli.commands, self._arguments)
        say(f"{record.levelname.lower()}: {safe(message)}", err=True)
        if record.levelno == logging.ERROR:
            self._said.append(message)


@contextlib.contextmanager
def _log_on_stderr(arguments: Sequence[str], debug: bool, said: list[str]) -> Iterator[None]:
    """Prints the library's log on stderr within a `with` block. Adds its errors to `said`."""
    log, handler = logging.getLogger("treering"), _StderrHandler(arguments, said)
    before = log.propagate, log.level
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG if debug else logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = before[0]
        log.setLevel(before[1])
