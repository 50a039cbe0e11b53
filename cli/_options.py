"""Options that several commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

import planner

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
Options = SimpleNamespace
"""Arguments and options of a command, by name."""


def command(name: str, group: Any = click, **settings: Any) -> Callable[[Callable[[Options], Any]], click.Command]:  # noqa: ANN401
    """A command, of a group if one is given, whose function takes its arguments and options as one record."""

    def added(function: Callable[[Options], Any]) -> click.Command:
        @functools.wraps(function)
        def call(**options: Any) -> Any:  # noqa: ANN401
            return function(Options(**options))

        made: click.Command = group.command(name, **settings)(call)
        return made

    return added


flag = functools.partial(click.option, is_flag=True)
"""An option without a value."""
count = functools.partial(click.option, type=click.IntRange(min=1))
"""An option whose value is a whole number of at least 1."""
file_to_write = functools.partial(click.option, type=click.Path(dir_okay=False))
"""An option that names a file to write."""


class FileText(click.types.StringParamType):
    """The type of a parameter that may name a file to read.

    Attributes:
        holds: what the file holds, such as `model` or `costs`.
    """

    def __init__(self, holds: str) -> None:
        self.holds = holds


class FilePath(click.Path):
    """The type of a parameter that names a file or folder to read.

    Attributes:
        holds: what the file holds.
    """

    def __init__(self, holds: str, **further: Any) -> None:  # noqa: ANN401
        super().__init__(**further)
        self.holds = holds


MODEL, HARDWARE, STACK, PLAN = map(FileText, ("model", "hardware", "stack", "plan"))
"""Types of the files that most commands read."""


def choice(*names: str, of: Sequence[str], **further: Any) -> Decorator:  # noqa: ANN401
    """An option with one of some values; the first is the default."""
    return click.option(*names, type=click.Choice(of), default=of[0], show_default=True, **further)


_NAMES = {
    "models": ("bundled_names",),
    "hardware": ("cluster_names", "device_names"),
    "devices": ("device_names",),
    "stacks": ("stack_names",),
    "systems": ("systems.names",),
}
"""Functions of `planner` that list the names for completion, by kind."""


def complete(*kinds: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Completion of bundled names by kind, and of file names."""

    def items(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        functions = (operator.attrgetter(name)(planner) for kind in kinds for name in _NAMES[kind])
        names = sorted({name for function in functions for name in function() if name.startswith(incomplete)})
        return [*(CompletionItem(name) for name in names), CompletionItem(incomplete, type="file")]

    return items


model_argument: Decorator = click.argument("model", type=MODEL, shell_complete=complete("models"))
dims_option: Decorator = click.option(
    "--dim",
    "dims",
    multiple=True,
    metavar="NAME=SIZE",
    help="Size of a symbolic dimension, or `batch`/`seq` of a bundled model or config.json; repeatable. A symbolic "
    "batch needs no size: the micro-batch size is searched.",
)


def hardware_option(
    help_text: str = "Hardware profile: a name (`shardplan hardware list`) or a YAML file.",
    **further: Any,  # noqa: ANN401
) -> Decorator:
    """`--hardware`."""
    completed = complete("hardware")
    return click.option("--hardware", "-H", type=HARDWARE, shell_complete=completed, help=help_text, **further)


def parsed(name: str, read: Callable[[str], Any], wanted: str) -> click.ParamType[Any]:
    """An option type whose value a function reads from text.

    Args:
        name: name in `--help`.
        read: converts the text; gives None if it cannot be read.
        wanted: end of the error message, which begins with the text.
    """

    def convert(text: str) -> Any:  # noqa: ANN401
        value = read(text)
        if value is None:
            raise click.BadParameter(f"{text!r} is {wanted}")
        return value

    kind = click.types.FuncParamType(convert)
    kind.name = name
    return kind


def read_nodes(text: str) -> int | str | None:
    """A number, or the text that `planner.load_cluster` reads."""
    if not re.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*)?", text.lower()):
        return None
    return text.lower() if "x" in text.lower() else int(text)


def fraction(most: float) -> click.ParamType[Any]:
    """`5%` or `0.05`: a fraction from 0 to below `most`."""

    def read(text: str) -> float | None:
        try:
            value = planner.units.parse(text, planner.units.Dimension.FRACTION)
        except planner.UsageError:
            return None
        return value if 0 <= value < most else None

    return parsed("PERCENT", read, "not a part such as 5% or 0.05")


NODES = parsed("N[xDEVICES]", read_nodes, "not a number of nodes of at least 1, nor one such as 4x64")
"""`4`, or `4x64`: a number of nodes, and how many devices of each are used."""

nodes_option: Decorator = click.option(
    "--nodes", type=NODES,
    help="Number of nodes. [default: the profile's] 4x64 uses 64 devices of each of 4 nodes (of racks of 72, say).",
)  # fmt: skip
stack_option: Decorator = click.option(
    "--stack", default="", type=STACK, metavar="NAME", shell_complete=complete("stacks"),
    help="Training software: a name (`shardplan hardware list --stacks`) or a YAML file. [default: megatron-2025, or "
    "the plan's]",
)  # fmt: skip
costs_option: Decorator = click.option(
    "--costs",
    type=FileText("costs"),
    metavar="FILE",
    help="Use the operator times in this file (of `shardplan profile -o`) instead of estimates.",
)
devices_option: Decorator = count("--devices", help="Use at most this many devices.")
set_option: Decorator = click.option(
    "--set", "changes", multiple=True, metavar="FIELD=VALUE",
    help="Override a figure of the hardware or the stack: network.bandwidth=200Gbit/s, nvlink.latency=3us, "
    "device.memory=141GB, stack.launch=5us; repeatable (docs/questions.md).",
)  # fmt: skip
batch_option: Decorator = count("--global-batch", "-b", help="Samples per optimizer step. [default: 8 per device]")
optimizer_option: Decorator = click.option(
    "--optimizer",
    default="adam",
    show_default=True,
    help="adam, adamw, lamb, momentum, sgd or adafactor; adam:moments=bf16 stores its moments in bf16.",
)
overlap_option: Decorator = click.option(
    "--overlap",
    type=click.FloatRange(0, 1),
    help="Fraction of backward work that can hide gradient synchronisation. [default: the stack's]",
)
precision_option: Decorator = click.option(
    "--precision", help="Number formats, as in `plan`. [default: the best that all devices support]"
)
attention_option: Decorator = choice(
    "--attention", of=("fused", "eager"), help="fused: attention does not store its score matrix; eager: it does."
)
price_option: Decorator = click.option(
    "--price", type=click.FloatRange(min=0, min_open=True), metavar="DOLLARS",
    help="Price per device-hour in US dollars, for the costs in the headline. [default: the profile's, if it has one]",
)  # fmt: skip
strict_option: Decorator = flag("--strict-ops", help="Refuse models with operators that have no pricing rule.")
headroom_option: Decorator = click.option(
    "--headroom", type=fraction(1.0), default="5%", show_default=True,
    help="Part of each device's memory that plans leave free, for fragmentation and caches of the allocator.",
)  # fmt: skip


def machine_options(*, required: bool = True) -> Decorator:
    """Options for the cluster (read by `load_hardware`) and the number of devices to use."""

    def added(command: Callable[..., Any]) -> Callable[..., Any]:
        further = nodes_option(stack_option(set_option(devices_option(command))))
        wrapped: Callable[..., Any] = hardware_option(required=required)(further)
        return wrapped

    return added


def for_option(text: str) -> Decorator:
    """`--for`, with the help text of the command."""
    return click.option("--for", "backends", multiple=True, metavar="NAME", help=text)


def job_of(given: Options, device_count: int, **fields: Any) -> Any:  # noqa: ANN401
    """The `planner.Job` of the options that have the names of its fields; the library's defaults for the others.

    Args:
        given: the options.
        device_count: devices of the cluster, for the default batch.
        fields: further fields.
    """
    names = {field.name for field in dataclasses.fields(planner.Job)}
    asked = {name: value for name, value in vars(given).items() if name in names and value not in (None, (), "")}
    batch = planner.ask.SAMPLES_A_DEVICE * (given.devices or device_count)
    return planner.Job(**{"global_batch": batch, **asked, **fields})


def format_option(*forms: str) -> Decorator:
    """`--format`; the first form is the default."""
    return choice("--format", "form", of=forms, help="Output format.")


def against_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options for the model and the hardware that a plan is compared with."""
    model = click.option(
        "--model",
        type=MODEL,
        metavar="MODEL",
        shell_complete=complete("models"),
        help="Model of the plan: an ONNX file, a config.json or a bundled model.",
    )
    hardware = hardware_option("Hardware profile of the plan: a name or a YAML file.", metavar="NAME")
    return model(dims_option(costs_option(hardware(nodes_option(stack_option(command))))))


def load_against(own_stack: str, given: Options) -> tuple[Any, Any]:
    """The graph and the cluster that a plan is compared with, None for each that is not given.

    Args:
        own_stack: the plan's stack, used unless `--stack` is given.
        given: those of `against_options`, and of `set_option` where the command has it.

    Raises:
        click.UsageError: sizes without a model, or nodes without hardware.
    """
    for name, flag, needed in _BELONGS_TO:
        if getattr(given, name, None) and not getattr(given, needed):
            raise click.UsageError(f"{flag} needs --{needed}")
    graph = load_graph(given) if given.model else None
    if not given.hardware:
        return graph, None
    return graph, load_hardware(given, stack=given.stack or planner.hardware.named_stack(own_stack))


_BELONGS_TO = (
    ("dims", "--dim", "model"),
    ("costs", "--costs", "model"),
    ("nodes", "--nodes", "hardware"),
    ("stack", "--stack", "hardware"),
    ("changes", "--set", "hardware"),
)
"""Names of options, their flags, and the option that they require."""


def load_hardware(given: Options, **otherwise: Any) -> Any:  # noqa: ANN401
    """The cluster of `--hardware`, `--nodes`, `--stack` and `--set`.

    Args:
        given: the options.
        otherwise: arguments of `planner.load_cluster` that replace these values.

    Raises:
        JobError: `--devices` is more than it has.
    """
    named = {name: getattr(given, name) for name in ("nodes", "stack", "changes") if getattr(given, name, None)}
    cluster = planner.load_cluster(given.hardware, **{**named, **otherwise})
    planner.hardware.check_devices(cluster, getattr(given, "devices", None) or 0)
    return cluster


def _numbers(text: str) -> tuple[int, ...] | None:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        return None
    return tuple(sorted({int(part) for part in parts}))


NUMBERS = parsed("N[,N..]", _numbers, "not a list of whole numbers such as 1,2,4")
"""`8` or `1,2,4,8`: whole numbers of at least one, ascending."""


def _meshes(text: str) -> tuple[tuple[int, ...], ...] | None:
    axes = [mesh.strip().lower().split("x") for mesh in text.split(",")]
    if not all(size.isdigit() and int(size) > 0 for mesh in axes for size in mesh):
        return None
    return tuple(dict.fromkeys(tuple(int(size) for size in mesh) for mesh in axes))


MESHES = parsed("NxN[,NxN..]", _meshes, "not a mesh such as 8 or 2x8")
"""`8` or `2x8,4x8`: meshes as ranks by axis, outermost first."""


def _kept(text: str) -> tuple[str, int] | None:
    match = re.fullmatch(r"\s*(.+?)\s*(?:\s+on\s+stage\s+|=)\s*(-?\d+)\s*", text)
    return (match[1], int(match[2])) if match else None


KEPT = parsed("BLOCK on stage N", _kept, "not like `layer3 on stage 0`")
"""`layer3 on stage 0`, or `layer3=0`: a block's name and a stage's number."""


def read_file(path: str, hint: str = "name a file that `shardplan` wrote") -> bytes:
    """The content of a file; `-` is standard input, `REV:path` a file of a git revision, unless a file has that name.

    Raises:
        PlanError: the file is missing or cannot be read.
    """
    revised = None if path == "-" else _at_revision(path)
    return planner.foreign_files.Door(path, planner.PlanError, hint).content(path) if revised is None else revised


def _at_revision(path: str) -> bytes | None:
    """The output of `git show REV:path`; None if the name does not have this form or is that of a file.

    Raises:
        PlanError: git cannot find it; the message is git's.
    """
    if not re.fullmatch(r"[^:/\\][^:]+:.+", path) or "\0" in path or os.path.exists(path):
        return None
    try:
        shown = subprocess.run(["git", "show", "--end-of-options", path], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    if shown.returncode:
        lines = shown.stderr.decode(errors="replace").strip().splitlines() or ["git show failed"]
        hint = "name a file, or REV:path of this git repository, such as main:model.plan.json"
        raise planner.PlanError(lines[0].removeprefix("fatal: "), where=path, hint=hint)
    return shown.stdout


@contextlib.contextmanager
def file_at(path: str) -> Iterator[str]:
    """The name of a temporary file with the content of `REV:path`; any other name as it is."""
    content = _at_revision(path)
    if content is None:
        yield path
        return
    with planner.processes.scratch("revision") as folder:
        copy = folder / Path(path).name.rpartition(":")[2]
        copy.write_bytes(content)
        yield str(copy)


def beside(plan_file: str, name: str) -> str:
    """Path of a file that a plan names: in the plan's folder, else in the current one; any other name as it is."""
    path = Path(plan_file).parent / name
    return str(path) if name and os.path.basename(name) == name and path.is_file() else name


def shown_name(path: str) -> str:
    """Name of a file in errors; `-` is called standard input."""
    return "standard input" if path == "-" else path


def on_command_line() -> list[str]:
    """Names of the options of this command that are on the command line."""
    ctx = click.get_current_context()
    return [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]


def refuse_others(takes: Collection[str], what: str, hint: str = "leave it out") -> None:
    """Refuse options on the command line that this use of a command would ignore.

    Raises:
        UsageError: there is one; the message names the first.
    """
    stray = [name for name in on_command_line() if name not in takes]
    if stray:
        flag = next(p for p in click.get_current_context().command.params if p.name == stray[0]).opts[0]
        raise planner.UsageError(f"{flag} does not apply to {what}", hint=hint)


def load_graph(given: Options) -> Any:  # noqa: ANN401
    """The graph of a model, `--dim` and `--costs`."""
    graph, costs = planner.load_graph(given.model, dims=parse_dims(given.dims)), getattr(given, "costs", None)
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
