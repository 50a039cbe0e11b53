"""`shardplan report`: write a plan as an HTML page."""

from __future__ import annotations

from typing import Any

import click

import planner

from ._options import (
    against_options,
    file_to_write,
    load_against,
    own_inputs,
    price_option,
    read_file,
    set_option,
    shown_name,
)


@click.command("report")
@click.argument("plan_file", metavar="PLAN")
@file_to_write("--output", "-o", required=True, help="HTML file to write; `-` is standard output.")
@against_options
@set_option
@price_option
def command(plan_file: str, output: str, price: float | None, **against: Any) -> None:  # noqa: ANN401
    """Write PLAN as a self-contained HTML page: model, timeline, memory, time by kind, alternatives.

    The page needs no network and no other file. The roofline of the costliest operators needs the model and the
    hardware: those that the plan names are used if they can be found and are unchanged; else give --model and
    --hardware.

    \b
    Examples:
      shardplan report model.plan.json -o report.html
      shardplan report model.plan.json -o report.html --model model.onnx --hardware dgx-a100 --nodes 2
      shardplan plan gpt2 -H dgx-a100 -o - | shardplan report - -o - > report.html
    """
    plan = planner.load_plan(read_file(plan_file), name=shown_name(plan_file))
    if price:
        plan = planner.with_price(plan, price)
    named = not (against["model"] or against["hardware"])
    try:
        inputs = own_inputs(plan, plan_file, against) if named else against
        page = planner.report.plan_page(plan, *load_against(plan.hardware.stack, inputs))
    except (planner.ModelError, planner.HardwareError, planner.UsageError) as error:
        if not named:
            raise
        page = planner.report.plan_page(plan, lacking=str(error))
    planner.files.write_whole(output, page)
