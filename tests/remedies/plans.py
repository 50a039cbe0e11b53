"""Refusals of commands on plans, and of comparisons and sweeps."""

from __future__ import annotations

from tests.remedies.case import case

PLANS = (
    case(
        "--comment is for a revision alone",
        "diff toy.plan.json toy.plan.json --comment comment.md",
        "leave it out",
        "diff toy.plan.json toy.plan.json",
    ),
    case(
        "leave out --model, --hardware and --dim, or name two plans",
        "diff HEAD --model toy.onnx",
        "or name two plans",
        "diff toy.plan.json toy.plan.json --model toy.onnx",
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
        "export toy.plan.json --to torch -o out --dim batch=1",
        r"needs (--model)",
        "export toy.plan.json --to torch -o out8 --dim batch=1 {0} toy.onnx",
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
