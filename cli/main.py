"""Entry point of the `shardplan` command: finds the sub-command, turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import click

COMMANDS = {
    "plan": "Plan a model on a cluster and write the plan file.",
    "predict": "Price exactly one configuration of a model on a cluster.",
    "calibrate": "Fit a stack to measured iterations of your own.",
    "compare": "Compare what the named systems would do with a model on a cluster.",
    "sweep": "Plan with many values of devices, batch, sequence, options and figures of hardware.",
    "profile": "Price a model: totals, costliest blocks and operators, coverage.",
    "check": "Check a plan file against its schema, model and hardware.",
    "migrate": "Write a plan file of an older version as one of this version.",
    "explain": "Say why a plan is as it is: bottleneck, memory, next best plans.",
    "simulate": "Play a plan's schedule out: step time, bubble, memory over time.",
    "report": "Write a plan as a page of HTML that stands alone: charts, tables, assumptions.",
    "export": "Write a plan in the files of a training framework.",
    "run": "Train by a plan on this machine, and compare its gradients with the whole model's.",
    "diff": "Compare two plans by meaning.",
    "hardware": "List, show, lint and write hardware profiles.",
    "models": "List and build bundled models.",
    "schema": "Print the JSON Schema of a file format.",
    "completion": "Print what makes a shell complete commands, options and names.",
}

GARBAGE_THRESHOLDS = (100_000, 50, 100)
"""Objects after which circles of dead ones are looked for, and how many looks among the young come before one among
the old. At Python's 700, 10 and 10 that takes 7 to 9 % of a plan's time, 20 % where a model has 100,000 operators."""


class _LazyGroup(click.Group):
    """Sub-commands are modules beside this one, imported only when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"{__package__}.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import planner

            raise click.UsageError(
                f"no such command {args[0]!r} ({planner.registry.did_you_mean(args[0], COMMANDS)})", ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks (may stand anywhere on the line).")
@click.version_option(package_name="shardplan")
def app() -> None:
    """Plan how to split a DNN training job over devices, and prove it.

    \b
    Examples:
      shardplan plan model.onnx --hardware dgx-a100 --global-batch 512 -o model.plan.json
      shardplan plan llama3-70b --hardware dgx-h100 --nodes 8
      shardplan explain model.plan.json
    """


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exits the process with a code that says the kind of failure."""
    given = sys.argv[1:] if argv is None else argv
    arguments = [argument for argument in given if argument != "--debug"]
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    try:
        with _checked_output(), _aside(arguments):
            result: Any = app.main(args=arguments, prog_name="shardplan", standalone_mode=False)
            sys.stdout.flush()
    except click.exceptions.Abort:
        _say("interrupted")
        sys.exit(130)
    except click.ClickException as error:
        sys.exit(_report_usage(error))
    except (BrokenPipeError, SystemExit) as ended:
        if isinstance(ended, SystemExit) and not ended.code:  # a shell has been told its completions
            raise
        _discard(sys.stdout)  # nobody reads the output any more
        sys.exit(141)
    except Exception as error:
        if len(arguments) < len(given):
            raise
        sys.exit(_report(error))
    sys.exit(result if isinstance(result, int) else 0)


def _aside(arguments: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Where a file goes to standard output (`-o -`), what is printed goes to standard error."""
    pairs = itertools.pairwise(arguments)
    if not any(flag in _FILES and name == "-" for flag, name in pairs) and "-o-" not in arguments:
        return contextlib.nullcontext()
    import planner

    return planner.files.talk_aside()


def _report_usage(error: click.ClickException) -> int:
    """Print what click found wrong as one line, with where to read on; a bare group prints its help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    name = context.command_path if context else "shardplan"
    message = " ".join(error.format_message().split())
    _say(f"shardplan: error: {message.rstrip('.')} (see `{name} --help`)")
    return int(error.exit_code)


def _report(error: Exception) -> int:
    """Print an error as one line (plus one line for each further finding) and give its exit code."""
    import planner

    if isinstance(error, planner.ShardplanError):
        findings = error.problems or (error.problem,)
        for finding in findings:
            _say(f"shardplan: error: {finding}")
            if finding.excerpt:
                _say(finding.excerpt)
        return int(error.exit_code)
    _say(f"shardplan: internal error: {type(error).__name__}: {error} (run again with --debug)")
    return 70


def _say(text: str) -> None:
    """Print a line on standard error; where that cannot be written either, the exit code has to do."""
    try:
        click.echo(text, err=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere, so that Python does not fail over it again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_FILES = ("-o", "--output", "--svg", "--trace", "--plot")
"""Options that name a file to write."""


class _CheckedStream:
    """Standard output whose failures (a full device) are errors of the output, not of this program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed = False

    def write(self, text: str) -> int:
        with self._checked():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._checked():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            import planner

            self.failed = True
            what, hint = f"cannot write: {error.strerror or error}", "make room, or use -o FILE"
            raise planner.OutputError(what, where="standard output", hint=hint) from error


@contextlib.contextmanager
def _checked_output() -> Iterator[None]:
    """Let writing to standard output end in an `OutputError` where it fails."""
    stream = sys.stdout
    checked = _CheckedStream(stream)
    try:
        with contextlib.redirect_stdout(checked):
            yield
    finally:
        if checked.failed:
            _discard(stream)
