"""Refusals of models, profiles, costs, instances and texts of machines."""

from __future__ import annotations

from tests.remedies.case import BY_HAND, ITERATION, TOY, case

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
        "give --device the card that it is ({}), or the file of a device with `peer_links`",
        "hardware import topology.txt --device t4-16gb",
        r"give --device the card that it is \(([\w-]+), ",
        "hardware import topology.txt --device {0}",
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
