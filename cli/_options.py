"""Options that several commands share."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_NAMES = {
    "models": ("bundled_names",),
    "hardware": ("cluster_names", "device_names"),
    "devices": ("device_names",),
    "stacks": ("stack_names",),
    "systems": ("systems.names",),
}
"""Functions of `planner` whose names complete an argument."""


def complete(*kinds: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Completion of bundled names by kind, and of file names."""

    def items(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        import planner

        functions = (operator.attrgetter(name)(planner) for kind in kinds for name in _NAMES[kind])
        names = sorted({name for function in functions for name in function() if name.startswith(incomplete)})
        return [*(CompletionItem(name) for name in names), CompletionItem(incomplete, type="file")]

    return items


model_argument: Decorator = click.argument("model", shell_complete=complete("models"))
dims_option: Decorator = click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=SIZE",
    help="Size of a symbolic dimension, or `batch`/`seq` of a bundled model or config.json; repeatable. A symbolic "
    "batch needs none: it is taken as 1, and the micro-batch is searched.",
)
hardware_option: Decorator = click.option(
    "--hardware",
    "-H",
    required=True,
    shell_complete=complete("hardware"),
    help="Hardware profile: a name or a YAML file.",
)


class Nodes(click.ParamType):  # type: ignore[type-arg]
    """`4`, or `4x64`: a number of nodes, and how many devices of each are used."""

    name = "N[xDEVICES]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:  # noqa: ANN401
        """A number, or the text that `planner.load_cluster` reads."""
        text = str(value).lower()
        if not re.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*)?", text):
            self.fail(f"{value!r} is not a number of nodes of at least 1, nor one such as 4x64", param, ctx)
        return text if "x" in text else int(text)


nodes_option: Decorator = click.option(
    "--nodes", type=Nodes(),
    help="Number of nodes, instead of the profile's own; 4x64 uses 64 devices of each of 4, of racks of 72 say.",
)  # fmt: skip
stack_option: Decorator = click.option(
    "--stack", default="", metavar="NAME", shell_complete=complete("stacks"),
    help="Software that trains: a name (`shardplan hardware list --stacks`) or a YAML file. [default: megatron-2025, "
    "or that of the plan file]",
)  # fmt: skip
costs_option: Decorator = click.option(
    "--costs", metavar="FILE", help="Seconds of the model's operators, as `profile -o` writes them, in place of rules."
)
devices_option: Decorator = click.option("--devices", type=click.IntRange(min=1), help="Use at most this many devices.")
batch_option: Decorator = click.option(
    "--global-batch", "-b", type=click.IntRange(min=1), help="Samples per optimizer step. [default: 8 a device]"
)
optimizer_option: Decorator = click.option(
    "--optimizer",
    default="adam",
    show_default=True,
    help="adam, adamw, lamb, momentum, sgd, adafactor; adam:moments=bf16 halves its moments.",
)
attention_option: Decorator = click.option(
    "--attention",
    type=click.Choice(["fused", "eager"]),
    default="fused",
    show_default=True,
    help="Whether attention keeps its score matrix.",
)
price_option: Decorator = click.option(
    "--price", type=click.FloatRange(min=0, min_open=True), metavar="DOLLARS",
    help="Price of a device and hour, for what the headline says of costs. [default: the profile's, where it has one]",
)  # fmt: skip
set_option: Decorator = click.option(
    "--set", "changes", multiple=True, metavar="FIELD=VALUE",
    help="Change a figure of the hardware or the stack: network.bandwidth=200Gbit/s, nvlink.latency=3us, "
    "device.memory=141GB, stack.launch=5us; repeatable (docs/questions.md).",
)  # fmt: skip
strict_option: Decorator = click.option(
    "--strict-ops", is_flag=True, help="Refuse models with operators that have no pricing rule."
)
headroom_option: Decorator = click.option(
    "--headroom", metavar="PERCENT", default="5%", show_default=True,
    callback=lambda _, __, value: parse_headroom(value),
    help="Part of each device's memory that plans leave free, for what an allocator holds beyond the tensors.",
)  # fmt: skip


def for_option(text: str) -> Decorator:
    """`--for`, with what it means for the command."""
    return click.option("--for", "backends", multiple=True, metavar="NAME", help=text)


SAMPLES_A_DEVICE = 8
"""Global batch where none is given, a device."""


def format_option(*forms: str) -> Decorator:
    """`--format`, the first of some forms by default."""
    return click.option(
        "--format", "form", type=click.Choice(forms), default=forms[0], show_default=True, help="What to print."
    )


def against_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The model and the hardware that a plan is held against."""
    model = click.option(
        "--model",
        metavar="MODEL",
        shell_complete=complete("models"),
        help="ONNX file, config.json or bundled model that the plan is for.",
    )
    hardware = click.option(
        "--hardware",
        "-H",
        metavar="NAME",
        shell_complete=complete("hardware"),
        help="Hardware profile (name or YAML file) that the plan is for.",
    )
    return model(dims_option(costs_option(hardware(nodes_option(stack_option(command))))))


def load_against(
    own_stack: str,
    *,
    model: str | None,
    dims: Sequence[str],
    costs: str | None,
    hardware: str | None,
    nodes: int | str | None,
    stack: str,
    changes: Sequence[str] = (),
) -> tuple[Any, Any]:
    """The graph and the cluster that a plan is held against, None for what is not named; by default under its own.

    Raises:
        click.UsageError: sizes without a model, or nodes without hardware.
    """
    import planner

    for flag, some in (("--dim", dims), ("--costs", costs)):
        if some and not model:
            raise click.UsageError(f"{flag} needs --model")
    for flag, given in (("--nodes", nodes), ("--stack", stack), ("--set", changes)):
        if given and not hardware:
            raise click.UsageError(f"{flag} needs --hardware")
    graph = load_graph(model, dims, costs) if model else None
    if not hardware:
        return graph, None
    return graph, planner.load_cluster(hardware, nodes=nodes, stack=stack or own_stack, changes=changes)


def plan_nodes(plan: Any, hardware: str) -> int | None:  # noqa: ANN401
    """How many nodes make the plan's devices of a profile that has another number by itself."""
    import planner

    own = planner.load_cluster(hardware).device_count
    return None if own == plan.hardware.device_count else plan.hardware.nodes


def parse_headroom(text: str) -> float:
    """`5%` or `0.05` as a fraction.

    Raises:
        click.BadParameter: something else, or nothing left.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", text)
    value = float(found[1]) / (100 if found[2] else 1) if found else 1.0
    if value >= 1:
        raise click.BadParameter(f"{text!r} is not a part of the memory such as 5%", param_hint="--headroom")
    return value


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """`8` or `1,2,4,8`: whole numbers of at least one."""

    name = "N[,N..]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:  # noqa: ANN401
        """A tuple, ascending."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is not a list of whole numbers such as 1,2,4", param, ctx)
        return tuple(sorted({int(part) for part in parts}))


class Meshes(click.ParamType):  # type: ignore[type-arg]
    """`8` or `2x8,4x8`: ranks by axis, outermost first."""

    name = "NxN[,NxN..]"

    def convert(
        self,
        value: Any,  # noqa: ANN401
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[tuple[int, ...], ...]:
        """A tuple of meshes."""
        if isinstance(value, tuple):
            return value
        axes = [mesh.strip().lower().split("x") for mesh in str(value).split(",")]
        if not all(size.isdigit() and int(size) > 0 for mesh in axes for size in mesh):
            self.fail(f"{value!r} is not a mesh such as 8 or 2x8", param, ctx)
        return tuple(dict.fromkeys(tuple(int(size) for size in mesh) for mesh in axes))


class Kept(click.ParamType):  # type: ignore[type-arg]
    """`layer3 on stage 0`, or `layer3=0`."""

    name = "BLOCK on stage N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:  # noqa: ANN401
        """A block's name and a stage's number."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"\s*(.+?)\s*(?:\s+on\s+stage\s+|=)\s*(-?\d+)\s*", str(value))
        if not found:
            self.fail(f"{value!r} is not like `layer3 on stage 0`", param, ctx)
        return found[1], int(found[2])


def read_file(path: str) -> bytes:
    """What a file holds; `-` is standard input, and `REV:path` a file of a git revision where no file has that name.

    Raises:
        PlanError: it is missing or cannot be read.
    """
    import planner

    if path == "-":
        return planner.input_bytes()
    try:
        revised = _at_revision(path)
        return Path(path).read_bytes() if revised is None else revised
    except OSError as error:
        message = f"cannot read: {error.strerror or error}"
        raise planner.PlanError(message, where=path, hint="name a file that `shardplan` wrote") from error


def _at_revision(path: str) -> bytes | None:
    """What `git show REV:path` says; None where the name is that of a file, or not of this form.

    Raises:
        PlanError: git does not find it; its own words say what is missing.
    """
    import planner

    if not re.fullmatch(r"[^:/\\][^:]+:.+", path) or os.path.exists(path):
        return None
    try:
        shown = subprocess.run(["git", "show", path], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if shown.returncode:
        lines = shown.stderr.decode(errors="replace").strip().splitlines() or ["git show failed"]
        hint = "name a file, or REV:path of this git repository, such as main:model.plan.json"
        raise planner.PlanError(lines[0].removeprefix("fatal: "), where=path, hint=hint)
    return shown.stdout


@contextlib.contextmanager
def file_at(path: str) -> Iterator[str]:
    """The name of a file that holds what `REV:path` says, for as long as it is needed; any other name as it is."""
    content = _at_revision(path)
    if content is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / Path(path).name.rpartition(":")[2]
        copy.write_bytes(content)
        yield str(copy)


def beside(plan_file: str, name: str) -> str:
    """A file that a plan names without its folder: here, else where the plan lies; any other name as it is."""
    there = Path(plan_file).parent / name
    return str(there) if name and not os.path.exists(name) and there.is_file() else name


def shown_name(path: str) -> str:
    """What errors call a file that may be standard input."""
    return "standard input" if path == "-" else path


def given(ctx: click.Context) -> list[str]:
    """Names of the options on the command line."""
    return [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def refuse_others(ctx: click.Context, takes: Collection[str], what: str, hint: str = "leave it out") -> None:
    """Refuse options on the command line that this use of a command takes no heed of.

    Raises:
        UsageError: names the first of them.
    """
    import planner

    stray = [name for name in given(ctx) if name not in takes]
    if stray:
        flag = next(p for p in ctx.command.params if p.name == stray[0]).opts[0]
        raise planner.UsageError(f"{flag} does not apply to {what}", hint=hint)


def load_graph(model: str, dims: Sequence[str], costs: str | None = None) -> Any:  # noqa: ANN401
    """The model with the sizes of its dimensions, and the costs of its operators where a file has them."""
    import planner

    graph = planner.load_graph(model, dims=parse_dims(dims))
    return planner.costs.with_costs(graph, read_file(costs), shown_name(costs)) if costs else graph


def parse_dims(values: Sequence[str]) -> dict[str, int]:
    """`("batch=8", "seq=2048")` as a mapping.

    Raises:
        click.BadParameter: a value is not NAME=SIZE with a positive whole size.
    """
    dims: dict[str, int] = {}
    for value in values:
        name, sign, size = value.partition("=")
        if not sign or not name or not size.isdigit() or int(size) < 1:
            raise click.BadParameter(f"{value!r} is not NAME=SIZE, such as batch=8", param_hint="--dim")
        if name in dims:
            raise click.BadParameter(f"{name!r} is given twice", param_hint="--dim")
        dims[name] = int(size)
    return dims
