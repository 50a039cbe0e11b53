"""Everything that can be wrong with a profile file, found at once, each with its place and a hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import HardwareError
from planner.hardware import lint, load_cluster, load_device, load_stack, resolved_profile

GOOD = """\
cluster: lab
devices: a100-sxm-80gb
node:
  - level: nvlink
    size: 4
    port: {value: 600 GB/s, direction: bidirectional}
    latency: 5 us
    efficiency: 76%
network:
  - level: ethernet
    port: {value: 25 Gbit/s, direction: per-direction}
    latency: 50 us
    efficiency: 0.8
nodes: 2
"""

DEVICE = """\
device: mine
memory: 24 GB
memory_bandwidth: 600 GB/s
matrix: {bf16: 70 TFLOP/s}
vector: 35 TFLOP/s
"""


def _lint(tmp_path: Path, text: str) -> list[tuple[str, str, str]]:
    """Findings as (line:column, message, hint)."""
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    found = []
    for problem in lint(path):
        assert problem.where.startswith(f"{path}:")
        assert problem.excerpt.count("\n") == 1
        found.append((problem.where.removeprefix(f"{path}:"), problem.message, problem.hint))
    return found


def test_a_good_file(tmp_path: Path) -> None:
    assert _lint(tmp_path, GOOD) == []
    cluster = load_cluster(tmp_path / "lab.yaml")
    assert cluster.device_count == 8
    assert cluster.levels[0].byte_per_s == 300e9
    assert cluster.levels[1].byte_per_s == 3.125e9
    assert load_cluster(str(tmp_path / "lab.yaml"), nodes=3).device_count == 12


@pytest.mark.parametrize(
    ("old", "new", "place", "message", "hint"),
    [
        ("latency: 5 us", "latncy: 5 us", "7:5", "unknown key 'latncy'", "did you mean 'latency'?"),
        ("nodes: 2", "nodes: 2\nnodez: 3", "15:1", "unknown key 'nodez'", "did you mean 'node' or 'nodes'?"),
        (
            "    size: 4\n",
            "    size: 4\n    size: 8\n",
            "6:5",
            "duplicate key 'size'",
            "first given in line 5: keep one",
        ),
        ("5 us", "5", "7:14", "5 has no unit: expected a time", "write 5 with one of s, ms, us or ns"),
        (
            "25 Gbit/s",
            "25 Gb/s",
            "11:19",
            "'Gb/s' is not a unit of a bandwidth",
            "write Gbit/s for bits or GB/s for bytes",
        ),
        ("50 us", "50 GB", "12:14", "'GB' is not a unit of a time", "write one of s, ms, us or ns"),
        (
            "    latency: 50 us\n",
            "",
            "10:5",
            "missing field 'latency'",
            "start-up time of one message, such as `5 us`",
        ),
        (
            ", direction: per-direction",
            "",
            "11:5",
            "missing field 'direction'",
            "is the figure `per-direction`, or `bidirectional` (both summed)?",
        ),
        ("bidirectional", "bidirectionl", "6:40", "'bidirectionl' is not one of", "did you mean 'bidirectional'"),
        ("a100-sxm-80gb", "a100-sxm-80g", "2:10", "unknown device 'a100-sxm-80g'", "did you mean 'a100-sxm-80gb'"),
        ("76%", "176%", "8:17", "176% is more than 1", "a fraction lies between 0 and 1, or 0% and 100%"),
        ("76%", "0", "8:17", "0 is zero", "write a positive quantity"),
        ("600 GB/s", "-600 GB/s", "6:19", "-600 GB/s is negative", "write a positive quantity"),
        ("latency: 5 us", "latency:", "7:5", "no value is given", "write a time, with s, ms, us or ns"),
        ("size: 4", "size: 0", "5:11", "'size' must be at least 1, not 0", ""),
        ("size: 4", 'size: "4"', "5:11", "'size' should be an integer", "children that it joins"),
        ("    size: 4\n", "", "4:5", "missing field 'size' in 'node'", "say how many children it joins"),
        ("level: ethernet", "level: nvlink", "10:12", "two levels are called 'nvlink'", "rename one"),
        ("nodes: 2", "nodes: 2\nmax_nodes: 1", "14:8", "2 nodes are more than max_nodes: 1", "lower nodes or raise"),
        (
            "devices: a100-sxm-80gb",
            "devices: [{type: a100-sxm-80gb, count: 3}]",
            "2:10",
            "3 devices listed, which neither fill a node of 4 nor whole nodes",
            "let the counts add up to 4",
        ),
        (
            "devices: a100-sxm-80gb",
            "devices: [{type: a100-sxm-80gb, count: 16}]",
            "2:10",
            "16 devices listed, but nodes: 2 of 4 hold 8",
            "set nodes: 4, or list fewer",
        ),
        (
            "network:\n",
            "network:\n  - {level: rack, size: 3, latency: 9 us, efficiency: 1.0,\n"
            "     port: {value: 1 GB/s, direction: per-direction}}\n",
            "",
            "",
            "",
        ),
        ("nodes: 2", "nodes: 2\nsources: {lab: notes}\nabout: 5", "16:8", "'about' should be a string", "one line"),
        (
            "direction: bidirectional",
            "direction: bidirectional, source: mlengg",
            "6:63",
            "unknown source 'mlengg'",
            "did you mean 'mleng'",
        ),
        (
            "efficiency: 0.8",
            "efficiency: 0.8\n    device_ports: 2",
            "14:19",
            "2 ports a device, but a child has only 1",
            "",
        ),
        ("devices: a100-sxm-80gb\n", "", "1:1", "missing field 'devices'", "a device name, or a list"),
        ("cluster: lab\n", "", "1:1", "missing field 'cluster'", "start with `cluster: NAME`"),
        ("nodes: 2", "nodes: !two 2", "14:8", "tag '!two' has no meaning here", "remove it"),
        ("nodes: 2", "nodes: [2", "", "not valid YAML", ""),
    ],
)
def test_one_mistake(tmp_path: Path, old: str, new: str, place: str, message: str, hint: str) -> None:
    assert old in GOOD
    found = _lint(tmp_path, GOOD.replace(old, new, 1))
    if not message:
        assert found == []
        return
    assert found, "nothing found"
    places = [finding for finding in found if finding[1].startswith(message)]
    assert len(places) == 1, found
    if place:
        assert places[0][0] == place
    assert places[0][2].startswith(hint)
    with pytest.raises(HardwareError):
        load_cluster(tmp_path / "lab.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("vector: 35 TFLOP/s", "vector: 35 TFLOPS", "'TFLOPS' is not a unit of a computing rate"),
        ("bf16: 70", "bf17: 70", "'bf17' is not one of"),
        ("24 GB", "24 GB\nreserve: 24 GB", "the reserve leaves no memory"),
        ("24 GB", "24 GB\nmatrix_efficiency: {points: {}}", "'points' is empty"),
        ("24 GB", "24 GB\nmatrix_efficiency: {points: {1 GB: 50%}}", "'GB' is not a unit of an amount of work"),
        (
            "24 GB",
            "24 GB\nmatrix_efficiency: {points: {2 GFLOP: 50%, 1 GFLOP: 40%}}",
            "the sizes of a curve must ascend",
        ),
        ("24 GB", "1e400 GB", "1e400 GB is too large"),
        ("matrix: {bf16: 70 TFLOP/s}", "matrix: {}", "'matrix' is empty"),
        ("matrix: {bf16: 70 TFLOP/s}", "matrix: 70 TFLOP/s", "'matrix' should be a mapping of keys"),
        ("24 GB", "{value: 24 GB, verified: no}", "'verified' should be a boolean"),
    ],
)
def test_one_mistake_in_a_device(tmp_path: Path, old: str, new: str, message: str) -> None:
    found = _lint(tmp_path, DEVICE.replace(old, new, 1))
    assert [finding[1][: len(message)] for finding in found] == [message]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("price: 0 $/h", ""),  # a machine of one's own
        ("price: -1 $/h", "-1 $/h is negative"),
        ("reserve: 0 B", ""),
        ("reserve: -1 B", "-1 B is negative"),
        ("launch: 0 s", ""),
        ("memory_efficiency: {points: {1 MB: 0%}}", "0% is zero"),
        ("memory_efficiency: {points: {1 MB: 100%}}", ""),
        ("memory_efficiency: {points: {1 MB: 101%}}", "101% is more than 1"),
    ],
)
def test_what_may_be_nothing_and_what_may_not(tmp_path: Path, line: str, message: str) -> None:
    assert [found for _, found, _ in _lint(tmp_path, f"{DEVICE}{line}\n")] == [message] * bool(message)


def test_a_price_of_nothing_is_a_price(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(DEVICE + "price: 0 $/h\n")
    assert load_device(path).price_per_hour == 0.0
    assert resolved_profile(path)["price"]["value"] == "0 $/h"


def test_a_device_of_few_words_gets_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(DEVICE)
    device = load_device(path)
    assert device.reserve_bytes == 600 * 2**20
    assert device.neighbour_bytes == 220 * 2**20
    stack = load_stack()
    assert (device.launch_s, device.handover_s) == (stack.launch_s, stack.handover_s)
    path.write_text(DEVICE + "launch: 7 us\n")
    assert (load_device(path).launch_s, load_device(path).handover_s) == (7e-6, 0.0)
    # the sizes of an A100's curve, moved by 70/312 and 600/2039
    assert device.matrix_efficiency.sizes == (22e6, 220e6, 3.6e9, 29e9, 2.2e12)
    assert device.memory_efficiency.sizes == (29e3, 290e3, 2.9e6, 29e6)
    assert "source" not in resolved_profile(path)["memory"]


def test_devices_of_ones_own(tmp_path: Path) -> None:
    body = "".join(f"    {line}\n" for line in DEVICE.splitlines()[1:])
    path = tmp_path / "lab.yaml"
    path.write_text(GOOD.replace("a100-sxm-80gb", "mine") + "device_types:\n  mine:\n" + body)
    cluster = load_cluster(path)
    assert cluster.devices[0].name == "mine"
    assert cluster.devices[0].memory_bytes == 24_000_000_000


def test_all_findings_at_once_in_order(tmp_path: Path) -> None:
    text = GOOD.replace("5 us", "5", 1).replace("25 Gbit/s", "25 Gb/s").replace("nodes: 2", "nodes: 2\nnodes: 3\nx: 1")
    found = _lint(tmp_path, text.replace("a100-sxm-80gb", "a1000", 1))
    assert [place for place, _, _ in found] == ["2:10", "7:14", "11:19", "15:1", "16:1"]
    with pytest.raises(HardwareError) as caught:
        load_cluster(tmp_path / "lab.yaml")
    assert len(caught.value.problems) == 5
    assert "5 errors in the profile" in str(caught.value)


def test_the_caret_stands_under_the_mistake(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(GOOD.replace("600 GB/s", "600 Gb/s"))
    (problem,) = lint(path)
    assert problem.excerpt == (
        "    6 |     port: {value: 600 Gb/s, direction: bidirectional}\n"
        "      |                   ^^^^^^^^"
    )  # fmt: skip


def test_sizes_of_switch_tiers_must_multiply(tmp_path: Path) -> None:
    leaf = (
        "  - {level: leaf, size: 2, latency: 9 us, efficiency: 1.0, port: {value: 1 GB/s, direction: per-direction}}\n"
    )
    found = _lint(tmp_path, GOOD.replace("network:\n", "network:\n" + leaf).replace("nodes: 2", "nodes: 3"))
    assert found == [("10:25", "3 nodes do not fill groups of 2", "take 2 or 4 nodes, or change the size")]


def test_the_outermost_level_has_no_size(tmp_path: Path) -> None:
    found = _lint(tmp_path, GOOD.replace("level: ethernet", "level: ethernet\n    size: 2"))
    assert [finding[:2] for finding in found] == [("11:11", "the outermost level has a size")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("- a\n- b\n", "a profile is a mapping of keys to values"),
        ("cluster: x\n\tdevices: y\n", "not valid YAML: found character '\\t' that cannot start any token"),
        ("cluster: *x\n", "not valid YAML: found undefined alias 'x'"),
        ("cluster: a\n---\ncluster: b\n", "not valid YAML: expected a single document"),
        ("cluster: a\ndevice: b\n", "a profile has either 'cluster' or 'device'"),
        ("? [a]\n: b\n", "a key must be a plain word"),
        ("&a [*a]\n", "too deep or too large for a profile"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, text: str, message: str) -> None:
    assert any(found.startswith(message) for _, found, _ in _lint(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="cannot read: No such file"):
        lint(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HardwareError, match="not a text file: byte 0xff is not UTF-8"):
        lint(tmp_path / "binary.yaml")
    with pytest.raises(HardwareError, match="Is a directory"):
        lint(tmp_path)


def test_a_line_without_end_is_shown_around_the_mistake(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"cluster: x  # {'y' * 5000}\nabout: {'z' * 5000}\tunit: [\n")
    for problem in lint(path):
        assert all(len(line) < 200 for line in problem.excerpt.splitlines())


def test_brackets_without_end_are_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: " + "[" * 5000)
    (problem,) = lint(path)
    assert "too deep" in problem.message
    assert len(problem.excerpt) < 500


def test_more_devices_than_can_be_numbered(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="800,000,000 devices"):
        load_cluster("dgx-a100", nodes=100_000_000)
    path = tmp_path / "x.yaml"
    path.write_text(GOOD.replace("size: 4", "size: 1000000000"))
    assert any("devices" in problem.message and "000,000" in problem.message for problem in lint(path))


@pytest.mark.parametrize("version", ["1.5", "3.0", "0.1"])
def test_yaml_of_another_version(tmp_path: Path, version: str) -> None:
    found = _lint(tmp_path, f"%YAML {version}\n---\n{GOOD}")
    assert len(found) == 1
    place, message, _ = found[0]
    assert place.startswith("1:")
    assert message.startswith("not valid YAML")


@pytest.mark.parametrize("name", ["[a]", "{a: b}", "5", "null"])
def test_a_level_whose_name_is_no_text(tmp_path: Path, name: str) -> None:
    found = _lint(tmp_path, GOOD.replace("level: ethernet", f"level: {name}"))
    assert any("'level' should be" in message for _, message, _ in found)


@pytest.mark.parametrize("count", ["9" * 400, "9" * 5000, "1e308", ".inf", ".nan", "-1", "1e999999999"])
def test_counts_and_quantities_out_of_range(tmp_path: Path, count: str) -> None:
    for text in (GOOD.replace("nodes: 2", f"nodes: {count}"), GOOD.replace("50 us", f"{count} us")):
        assert _lint(tmp_path, text)
