"""`shardplan completion`: shell completion of commands, options and bundled names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
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
