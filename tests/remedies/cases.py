"""Commands that are refused, and what their remedies, followed as printed, lead to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TOY = "toy.onnx -H v100-pcie-4 -b 8"
ITERATION = "plan profile.graph.txt --objective iteration-time --time-limit 1s"
BY_HAND = "hardware init --device a100-sxm-80gb"


@dataclass(frozen=True)
class Case:
    """A refused command and its remedy.

    Attributes:
        remedy: the text in the source, with `{}` where a value stands; "" for a remedy that names neither an option nor
            a command.
        command: the refused command.
        says: what standard error has of the remedy; its groups are what is followed.
        then: the commands that follow it, one after the other, with the groups as `{0}`, `{1}`.
    """

    remedy: str
    command: str
    says: str
    then: tuple[str, ...]


def case(remedy: str, command: str, says: str, *then: str) -> Case:
    """A case, from its parts."""
    return Case(remedy, command, says, then)


LIMITS = (
    case(
        "leave out --for, or say --for {}",
        f"plan {TOY} --schedule-file orders.csv --for megatron",
        r"leave out --for, or say --for (\w+)",
        f"plan {TOY} --schedule-file orders.csv --for {{0}}",
        f"plan {TOY} --schedule-file orders.csv",
    ),
    case(
        "give one, with --price 2.5",
        f"plan {TOY} --target step=1s --least dollars",
        r"give one, with (--price 2.5)",
        f"plan {TOY} --target step=1s --least dollars {{0}}",
    ),
    case(
        "use --precision {}",
        f"plan {TOY} --precision bf16",
        r"use --precision (\w+) or (\w+)",
        f"plan {TOY} --precision {{0}}",
        f"plan {TOY} --precision {{1}}",
    ),
    case(
        "leave out --strict-ops to estimate it",
        "plan unpriced.onnx -H v100-pcie-4 -b 8 --strict-ops",
        "leave out --strict-ops",
        "plan unpriced.onnx -H v100-pcie-4 -b 8",
    ),
    case("use --pp {} or less", f"plan {TOY} --pp 64", r"use --pp (\d+) or less", f"plan {TOY} --pp {{0}}"),
    case(
        "plan --for another framework, or --for {}",
        f"plan {TOY} --for torchtitan",
        r"or --for (\w+)",
        f"plan {TOY} --for {{0}}",
    ),
    case(
        "",
        f"plan {TOY} --tp 64",
        r"with these devices use (\d+), (\d+), (\d+)",
        *(f"plan {TOY} --tp {{{i}}}" for i in range(3)),
    ),
    case(
        "",
        f"plan {TOY} --mesh 3",
        r"with these devices use (\d+), (\d+), (\d+) ranks",
        *(f"plan {TOY} --mesh {{{i}}}" for i in range(3)),
    ),
    case(
        "",
        "plan toy.onnx -H dgx-a100 -b 64 --devices 64",
        r"--nodes (\d+) makes 64",
        "plan toy.onnx -H dgx-a100 -b 64 --devices 64 --nodes {0}",
    ),
    case(
        "",
        "plan toy.onnx -H dgx-a100 -b 64 --dp 12",
        r"--nodes (\d+) makes 16",
        "plan toy.onnx -H dgx-a100 -b 96 --dp 12 --nodes {0}",
    ),
    case("", f"plan {TOY} --dp 3", r"there are some without --dp 3", f"plan {TOY}"),
    case(
        "",
        "plan toy.onnx -H v100-pcie-4 -b 7 --micro-batch 2",
        r"a micro-batch size of (\d+) or (\d+)",
        "plan toy.onnx -H v100-pcie-4 -b 7 --micro-batch {0}",
        "plan toy.onnx -H v100-pcie-4 -b 7 --micro-batch {1}",
    ),
    case(
        "",
        f"plan {TOY} --optimizer adam:moments=fp9",
        r"use (\w+) or (\w+) or (\w+)",
        *(f"plan {TOY} --optimizer adam:moments={{{i}}}" for i in range(3)),
    ),
    case(
        "",
        f"plan {TOY} --schedule interleaved:chunks=x",
        r"use a number like (\d)",
        f"plan {TOY} --schedule interleaved:chunks={{0}}",
    ),
    case(
        "",
        f"plan {TOY} --system pipedream --for megatron",
        "leave it out, or plan without --system",
        f"plan {TOY} --system pipedream",
    ),
    case("", f"plan {TOY} --target step", r"write (\S+), ", f"plan {TOY} --target {{0}}"),
    case(
        "",
        f"plan {TOY} --headroom 2",
        r"a part such as (\S+) or ([\d.]+)",
        f"plan {TOY} --headroom {{0}}",
        f"plan {TOY} --headroom {{1}}",
    ),
    case(
        "--least says what --target minimizes: add --target step=2s, say, and --price where the profile has none",
        f"plan {TOY} --least dollars",
        r"add (--target step=2s), say, and (--price)",
        f"plan {TOY} --least dollars {{0}} {{1}} 2",
    ),
    case(
        "--target needs --global-batch, the same for all numbers of devices",
        "plan toy.onnx -H v100-pcie-4 --target step=1s",
        r"needs (--global-batch)",
        "plan toy.onnx -H v100-pcie-4 --target step=1s {0} 8",
    ),
    case(
        "--target searches the number of devices: give their maximum by --nodes, not --devices",
        "plan toy.onnx -H dgx-a100 -b 8 --target step=1s --devices 2",
        r"by (--nodes), not",
        "plan toy.onnx -H dgx-a100 -b 8 --target step=1s {0} 1",
    ),
    case(
        "--system chooses its own schedule: leave out --schedule and --schedule-file",
        f"plan {TOY} --system gpipe --schedule gpipe",
        "leave out --schedule",
        f"plan {TOY} --system gpipe",
    ),
    case(
        "--schedule-file has the schedule: leave out --schedule",
        f"plan {TOY} --schedule-file orders.csv --schedule gpipe",
        "leave out --schedule",
        f"plan {TOY} --schedule-file orders.csv",
    ),
    case(
        "Missing option '--hardware' / '-H'.",
        "plan toy.onnx -b 8",
        r"(--hardware)",
        "plan toy.onnx -b 8 {0} v100-pcie-4",
    ),
    case(
        "missing option --global-batch",
        "predict toy.onnx -H v100-pcie-4",
        r"missing option (--global-batch)",
        "predict toy.onnx -H v100-pcie-4 {0} 8",
    ),
    case("", f"predict {TOY} --recompute layers", r"never, (always) or modules", f"predict {TOY} --recompute {{0}}"),
    case(
        "",
        f"predict {TOY} --recompute foo",
        r"known: (?:\d, )+(\w+), (always), (\w+),",
        f"predict {TOY} --recompute {{0}}",
        f"predict {TOY} --recompute {{2}}",
    ),
    case("", f"predict {TOY} --starts 1,2", r"leave --starts out", f"predict {TOY}"),
    case("", f"predict {TOY} --pp 2 --starts 1,2", r"give 1 first block", f"predict {TOY} --pp 2 --starts 1"),
    case(
        "",
        f"predict {TOY} --zero 1 --shard-over 3",
        r"a number of (2) and more that divides",
        f"predict {TOY} --zero 1 --shard-over {{0}}",
    ),
    case("", f"predict {TOY} --ep 2", r"leave --ep out", f"predict {TOY}"),
    case(
        "",
        f"predict {TOY} --tp 3",
        r"of (\d) or (\d) or (\d) ranks",
        *(f"predict {TOY} --tp {{{i}}}" for i in range(3)),
    ),
)

INPUTS = (
    case(
        "measure this one: profile --measure -o",
        f"plan {TOY} --costs fixed.costs.json",
        r"(profile) (--measure -o)",
        "{0} toy.onnx {1} own.json",
        f"plan {TOY} --costs own.json",
    ),
    case(
        "measure it again: profile --measure -o",
        f"plan {TOY} --costs orders.csv",
        r"(profile) (--measure -o)",
        "{0} toy.onnx {1} own.json",
        f"plan {TOY} --costs own.json",
    ),
    case(
        "write one with `profile --measure -o`",
        f"plan {TOY} --costs config.json",
        r"`(profile) (--measure -o)`",
        "{0} toy.onnx {1} own.json",
        f"plan {TOY} --costs own.json",
    ),
    case(
        "give it as --stack {}", "plan toy.onnx -H megatron-2021 -b 8", r"(--stack megatron-2021)", f"plan {TOY} {{0}}"
    ),
    case("see `shardplan hardware list{}`", "plan toy.onnx -H nothing -b 8", r"`shardplan (hardware list)`", "{0}"),
    case(
        "see `shardplan hardware list{}`", f"plan {TOY} --stack nothing", r"`shardplan (hardware list --stacks)`", "{0}"
    ),
    case("see `shardplan hardware list`", "plan toy.onnx -H no.yaml -b 8", r"`shardplan (hardware list)`", "{0}"),
    case(
        "take a cluster profile, or write one with `shardplan hardware init`",
        "plan toy.onnx -H t4-16gb --nodes 2 -b 8",
        r"`shardplan (hardware init)`",
        "{0} -o written.yaml --force",
        "plan toy.onnx -H written.yaml --nodes 2 -b 16",
    ),
    case(
        "start from one of `shardplan hardware list`",
        "hardware init --from t4-16gb",
        r"`shardplan (hardware list)`",
        "{0}",
        "hardware init --from dgx-a100",
    ),
    case(
        "{}; `shardplan hardware list --devices` has all",
        "hardware init --device a100-sxm-81gb --inside nvlink:1GB/s",
        r"did you mean '(\S+?)'.*`shardplan (hardware list --devices)`",
        "{1}",
        "hardware init --device {0} --inside nvlink:1GB/s",
    ),
    case(
        "say it, for example --dim {}=10",
        "profile loop.onnx -d t4-16gb",
        r"example (--dim turns=10)",
        "profile loop.onnx -d t4-16gb {0}",
    ),
    case("", "profile conv.onnx -d t4-16gb", r"example (--dim h=128)", "profile conv.onnx -d t4-16gb {0}"),
    case(
        "",
        "profile conv.onnx -d t4-16gb --dim h=1",
        r"\((--dim) for axes by name",
        "profile conv.onnx -d t4-16gb {0} h=8",
    ),
    case(
        "",
        "profile conv.onnx -d t4-16gb --dim h=2",
        r"\((--dim) for axes by name",
        "profile conv.onnx -d t4-16gb {0} h=8",
    ),
    case(
        "the file does not say how many samples a minibatch holds: counted as one; say it by --dim batch=N",
        "profile profile.graph.txt",
        r"",
        "profile profile.graph.txt --dim batch=4",
    ),
    case(
        "give --device NAME, or --measure",
        "profile toy.onnx",
        r"give (--device) NAME, or (--measure)",
        "profile toy.onnx {0} t4-16gb",
        "profile toy.onnx {1}",
    ),
    case(
        "sizes are given as --layers 40",
        "models build gpt2 -o built.onnx layers 4",
        r"as (--layers 40)",
        "models build gpt2 -o built.onnx {0}",
    ),
    case(
        "give the NAME of a bundled model, or --family and its sizes",
        "models build -o built.onnx",
        r"or (--family) and",
        "models build gpt2 -o built.onnx",
        "models build {0} gpt2 -o built.onnx --layers 2",
    ),
    case(
        "describe the node with --inside",
        "hardware import uneven.txt --device a100-sxm-80gb",
        r"with (--inside)",
        f"{BY_HAND} {{0}} pcie:32GB/s",
    ),
    case(
        "say --collective {}",
        "hardware import nameless.txt --into dgx-h100 --level nvlink",
        r"say (--collective \w+),",
        "hardware import nameless.txt --into dgx-h100 --level nvlink {0}",
    ),
    case(
        "give --into PROFILE --level NAME",
        "hardware import nccl.txt",
        r"give (--into) PROFILE (--level) NAME",
        "hardware import nccl.txt {0} dgx-h100 {1} nvlink",
    ),
    case(
        "give --device NAME",
        "hardware import topology.txt",
        r"give (--device) NAME",
        "hardware import topology.txt {0} a100-sxm-80gb",
    ),
    case(
        "",
        "hardware import nccl.txt --into dgx-h100 --level nv",
        r"it has (\w+),",
        "hardware import nccl.txt --into dgx-h100 --level {0}",
    ),
    case("give --inside", BY_HAND, r"give (--inside)", f"{BY_HAND} {{0}} nvlink:300GB/s"),
    case(
        "give --between",
        f"{BY_HAND} --inside nvlink:300GB/s --nodes 2",
        r"give (--between)",
        f"{BY_HAND} --inside nvlink:300GB/s --nodes 2 {{0}} infiniband:400Gbit/s",
    ),
    case(
        "choose another name, or give --force",
        "hardware init -o exists.yaml",
        r"give (--force)",
        "hardware init -o exists.yaml {0}",
    ),
    case(
        "--devices and --stacks cannot be combined",
        "hardware list --devices --stacks",
        "cannot be combined",
        "hardware list --devices",
        "hardware list --stacks",
    ),
    case(
        "add --model FILE",
        "export two.plan.json --to onnx -o out",
        r"add (--model) FILE",
        "export two.plan.json --to onnx -o out {0} toy.onnx",
    ),
    case(
        "use `--to` {}",
        "export toy.plan.json --to megatron -o out",
        r"use `--to` (\w+) or (\w+) or (\w+) or (\w+) or (\w+)\)",
        *(f"export toy.plan.json --to {{{i}}} -o out{i} --model toy.onnx" for i in range(5)),
    ),
    case(
        "`shardplan plan --tp 1`",
        "export tensor.plan.json --to torch -o out",
        r"`shardplan plan (--tp 1)`",
        f"plan {TOY} {{0}} -o single.plan.json",
        "export single.plan.json --to torch -o out9",
    ),
)

INSTANCES = (
    case(
        "",
        "plan instance.json --objective most --time-limit 1s",
        r"use ([\w-]+) or ([\w-]+)",
        "plan instance.json --time-limit 1s --objective {0}",
        "plan instance.json --time-limit 1s --objective {1}",
    ),
    case(
        "--machines and --devices both say how many devices there are",
        f"{ITERATION} --machines 2x2 --devices 4 --bandwidth 1GB/s,1GB/s",
        "give one of them",
        f"{ITERATION} --machines 2x2 --bandwidth 1GB/s,1GB/s",
    ),
    case(
        "say --machines 4x2 --bandwidth 10GB/s,1.25GB/s, or --hardware NAME",
        ITERATION,
        r"say (--machines \S+) (--bandwidth \S+), or (--hardware)",
        f"{ITERATION} {{0}} {{1}}",
        f"{ITERATION} {{2}} v100-pcie-4",
    ),
    case(
        "",
        f"{ITERATION} --machines 2x2 --bandwidth 1GB/s",
        "give one a level",
        f"{ITERATION} --machines 2x2 --bandwidth 1GB/s,1GB/s",
    ),
    case(
        "",
        "plan piper.json --bandwidth 1GB/s,2GB/s --time-limit 1s",
        "give one figure",
        "plan piper.json --bandwidth 1GB/s --time-limit 1s",
    ),
    case("", "plan instance.json --time-limit 0s", r"write (\w+) or", "plan instance.json --time-limit {0}"),
    case(
        "--machines, --bandwidth and --devices describe a cluster, and so does --hardware",
        f"{ITERATION} --machines 2x2 --hardware v100-pcie-4",
        "give one of them",
        f"{ITERATION} --hardware v100-pcie-4",
    ),
    case("", f"{ITERATION} --hardware t4-16gb", "name a cluster of several", f"{ITERATION} --hardware v100-pcie-4"),
    case(
        "",
        f"{ITERATION} --machines 4x2 --bandwidth 0GB/s,1GB/s",
        r"write (10GB/s,1.25GB/s)",
        f"{ITERATION} --machines 4x2 --bandwidth {{0}}",
    ),
    case(
        "",
        f"{ITERATION} --machines abc --bandwidth 1GB/s,1GB/s",
        r"write (4x2) for",
        f"{ITERATION} --machines {{0}} --bandwidth 1GB/s,1GB/s",
    ),
    case(
        "--hardware does not apply to {}",
        "plan instance.json --hardware v100-pcie-4 --time-limit 1s",
        "the file carries its machine",
        "plan instance.json --time-limit 1s",
    ),
    case(
        "or say --machines 8x2 --bandwidth 10GB/s,1.25GB/s instead of it",
        f"{ITERATION} --nodes 2",
        r"(--machines \S+) (--bandwidth \S+) instead of it",
        f"{ITERATION} {{0}} {{1}}",
    ),
    case(
        "--nodes needs --hardware",
        f"{ITERATION} --nodes 2",
        r"--nodes needs (--hardware)",
        f"{ITERATION} --nodes 2 {{0}} dgx-a100",
    ),
    case(
        "--format github does not apply to a partition plan",
        "diff instance.partition.json instance.partition.json --format github",
        r"use (\w+) or (\w+)",
        "diff instance.partition.json instance.partition.json --format {0}",
        "diff instance.partition.json instance.partition.json --format {1}",
    ),
    case(
        "", "explain instance.partition.json --model instance.json", "leave it out", "explain instance.partition.json"
    ),
)

PLANS = (
    case(
        "add --num-layers to the file",
        "predict gpt2 -H dgx-a100 -b 8 --dim seq=32 --from megatron virtual.txt",
        "add (--num-layers) to the file",
        "predict gpt2 -H dgx-a100 -b 8 --dim seq=32 --from megatron counted.txt",
    ),
    case(
        "name another file for --store",
        "sweep toy.onnx -H v100-pcie-4 --over batch=4 -j 1 --store config.json",
        "name another file for (--store)",
        "sweep toy.onnx -H v100-pcie-4 --over batch=4 -j 1 {0} another.sqlite",
    ),
    case(
        "--model and --hardware must be given together: splits are priced for both",
        "explain toy.plan.json --model toy.onnx",
        r"--model and (--hardware) must",
        "explain toy.plan.json --model toy.onnx {0} v100-pcie-4",
    ),
    case(
        "--dim needs --model",
        "export toy.plan.json --to torch -o out --dim batch=4",
        r"needs (--model)",
        "export toy.plan.json --to torch -o out8 --dim batch=4 {0} toy.onnx",
    ),
    case(
        "{} is not at hand (--model)",
        "diff toy.plan.json two.plan.json -H v100-pcie-4",
        "",
        "diff toy.plan.json two.plan.json -H v100-pcie-4 --model toy.onnx --fail-on step_time:+900%",
    ),
    case(
        "{} with fingerprint {} is not at hand (--hardware)",
        "diff toy.plan.json two.plan.json --model toy.onnx",
        "",
        "diff toy.plan.json two.plan.json -H v100-pcie-4 --model toy.onnx --fail-on step_time:+900%",
    ),
    case(
        "add --model and --hardware",
        "explain nameless.plan.json --why-not tp=2",
        r"add (--model) and (--hardware)",
        "explain nameless.plan.json --why-not tp=2 {0} toy.onnx {1} v100-pcie-4",
    ),
    case(
        "",
        "diff toy.plan.json toy.plan.json --fail-on step_time",
        r"did you mean '(\S+)'",
        "diff toy.plan.json toy.plan.json --fail-on {0}",
    ),
    case(
        "",
        "diff toy.plan.json toy.plan.json --fail-on step_time:-3",
        r"write (\S+?)\)",
        "diff toy.plan.json toy.plan.json --fail-on {0}",
    ),
    case(
        "--for needs --backends, whose frameworks it names",
        "compare toy.onnx -H v100-pcie-4 -b 8 --for megatron",
        r"needs (--backends)",
        "compare toy.onnx -H v100-pcie-4 -b 8 {0} --for megatron",
    ),
    case(
        "{} is given for all points and with --over",
        "sweep toy.onnx -H v100-pcie-4 --over batch=4,8 --batch 4 -j 1",
        "give it once",
        "sweep toy.onnx -H v100-pcie-4 --over batch=4,8 -j 1",
    ),
    case(
        "write --dim seq=4096, --set network.bandwidth=1Tbit/s",
        "sweep gpt2 -H dgx-a100 --dim seq --over batch=8 -j 1",
        r"write (--dim) seq",
        "sweep gpt2 -H dgx-a100 {0} seq=32 --over batch=8 -j 1",
    ),
)

MISSPELT = tuple(
    case("", command, r"did you mean '(\S+?)'", then)
    for command, then in (
        ("plan gtp2 -H dgx-a100 -b 8 --dim seq=32", "plan {0} -H dgx-a100 -b 8 --dim seq=32"),
        ("plan toy.onnx -H v100-pcie-5 -b 8", "plan toy.onnx -H {0} -b 8"),
        (f"plan {TOY} --stack megatron-2026", f"plan {TOY} --stack {{0}}"),
        (f"plan {TOY} --schedule 1f1c", f"plan {TOY} --schedule {{0}}"),
        (f"plan {TOY} --system gpip", f"plan {TOY} --system {{0}}"),
        (f"plan {TOY} --precision fp15", f"plan {TOY} --precision {{0}}"),
        (f"plan {TOY} --optimizer adan", f"plan {TOY} --optimizer {{0}}"),
        (f"plan {TOY} --dim btch=4", f"plan {TOY} --dim {{0}}=4"),
        (f"plan {TOY} --set node.latncy=3us", f"plan {TOY} --set {{0}}=3us"),
        ("plan instance.json --solver max-lod-dp --time-limit 1s", "plan instance.json --solver {0} --time-limit 1s"),
        ("plan gpt2 -H dgx-a100 -b 8 --dim sq=32", "plan gpt2 -H dgx-a100 -b 8 --dim {0}=32"),
        ("compare toy.onnx -H v100-pcie-4 -b 8 --systems gpip", "compare toy.onnx -H v100-pcie-4 -b 8 --systems {0}"),
        ("sweep toy.onnx -H v100-pcie-4 --over bacth=4 -j 1", "sweep toy.onnx -H v100-pcie-4 --over {0}=4 -j 1"),
        ("export toy.plan.json --to torhc -o out", "export toy.plan.json --to {0} -o out7"),
        (
            "explain toy.plan.json --why-not tq=2 --model toy.onnx -H v100-pcie-4",
            "explain toy.plan.json --why-not {0}=2 --model toy.onnx -H v100-pcie-4",
        ),
        ("diff toy.plan.json toy.plan.json --fail-on step_tim", "diff toy.plan.json toy.plan.json --fail-on {0}"),
        ("hardware show dgx-a10", "hardware show {0}"),
        ("models build gpt2 --layer 2 -o built.onnx", "models build gpt2 --{0} 2 -o built.onnx"),
        ("models build gtp2 -o built.onnx", "models build {0} -o built.onnx"),
        (f"predict {TOY} --exchange rig", f"predict {TOY} --exchange {{0}}"),
        ("shema plan", "{0} plan"),
    )
)
"""Names that are close to one that is known: the first that is offered is taken."""

CASES = (*LIMITS, *INPUTS, *INSTANCES, *PLANS, *MISSPELT)

_PACKAGE = "installs a package, which a test must not"
_TORCH = "is said by processes with torch that run; tests/runtime provokes them"
_GPU = "needs a GPU"
_PLAN_OF_FRAMEWORK = (
    "needs a plan that only a model of some size and a framework's limits give; tests/export provokes it"
)
_CHECK = "names the command that lists what is wrong: a damaged plan stays damaged"
EXCEPTIONS: Mapping[tuple[str, str], str] = {
    (
        "planner/documents.py",
        "name a file that `shardplan plan` wrote",
    ): "from Python; each case writes a plan and reads it",
    ("planner/ask/sweeps.py", "--on needs dask"): _PACKAGE,
    ("planner/ask/sweeps.py", "pip install 'shardplan[sweep]'"): _PACKAGE,
    ("planner/costs/measured.py", "pip install 'shardplan[measure]'"): _PACKAGE,
    ("planner/importers/onnx.py", "pip install 'shardplan[torch]'"): _PACKAGE,
    ("planner/runtime/__init__.py", "pip install 'shardplan[torch]'"): _PACKAGE,
    ("planner/runtime/device.py", "use --device cpu, or torch with CUDA"): _GPU,
    ("planner/runtime/device.py", "use --backend gloo"): _GPU,
    ("cli/hardware.py", "--ranks needs --measure"): "measures the machine that it runs on",
    (
        "planner/ask/choices.py",
        "plan the job with `shardplan plan`",
    ): "answers a question on a plan that no search made, which the command line does not write",
    (
        "planner/costs/imported.py",
        "price it with --device or --measure",
    ): "from Python alone: the command line asks first",
    ("planner/costs/measured.py", "price it with --device; the first: {}"): "needs a model of which nothing runs",
    (
        "planner/costs/roofline.py",
        "it has {}: choose another --precision, or add the figure to the hardware profile",
    ): "from Python alone: the command line refuses the precision first (`use --precision`)",
    (
        "planner/importers/onnx_graph/resolve.py",
        "{} is taken for the batch and as 1: plans search the size that they run (--dim {}=N)",
    ): "a note on every plan of a symbolic batch: each case with --dim batch=4 follows it",
    ("planner/operators/batching.py", "name the batch axis at import, --dim batch=N"): "needs a graph without a batch, "
    "from Python",
    ("planner/planning.py", "plan with --for {}, or limit the job further"): "needs frameworks that none serves a job",
    (
        "planner/systems/compare.py",
        "`shardplan compare` says which systems can train the model",
    ): "names the command that lists who can",
    ("planner/plans/explain_shardings.py", "`shardplan check` with model and hardware tells all"): _CHECK,
    ("planner/plans/validate.py", "`shardplan check` tells all"): _CHECK,
    ("planner/runtime/requirements.py", "`shardplan check` tells all"): _CHECK,
}
"""Remedies that no case follows, each with the reason."""

EXCEPTED_FILES: Mapping[str, str] = {
    "planner/export/deepspeed.py": _PLAN_OF_FRAMEWORK,
    "planner/export/galvatron.py": _PLAN_OF_FRAMEWORK,
    "planner/export/jax.py": _PLAN_OF_FRAMEWORK,
    "planner/export/megatron.py": _PLAN_OF_FRAMEWORK,
    "planner/export/torchtitan.py": _PLAN_OF_FRAMEWORK,
    "planner/export/transformers.py": _PLAN_OF_FRAMEWORK,
    "planner/export/torch.py": _PLAN_OF_FRAMEWORK,
    "planner/export/__init__.py": _PLAN_OF_FRAMEWORK,
    "planner/export/reading": "is about lines of a framework's file; tests/export/test_framework_files.py follows them",
    "planner/runtime": _TORCH,
    "cli/run.py": _TORCH,
}
"""Files and folders whose other remedies no case follows."""
