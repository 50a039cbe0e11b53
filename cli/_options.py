"""Options that several commands share."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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


def hardware_option(*, required: bool = True) -> Decorator:
    """`--hardware`."""
    return click.option(
        "--hardware",
        "-H",
        required=required,
        shell_complete=complete("hardware"),
        help="Hardware profile: a name (`shardplan hardware list`) or a YAML file.",
    )


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A value that a function reads from its text.

    Args:
        name: what `--help` calls it.
        read: makes the value of the text; None where it cannot be read.
        wanted: what is said of a text that cannot be read, behind the text.
    """

    def __init__(self, name: str, read: Callable[[str], Any], wanted: str) -> None:
        self.name, self._read, self._wanted = name, read, wanted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """The value; one that was read before stays as it is."""
        found = self._read(value) if isinstance(value, str) else value
        if found is None:
            self.fail(f"{value!r} is {self._wanted}", param, ctx)
        return found


def _nodes(text: str) -> int | str | None:
    """A number, or the text that `planner.load_cluster` reads."""
    if not re.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*)?", text.lower()):
        return None
    return text.lower() if "x" in text.lower() else int(text)


NODES = Parsed("N[xDEVICES]", _nodes, "not a number of nodes of at least 1, nor one such as 4x64")
"""`4`, or `4x64`: a number of nodes, and how many devices of each are used."""

nodes_option: Decorator = click.option(
    "--nodes", type=NODES,
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
set_option: Decorator = click.option(
    "--set", "changes", multiple=True, metavar="FIELD=VALUE",
    help="Change a figure of the hardware or the stack: network.bandwidth=200Gbit/s, nvlink.latency=3us, "
    "device.memory=141GB, stack.launch=5us; repeatable (docs/questions.md).",
)  # fmt: skip
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
strict_option: Decorator = click.option(
    "--strict-ops", is_flag=True, help="Refuse models with operators that have no pricing rule."
)
headroom_option: Decorator = click.option(
    "--headroom", metavar="PERCENT", default="5%", show_default=True,
    callback=lambda _, __, value: parse_headroom(value),
    help="Part of each device's memory that plans leave free, for what an allocator holds beyond the tensors.",
)  # fmt: skip


def machine_options(*, required: bool = True) -> Decorator:
    """The machine that a job runs on, as `load_hardware` reads it, and how much of it is used."""

    def added(command: Callable[..., Any]) -> Callable[..., Any]:
        further = nodes_option(stack_option(set_option(devices_option(command))))
        wrapped: Callable[..., Any] = hardware_option(required=required)(further)
        return wrapped

    return added


def for_option(text: str) -> Decorator:
    """`--for`, with what it means for the command."""
    return click.option("--for", "backends", multiple=True, metavar="NAME", help=text)


SAMPLES_A_DEVICE = 8
"""Global batch where none is given, a device."""


def job_values(options: Mapping[str, Any], device_count: int) -> dict[str, Any]:
    """Fields of `planner.Job` that `--global-batch`, `--devices`, `--precision` and `--optimizer` say.

    Args:
        options: values of options by name.
        device_count: devices of the machine, for the batch where none is given.
    """
    devices = options["devices"] or 0
    return {
        "global_batch": options["global_batch"] or SAMPLES_A_DEVICE * (devices or device_count),
        "precision": options["precision"] or "",
        "optimizer": options["optimizer"],
        "devices": devices,
    }


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


def load_against(own_stack: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The graph and the cluster that a plan is held against, None for what is not named.

    Args:
        own_stack: the plan's stack, which counts where no other is named.
        options: values of `against_options`, and of `set_option` where the command has it.

    Raises:
        click.UsageError: sizes without a model, or nodes without hardware.
    """
    for name, flag, needed in _BELONGS_TO:
        if options.get(name) and not options[needed]:
            raise click.UsageError(f"{flag} needs --{needed}")
    graph = load_graph(options["model"], options["dims"], options["costs"]) if options["model"] else None
    return graph, load_hardware(options, stack=options["stack"] or own_stack) if options["hardware"] else None


_BELONGS_TO = (
    ("dims", "--dim", "model"),
    ("costs", "--costs", "model"),
    ("nodes", "--nodes", "hardware"),
    ("stack", "--stack", "hardware"),
    ("changes", "--set", "hardware"),
)
"""Values of options, their flags, and the option without which they say nothing."""


def load_hardware(options: Mapping[str, Any], **otherwise: Any) -> Any:  # noqa: ANN401
    """The cluster that `--hardware`, `--nodes`, `--stack` and `--set` name.

    Args:
        options: values of options by name.
        otherwise: arguments of `planner.load_cluster` in place of these values.
    """
    import planner

    named = {name: options[name] for name in ("nodes", "stack", "changes") if options.get(name)}
    return planner.load_cluster(options["hardware"], **{**named, **otherwise})


def own_inputs(plan: Any, plan_file: str, against: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """The model and the hardware that a plan names, at the sizes it has, in place of those that are not given.

    Args:
        plan: the plan.
        plan_file: where it lies: files that it names are looked for beside it, too.
        against: values of `against_options`.

    Raises:
        UsageError: the plan names none.
    """
    import planner

    found = dict(against)
    for name in ("model", "hardware"):
        found[name] = found[name] or beside(plan_file, getattr(plan.provenance, name))
    if not (found["model"] and found["hardware"]):
        raise planner.UsageError("the plan names no model and hardware", hint="add --model and --hardware")
    if not found["dims"] and found["model"] in planner.bundled_names() and plan.headline and plan.headline.sequence:
        usual, sequence = planner.bundled_info(found["model"]).seq, plan.headline.sequence
        found["dims"] = (f"seq={sequence}",) if usual and usual != sequence else ()
    if not found["nodes"] and planner.load_cluster(found["hardware"]).device_count != plan.hardware.device_count:
        found["nodes"] = plan.hardware.nodes
    return found


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


def _numbers(text: str) -> tuple[int, ...] | None:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        return None
    return tuple(sorted({int(part) for part in parts}))


NUMBERS = Parsed("N[,N..]", _numbers, "not a list of whole numbers such as 1,2,4")
"""`8` or `1,2,4,8`: whole numbers of at least one, ascending."""


def _meshes(text: str) -> tuple[tuple[int, ...], ...] | None:
    axes = [mesh.strip().lower().split("x") for mesh in text.split(",")]
    if not all(size.isdigit() and int(size) > 0 for mesh in axes for size in mesh):
        return None
    return tuple(dict.fromkeys(tuple(int(size) for size in mesh) for mesh in axes))


MESHES = Parsed("NxN[,NxN..]", _meshes, "not a mesh such as 8 or 2x8")
"""`8` or `2x8,4x8`: ranks by axis, outermost first."""


def _kept(text: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"\s*(.+?)\s*(?:\s+on\s+stage\s+|=)\s*(-?\d+)\s*", text)
    return (found[1], int(found[2])) if found else None


KEPT = Parsed("BLOCK on stage N", _kept, "not like `layer3 on stage 0`")
"""`layer3 on stage 0`, or `layer3=0`: a block's name and a stage's number."""


def read_file(path: str) -> bytes:
    """What a file holds; `-` is standard input, and `REV:path` a file of a git revision where no file has that name.

    Raises:
        PlanError: it is missing or cannot be read.
    """
    import planner

    if path == "-":
        return planner.files.input_bytes()
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
