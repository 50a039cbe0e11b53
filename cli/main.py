"""Entry point of the `shardplan` command: loads the sub-command, reports errors as one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click
from click.shell_completion import get_completion_class

import planner

COMMANDS = {
    "plan": "Plan a model on a cluster and write the plan file.",
    "predict": "Price exactly one configuration of a model on a cluster.",
    "calibrate": "Fit a software stack to iteration times that you measured.",
    "compare": "Compare published systems and training frameworks on a model and a cluster.",
    "sweep": "Plan for every combination of values of devices, batch, options or hardware figures.",
    "profile": "Estimate a model's time and memory on one device, by layer and operator.",
    "check": "Check a plan file against its schema, model and hardware.",
    "migrate": "Convert a plan file of an older version to this version.",
    "explain": "Explain a plan: bottleneck, memory, alternatives, what is proven.",
    "simulate": "Simulate a plan's schedule: step time, bubble, memory over time.",
    "report": "Write a plan as a self-contained HTML page: charts, tables, assumptions.",
    "export": "Write a plan as configuration files of a training framework.",
    "run": "Run a plan on this machine, and check its gradients against the unsplit model.",
    "diff": "Compare two plans: inputs, decisions, costs.",
    "hardware": "List, show, check, create and import hardware profiles.",
    "models": "List and build bundled models.",
    "schema": "Print the JSON Schema of a file format.",
    "completion": "Print a completion script for bash, zsh or fish.",
}

GARBAGE_THRESHOLDS = (100_000, 50, 100)
"""Thresholds of Python's garbage collector: at the default of 700, 10 and 10 it takes 7 to 9 % of the time of a plan,
20 % with 100,000 operators."""


_OF_PLAN_FILES = ("check", "migrate", "explain", "simulate", "report", "export", "schema")
_MODULES = dict.fromkeys(_OF_PLAN_FILES, "plan_files") | {
    "calibrate": "predict",
    "sweep": "compare",
    "profile": "models",
}
"""Modules of commands that share one; each other command is `command` of a module with its name."""


class _LazyGroup(click.Group):
    """Sub-commands are in modules beside this one, imported only when used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS or cmd_name in self.commands:
            return self.commands.get(cmd_name)
        module, name = _MODULES.get(cmd_name, cmd_name), cmd_name if cmd_name in _MODULES else "command"
        command: click.Command = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(
                f"no such command {args[0]!r} ({planner.registry.did_you_mean(args[0], COMMANDS)})", ctx
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--debug", is_flag=True, expose_value=False, help="Show tracebacks of errors (allowed anywhere on the line)."
)
@click.version_option(package_name="shardplan")
def app() -> None:
    """Plan how to split a DNN training job over devices, and prove it.

    \b
    Examples:
      shardplan plan model.onnx --hardware dgx-a100 --global-batch 512 -o model.plan.json
      shardplan plan llama3-70b --hardware dgx-h100 --nodes 8
      shardplan explain model.plan.json
    """


@app.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script with which SHELL completes commands, options, and names of models, hardware and systems.

    \b
    Examples:
      shardplan completion bash >> ~/.bashrc
      shardplan completion zsh >> ~/.zshrc
      shardplan completion fish > ~/.config/fish/completions/shardplan.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}", ctx)
    click.echo(kind(ctx.find_root().command, {}, "shardplan", "_SHARDPLAN_COMPLETE").source())


def main(argv: list[str] | None = None) -> None:
    """Run the command line, and exit with a code for the kind of failure."""
    given = sys.argv[1:] if argv is None else argv
    arguments = [argument for argument in given if argument != "--debug"]
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    try:
        with _messages_aside(arguments):
            result: Any = app.main(args=arguments, prog_name="shardplan", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Abort:
        _print_error("interrupted")
        sys.exit(130)
    except click.ClickException as error:
        sys.exit(_report_usage(error))
    except (BrokenPipeError, SystemExit) as ended:
        if isinstance(ended, SystemExit) and not ended.code:  # shell completion has printed its result
            raise
        _discard(sys.stdout)  # nobody reads the output any more
        sys.exit(141)
    except Exception as error:
        told = _of_output(error)
        if len(arguments) < len(given):
            raise
        sys.exit(_report(told))
    sys.exit(result if isinstance(result, int) else 0)


def _messages_aside(arguments: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    """Redirects messages to standard error while a file goes to standard output (`-o -`)."""
    pairs = itertools.pairwise(arguments)
    if not any(flag in _FILES and name == "-" for flag, name in pairs) and "-o-" not in arguments:
        return contextlib.nullcontext()
    return planner.files.talk_aside()


def _report_usage(error: click.ClickException) -> int:
    """Print a usage error as one line that refers to `--help`; a group without a command prints its help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    name = context.command_path if context else "shardplan"
    message = " ".join(error.format_message().split())
    _print_error(planner.escaping.visible(f"shardplan: error: {message.rstrip('.')} (see `{name} --help`)"))
    return int(error.exit_code)


def _report(error: Exception) -> int:
    """Print an error, one line for each of its findings, and return its exit code."""
    if isinstance(error, planner.ShardplanError):
        findings = error.problems or (error.problem,)
        for finding in findings:
            _print_error(f"shardplan: error: {finding}")
            if finding.excerpt:
                _print_error(finding.excerpt)
        return int(error.exit_code)
    words = f"shardplan: internal error: {type(error).__name__}: {error} (run again with --debug)"
    _print_error(planner.escaping.visible(words))
    return 70


def _of_output(error: Exception) -> Exception:
    """A failure to write to standard output as `OutputError`, after what is left to write is discarded; others as is.

    Errors of files are the library's own by now: a bare error of a device is of standard output.
    """
    if not isinstance(error, OSError) or error.filename is not None or error.errno not in _CANNOT_WRITE:
        return error
    _discard(sys.stdout)
    what, hint = f"cannot write: {error.strerror or error}", "make room, or use -o FILE"
    return planner.OutputError(what, where="standard output", hint=hint)


def _print_error(text: str) -> None:
    """Print a line on standard error; if that fails, too, only the exit code remains."""
    try:
        click.echo(text, err=True)
    except OSError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Discard what a stream still buffers, so that Python does not fail on it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_FILES = ("-o", "--output", "--svg", "--trace", "--plot")
"""Options that name a file to write."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of writing to a device: full, failing, or closed."""
