"""The software that trains as an input: files, bases, and what each figure does to prices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.errors import HardwareError
from planner.hardware import (
    DEFAULT_STACK,
    Collective,
    Stack,
    collective_s,
    collective_terms,
    lint,
    load_cluster,
    load_device,
    load_stack,
    named_stack,
    resolved_profile,
    stack_names,
)
from planner.hardware.document import profile_folder


@pytest.mark.parametrize("name", stack_names())
def test_every_figure_of_a_stack_has_a_source(name: str) -> None:
    assert lint(profile_folder() / "stacks" / f"{name}.yaml") == []
    stack = load_stack(name)
    assert (stack.name, bool(stack.about)) == (name, True)
    stated = [item for item in resolved_profile(name).values() if isinstance(item, dict) and "value" in item]
    assert stated
    assert all(item["source"] for item in stated)


def test_the_default_is_a_bundled_stack() -> None:
    assert load_stack().name == DEFAULT_STACK
    assert load_cluster("dgx-a100").stack == load_stack(DEFAULT_STACK)


def test_no_stack_costs_nothing() -> None:
    """Without a stack kernels reach their rates, masks are followed score by score, and nothing hides or is cut."""
    bare = Stack()
    rates = (bare.stretch, bare.matrix_rate, bare.memory_rate, bare.link_rate, bare.causal_part, bare.unaligned_rate)
    assert rates == (1.0,) * 6
    assert (bare.attention_block, bare.product_pieces) == (1, 1)
    assert (bare.launch_s, bare.handover_s, bare.overlap, bare.accumulation_bytes, bare.gather_ports) == (0,) * 5
    assert (bare.waits, bare.rows_once, bare.grouped_experts, bare.fused) == (False, False, False, ())
    assert bare.hidden_along(("tensor", "data")) == 0.0


def test_a_stack_of_ones_own_over_another(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("stack: mine\nbase: megatron-2021\nlaunch: 40 us\nattention: {value: {h100*: 30%, '*': 90%}}\n")
    stack, base = load_stack(path), load_stack("megatron-2021")
    assert replace(stack, name="", about="", launch_s=0.0, attention_rate={}) == replace(
        base, name="", about="", launch_s=0.0, attention_rate={}
    )
    assert stack.launch_s == pytest.approx(40e-6)
    assert (stack.attention_on("h100-sxm-80gb"), stack.attention_on("a100-sxm-80gb")) == (0.3, 0.9)
    assert load_device("a100-sxm-80gb", stack=path).launch_s == pytest.approx(40e-6)
    assert load_device("tpu-v4", stack=path).launch_s == 0.0


def test_a_stack_that_is_based_on_itself(tmp_path: Path) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text(f"stack: loop\nbase: {path}\n")
    with pytest.raises(HardwareError, match="based on itself"):
        load_stack(path)


SECRET = "password: hunter2\n"


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("/etc/passwd", "'/etc/passwd' is not allowed as a base"),
        ("../secret.yaml", "'../secret.yaml' is not allowed as a base"),
        ("{folder}/secret.yaml", "secret.yaml' is not allowed as a base"),
        ("./link.yaml", "'./link.yaml' is not allowed as a base"),
        ("./secret.txt", "'./secret.txt' is not allowed as a base"),
        ("./nowhere.yaml", "there is no file './nowhere.yaml'"),
        ("megatron-2052", "unknown stack 'megatron-2052' (did you mean 'megatron-20"),
        ("./secret.yaml", "no hardware profile"),
        ("./binary.yaml", "not a text file"),
    ],
)
def test_a_base_is_a_bundled_stack_or_a_file_of_the_folder(tmp_path: Path, base: str, said: str) -> None:
    """Anybody may write a stack, and its reader's files are none of their business."""
    folder = tmp_path / "stacks"
    folder.mkdir()
    for path in (tmp_path / "secret.yaml", folder / "secret.yaml", folder / "secret.txt"):
        path.write_text(SECRET)
    (folder / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe")
    (folder / "mine.yaml").write_text(f"stack: mine\nbase: {base.format(folder=tmp_path)}\n")
    with pytest.raises(HardwareError) as caught:
        load_stack(folder / "mine.yaml")
    assert said in str(caught.value)
    problems = (caught.value.problem, *caught.value.problems)
    assert not any("hunter2" in text or "password" in text for p in problems for text in (str(p), p.excerpt))
    assert "root:" not in str(caught.value)


def test_paths_of_bases_begin_at_the_stacks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stacks" / "common").mkdir(parents=True)
    (tmp_path / "stacks" / "common" / "a.yaml").write_text("stack: a\nbase: ./b.yml\nlaunch: 40 us\n")
    (tmp_path / "stacks" / "common" / "b.yml").write_text("stack: b\nbase: eager\noverlap: 33%\n")
    (tmp_path / "stacks" / "mine.yaml").write_text("stack: mine\nbase: common/a.yaml\n")
    monkeypatch.chdir(tmp_path)
    stack = load_stack("stacks/mine.yaml")
    assert (stack.name, stack.launch_s, stack.overlap) == ("mine", pytest.approx(40e-6), pytest.approx(0.33))


def test_a_plan_names_no_stack_by_its_path() -> None:
    assert [named_stack(name) for name in ("", "eager")] == ["", "eager"]
    for name in ("/etc/passwd", "./mine.yaml", "mine"):
        with pytest.raises(HardwareError, match=r"no bundled stack is called .*give its file as --stack"):
            named_stack(name)


def test_hardware_is_no_stack_and_a_stack_no_hardware() -> None:
    with pytest.raises(HardwareError, match="is a device, not a stack"):
        load_stack("a100-sxm-80gb")
    with pytest.raises(HardwareError, match="is a stack, not a cluster"):
        load_cluster("megatron-2021")
    with pytest.raises(HardwareError, match="is a stack, not a device"):
        load_device("megatron-2021")


def test_the_stack_is_part_of_the_fingerprint_by_its_figures_alone() -> None:
    plain, slower = Stack("a"), Stack("b", launch_s=1e-6)
    prints = [load_cluster("dgx-a100", stack=stack).fingerprint for stack in (plain, replace(plain, name="c"), slower)]
    assert prints[0] == prints[1] != prints[2]


def test_rates_scale_the_curves_of_a_device() -> None:
    whole = load_device("a100-sxm-80gb", stack="megatron-2021")
    none = load_cluster("a100-sxm-80gb", stack=Stack()).devices[0]
    rate = load_stack("megatron-2021").matrix_rate
    assert whole.matrix_efficiency.fractions == pytest.approx([rate * f for f in none.matrix_efficiency.fractions])
    assert whole.memory_efficiency == none.memory_efficiency


def test_links_scale_with_the_stack() -> None:
    half = load_cluster("dgx-a100", nodes=2, stack=Stack(link_rate=0.5)).levels
    whole = load_cluster("dgx-a100", nodes=2, stack=Stack()).levels
    assert [level.efficiency for level in half] == pytest.approx([0.5 * level.efficiency for level in whole])


def test_a_gather_around_one_ring_pays_every_latency_and_one_port() -> None:
    """48 nodes of eight ports of 25 GB/s, 90 % achievable: 383 hops of 20 us, 383/384 of the bytes over one port."""
    ranks = np.arange(384)
    ring = load_cluster("dgx-a100", nodes=48, stack=Stack(gather_ports=1))
    payload = 3.6e9
    expected = 383 * 20e-6 + 383 / 384 * payload / (0.9 * 25e9)
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        assert collective_s(ring, kind, ranks, payload) == pytest.approx(expected)
        assert collective_terms(ring, kind, ranks).algorithm(payload) == "ring"
    free = load_cluster("dgx-a100", nodes=48, stack=Stack())
    assert collective_s(free, Collective.ALL_GATHER, ranks, payload) < expected / 4
    inside = np.arange(8)
    assert collective_s(ring, Collective.ALL_GATHER, inside, payload) == pytest.approx(
        collective_s(free, Collective.ALL_GATHER, inside, payload)
    )
