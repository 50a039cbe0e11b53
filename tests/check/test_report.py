"""Plans of other versions and profiles are repriced, not damaged; what cannot be checked is said."""

from __future__ import annotations

import dataclasses

import pytest

from planner import Job, load_cluster, load_graph, plan
from planner.check import check_plan
from planner.hardware import Cluster
from planner.plans import Fault, Plan, seal
from tests.check.edits import EDITS, edited
from tests.check.plans import loaded, planned

KIND = "unequal replicas"


def changed(name: str, version: str = "") -> Plan:
    """An edited plan, said to be made by some version; without one by this."""
    plan = edited(planned(KIND), EDITS[name])
    assert plan is not None
    made = dataclasses.replace(plan.provenance, version=version or plan.provenance.version)
    return dataclasses.replace(plan, provenance=made)


def slower(cluster: Cluster) -> Cluster:
    """The same cluster by another profile: half the memory bandwidth."""
    devices = tuple(dataclasses.replace(d, memory_byte_per_s=d.memory_byte_per_s / 2) for d in cluster.devices)
    return dataclasses.replace(cluster, devices=devices, fingerprint="0" * 64)


def test_a_plan_of_another_version_is_repriced() -> None:
    (finding,) = check_plan(changed("all times / 10, the whole too", "0.0.9"), *loaded(KIND)).findings
    assert finding.fault is Fault.REPRICED
    iteration_s = planned(KIND).predictions.reached_s
    for seconds in (iteration_s / 10, iteration_s):
        assert f"{1000 * seconds:.3g} ms an iteration" in finding.message
    assert "by version 0.0.9" in finding.message


def test_the_same_figures_by_this_version_are_damage() -> None:
    found = check_plan(changed("all times / 10, the whole too"), *loaded(KIND)).findings
    assert {finding.fault for finding in found} == {Fault.DIFFERS}
    assert any(finding.message.startswith("predictions.iteration_s: ") for finding in found)


def test_figures_that_contradict_each_other_are_damage_whatever_the_version() -> None:
    found = check_plan(changed("iteration_s halved with all", "0.0.9"), *loaded(KIND)).findings
    assert Fault.REPRICED not in {finding.fault for finding in found}
    assert Fault.FIGURES in {finding.fault for finding in found}


def test_what_is_no_price_is_damage_whatever_the_version() -> None:
    found = check_plan(changed("not modelled dropped", "0.0.9"), *loaded(KIND)).findings
    assert {finding.fault for finding in found} == {Fault.DIFFERS}


def test_a_plan_for_another_profile_of_the_cluster_is_repriced() -> None:
    graph, cluster = loaded(KIND)
    found = check_plan(planned(KIND), graph, slower(cluster)).findings
    repriced = [finding for finding in found if finding.fault is Fault.REPRICED]
    assert len(repriced) == 1
    assert f"for another profile of {cluster.name}" in repriced[0].message


def test_a_plan_for_another_cluster_is_refused() -> None:
    graph, cluster = loaded(KIND)
    other = dataclasses.replace(slower(cluster), name="elsewhere")
    assert [f.fault for f in check_plan(planned(KIND), graph, other).findings] == [Fault.HARDWARE]


def test_a_difference_is_told_by_its_path_with_both_values() -> None:
    plan = changed("workspace_bytes zero")
    right = planned(KIND).predictions.stages[0].memory.workspace_bytes
    (finding,) = check_plan(plan, *loaded(KIND)).findings
    assert finding.fault is Fault.DIFFERS
    assert finding.stage == 0
    assert finding.message.startswith("predictions.stages[0].memory.workspace_bytes: 0 in the file, ")
    assert f"({right}) worked out anew" in finding.message


@pytest.mark.parametrize(("given", "missing"), [((), "with the model"), ((0,), "with the hardware")])
def test_what_cannot_be_checked_is_said(given: tuple[int, ...], missing: str) -> None:
    report = check_plan(planned(KIND), *(loaded(KIND)[i] for i in given))
    assert report.findings == ()
    assert any(line.startswith(missing) for line in report.unchecked)
    assert any("bound, proof" in line for line in report.unchecked)


def test_without_a_search_the_claims_are_not_checked() -> None:
    plan = changed("alternative invented")
    assert check_plan(plan, *loaded(KIND)).findings == ()
    assert "no search" in check_plan(plan, *loaded(KIND)).unchecked[0]
    found = check_plan(plan, *loaded(KIND), search_s=60).findings
    assert [f.message.split(":")[0] for f in found] == ["alternatives[0].iteration_s"]


def test_a_search_that_takes_too_long_is_given_up() -> None:
    report = check_plan(planned(KIND), *loaded(KIND), search_s=1e-9)
    assert report.findings == ()
    assert "takes more than 1e-09 s" in report.unchecked[0]


def test_a_digest_of_its_own_is_needed() -> None:
    plan = seal(planned(KIND))
    found = check_plan(dataclasses.replace(plan, digest="0" * 64), *loaded(KIND)).findings
    assert [f.fault for f in found] == [Fault.DIGEST]


def test_a_runner_up_that_repeats_layers_is_what_the_minor_version_says() -> None:
    """A runner-up alone repeats layers, which the minor version knows, also worked out anew."""
    graph, cluster = load_graph("gpt2-xl"), load_cluster("p3.16xlarge")
    made = plan(graph, cluster, Job(global_batch=64, precision="fp16"))
    assert not any(stage.recompute for stage in made.stages)
    assert any(other.layers for other in made.alternatives)
    assert made.minor == 8  # since blocks say what they compute
    assert check_plan(made, graph, cluster).findings == ()
