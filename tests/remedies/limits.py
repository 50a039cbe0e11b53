"""Refusals of degrees, limits and options of a job."""

from __future__ import annotations

from tests.remedies.case import TOY, case

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
