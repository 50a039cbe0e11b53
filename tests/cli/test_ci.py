"""Plans held fixed in CI: the hook and the workflow's script of docs/ci in a git repository with two branches."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import planner
from tests.cli.plan_files import run as command_line

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / "docs" / "ci"
JOB = ("plan", "model.onnx", "-H", "cluster.yaml", "--nodes", "2", "-b", "64")
PLAN = (*JOB, "--pp", "1", "--tp", "1", "-q", "-o", "m.plan.json")


@dataclass(frozen=True)
class Repository:
    """A git repository: a model, a hardware profile and their plan on the branch `main`, work on `topic`."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command there."""
        return subprocess.run(words, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)

    def shardplan(self, *words: str, code: int = 0) -> str:
        """Run the command line there, in this process; its output."""
        out = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out):
            assert command_line(*words) == code, out.getvalue()
        return out.getvalue()

    def edit(self, name: str, change: Callable[[str], str]) -> None:
        """Change a file."""
        before = (self.folder / name).read_text()
        after = change(before)
        assert after != before
        (self.folder / name).write_text(after)

    def commit(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Commit everything; the hook may refuse."""
        self.run("git", "add", "--all", ".")
        return self.run("git", "commit", "-m", "work", *options)

    def push(self) -> None:
        """Commit everything past the hook."""
        assert self.commit("--no-verify").returncode == 0

    def compare(self, *gates: str, base: str = "main") -> tuple[int, str, str]:
        """The workflow's step: exit code, annotations, comment."""
        output = self.folder / "out.md"
        done = self.run(str(CI / "plan-diff.sh"), base, "out.md", *gates)
        return done.returncode, done.stdout + done.stderr, output.read_text() if output.exists() else ""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    folder = tmp_path_factory.mktemp("repository")
    command = folder / "bin" / "shardplan"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from cli.main import main; main()" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    own = Repository(folder, environment)
    own.run("git", "init", "-q", "-b", "main")
    (folder / ".gitignore").write_text("bin\nout.md\n")
    own.shardplan("models", "build", "gpt2", "--layers", "2", "--seq", "128", "-o", "model.onnx")
    own.shardplan("hardware", "init", "-o", "cluster.yaml")
    own.shardplan(*PLAN)
    hook = folder / ".git" / "hooks" / "pre-commit"
    hook.write_bytes((CI / "pre-commit").read_bytes())
    hook.chmod(0o755)
    done = own.commit()
    assert done.returncode == 0, done.stderr + done.stdout
    return own


@pytest.fixture
def topic(planned: Repository) -> Repository:
    """A fresh branch."""
    planned.run("git", "checkout", "-qfB", "topic", "main")
    planned.run("git", "clean", "-qfd")
    return planned


def deeper(own: Repository) -> None:
    own.shardplan("models", "build", "gpt2", "--layers", "3", "--seq", "128", "-o", "model.onnx")


def halved(text: str) -> str:
    """The profile with half of its network's bandwidth."""
    inside, _, network = text.partition("\nnetwork:")
    slower = re.sub(r"value: (\d+) GB/s", lambda m: f"value: {int(m[1]) / 2} GB/s", network, count=1)
    return f"{inside}\nnetwork:{slower}"


def test_nothing_changed(topic: Repository) -> None:
    (topic.folder / "README").write_text("words")
    assert topic.commit().returncode == 0
    code, annotations, comment = topic.compare()
    assert code == 0
    assert annotations == "::notice title=shardplan::1 plan, no changes\n"
    assert comment == "", "unchanged plans are silent"
    assert "no changes" in topic.shardplan("diff", "main:m.plan.json", "m.plan.json")


def test_one_layer_more(topic: Repository) -> None:
    deeper(topic)
    refused = topic.commit()
    assert refused.returncode == 1
    assert "planning anew gives a different answer" in refused.stdout + refused.stderr
    assert "1 layer more" in refused.stdout + refused.stderr
    topic.shardplan(*PLAN)
    assert topic.commit().returncode == 0
    code, annotations, comment = topic.compare()
    assert code == 1
    assert "::error file=m.plan.json,title=gate step_time%3A+3%25::step_time is " in annotations
    assert "1 layer more (transformer.h.2)" in comment
    assert comment.startswith("<!-- shardplan diff -->\n\n**shardplan: 1 of 1 plan FAILED**\n\n### `m.plan.json`\n")
    assert "**shardplan: FAILED: step_time:+3%**" in comment
    assert len(comment.encode()) < 60_000
    assert topic.compare("step_time:+90%")[0] == 0


def test_half_of_a_bandwidth(topic: Repository) -> None:
    topic.edit("cluster.yaml", halved)
    topic.shardplan(*PLAN)
    assert topic.commit().returncode == 0
    said = topic.shardplan(
        "diff", "main:m.plan.json", "m.plan.json", "-H", "main:cluster.yaml", "-H", "cluster.yaml", "--model",
        "model.onnx", "--fail-on", "slower", code=1,
    )  # fmt: skip
    assert "the hardware changed: level" in said
    assert "FAILED: slower" in said


def test_a_broken_profile(topic: Repository) -> None:
    topic.edit("cluster.yaml", lambda text: text.replace("port:", "prot:", 1))
    topic.shardplan(*PLAN, code=4)
    assert topic.commit().returncode == 1
    topic.shardplan("check", "m.plan.json", "--replan", code=4)


def test_a_plan_that_no_longer_fits(topic: Repository) -> None:
    topic.edit("cluster.yaml", lambda text: re.sub(r"  memory: \{value: [^,]+,", "  memory: {value: 2300 MiB,", text))
    said = topic.shardplan(*JOB, "--devices", "1", "--format", "json", code=6)
    (topic.folder / "m.plan.json").write_text(said)
    assert topic.commit().returncode == 1  # the hook wants a plan
    code, annotations, comment = topic.compare()
    assert code == 1
    assert "title=infeasible::" in annotations
    assert "**shardplan: FAILED:" in comment


def test_another_version_of_the_tool(topic: Repository) -> None:
    topic.edit("m.plan.json", lambda text: re.sub(r'"version": "[^"]+"', '"version": "0.0.1"', text))
    assert topic.commit().returncode == 0, "the plan is the same, whoever wrote it"
    code, annotations, comment = topic.compare()
    assert code == 0
    assert "title=tool-changed::the tool changed: version " in annotations
    assert "the tool changed" in comment


def test_an_edited_plan_fails(topic: Repository) -> None:
    topic.edit("m.plan.json", lambda text: re.sub(r'"samples_per_s": [0-9.e+]+', '"samples_per_s": 9999.0', text))
    assert topic.commit().returncode == 1
    code, annotations, _ = topic.compare()
    assert code == 1
    assert "title=digest::the new plan was edited by hand" in annotations


def test_a_plan_cut_off_fails(topic: Repository) -> None:
    topic.edit("m.plan.json", lambda text: text[:-200])
    assert topic.compare()[0] == 7


def test_a_plan_of_a_revision_is_migrated_to_a_file_of_a_name(topic: Repository) -> None:
    topic.shardplan("migrate", "main:m.plan.json", code=2)
    topic.shardplan("migrate", "main:m.plan.json", "-o", "other.json")
    assert (topic.folder / "other.json").read_bytes() == (topic.folder / "m.plan.json").read_bytes()
    (topic.folder / "other.json").unlink()


def test_the_bytes_of_a_plan_do_not_depend_on_how_it_is_asked_for(topic: Repository) -> None:
    again = [word for word in PLAN if word != "-q"]
    again[again.index("m.plan.json")] = "other.json"
    again[again.index("model.onnx")] = str(topic.folder / "model.onnx")
    topic.shardplan(*again)
    assert (topic.folder / "other.json").read_bytes() == (topic.folder / "m.plan.json").read_bytes()
    (topic.folder / "other.json").unlink()


def test_a_stale_plan_fails_in_hook_and_workflow(topic: Repository) -> None:
    deeper(topic)
    assert topic.commit().returncode == 1
    topic.push()
    code, annotations, comment = topic.compare()
    words = "the plan is for model, as it was: 1 layer more (transformer.h.2)"
    assert code == 1
    assert f"::error file=m.plan.json,title=stale::{words}" in annotations
    assert "### `m.plan.json`\n\n**shardplan: FAILED: an up-to-date plan**" in comment
    assert words in comment
    assert topic.compare("step_time:+90%")[0] == 1, "figures of a stale plan say nothing"
    topic.shardplan(*PLAN)
    topic.push()
    assert topic.compare("step_time:+90%")[0] == 0


def test_a_plan_of_other_hardware_is_stale(topic: Repository) -> None:
    topic.edit("cluster.yaml", halved)
    topic.push()
    code, annotations, _ = topic.compare()
    assert code == 1
    assert "title=stale::the plan is for cluster (2 nodes), as it was: hardware.levels[1].byte_per_s: " in annotations


def test_a_comment_in_a_profile_makes_no_plan_stale(topic: Repository) -> None:
    topic.edit("cluster.yaml", lambda text: f"# looked at again\n{text}")
    topic.push()
    assert topic.compare() == (0, "::notice title=shardplan::1 plan, no changes\n", "")


def test_a_source_that_went_or_cannot_be_read_fails(topic: Repository) -> None:
    topic.run("git", "mv", "model.onnx", "other.onnx")
    topic.push()
    code, annotations, _ = topic.compare()
    assert code == 1
    assert "title=stale::its model model.onnx is no longer in the repository" in annotations
    (topic.folder / "model.onnx").write_text("version https://git-lfs.github.com/spec/v1\n")
    topic.push()
    code, annotations, _ = topic.compare()
    assert code == 1
    assert "title=unreadable-source::its model model.onnx cannot be used: " in annotations


def test_a_removed_plan_fails_unless_it_is_said_to_be_no_error(topic: Repository) -> None:
    (topic.folder / "m.plan.json").unlink()
    topic.push()
    code, annotations, comment = topic.compare()
    assert code == 1
    assert "::error file=m.plan.json,title=plan-removed::the plan is removed" in annotations
    assert "### `m.plan.json`\n\n**shardplan: FAILED: a plan that exists**" in comment
    rules = topic.folder / "bin" / "rules"
    rules.write_text("plan-removed: info\n")
    allowed = dataclasses.replace(topic, environment={**topic.environment, "RULES": str(rules)})
    code, annotations, comment = allowed.compare()
    assert code == 0
    assert "::notice file=m.plan.json,title=plan-removed::" in annotations
    assert "### `m.plan.json`" in comment


def test_a_renamed_plan_is_compared_with_the_one_that_it_was(topic: Repository) -> None:
    topic.run("git", "mv", "m.plan.json", "n.plan.json")
    topic.push()
    code, annotations, comment = topic.compare()
    assert code == 0
    assert annotations == "::notice file=n.plan.json,title=plan-renamed::the plan was m.plan.json\n"
    assert "### `n.plan.json`" in comment
    assert "the plan was m.plan.json" in comment


@pytest.mark.parametrize(
    "name", ["große Pläne/Modell 2.plan.json", "計画.plan.json", "-o.plan.json", "a'b\"c.plan.json", "a\nb.plan.json"]
)
def test_plans_of_any_name_are_held_against_their_sources(topic: Repository, name: str) -> None:
    folder = topic.folder / Path(name).parent
    folder.mkdir(exist_ok=True)
    for file in ("model.onnx", "cluster.yaml"):
        (folder / file).write_bytes((topic.folder / file).read_bytes())
    (topic.folder / name).write_bytes((topic.folder / "m.plan.json").read_bytes())
    topic.push()
    code, annotations, _ = topic.compare()
    assert code == 0
    assert "title=plan-added::the plan is new, and compared with itself" in annotations
    topic.run("git", "branch", "-f", "base")
    topic.shardplan("models", "build", "gpt2", "--layers", "3", "--seq", "128", "-o", str(folder / "model.onnx"))
    topic.push()
    code, annotations, comment = topic.compare(base="base")
    assert code == 1
    assert "title=stale::the plan is for model, as it was: 1 layer more" in annotations
    shown = name.replace("\n", "\\n")
    assert f"### `{shown}`" in comment
    assert comment.count("### `") == (2 if folder == topic.folder else 1), "the model at the top is of both plans"


def test_the_model_beside_a_plan_is_its_model(topic: Repository) -> None:
    """Two folders with a model of one name each, and one of them changes."""
    for folder in ("one", "two"):
        (topic.folder / folder).mkdir()
        for file in ("model.onnx", "cluster.yaml", "m.plan.json"):
            (topic.folder / folder / file).write_bytes((topic.folder / file).read_bytes())
    topic.push()
    topic.run("git", "branch", "-f", "base")
    topic.shardplan("models", "build", "gpt2", "--layers", "3", "--seq", "128", "-o", "two/model.onnx")
    topic.push()
    _, annotations, comment = topic.compare(base="base")
    assert re.findall(r"file=([^,]+),title=stale", annotations) == ["two/m.plan.json"]
    assert "one/m.plan.json" not in comment


def test_a_model_in_another_folder_is_found(topic: Repository) -> None:
    (topic.folder / "plans").mkdir()
    (topic.folder / "models").mkdir()
    for file, folder in (("model.onnx", "models"), ("cluster.yaml", "models"), ("m.plan.json", "plans")):
        topic.run("git", "mv", file, f"{folder}/{file}")
    topic.push()
    topic.run("git", "branch", "-f", "base")
    assert topic.compare(base="base")[0] == 0
    topic.shardplan("models", "build", "gpt2", "--layers", "3", "--seq", "128", "-o", "models/model.onnx")
    assert topic.commit().returncode == 1, "the hook finds it, too"
    topic.push()
    assert "file=plans/m.plan.json,title=stale" in topic.compare(base="base")[1]


def test_every_verdict_of_several_plans_names_its_file_and_gates(topic: Repository) -> None:
    for name in ("a", "b", "c"):
        (topic.folder / f"{name}.plan.json").write_bytes((topic.folder / "m.plan.json").read_bytes())
    topic.push()
    topic.run("git", "branch", "-f", "base")
    topic.edit("cluster.yaml", halved)
    for name in ("a", "c", "m"):
        topic.shardplan(*PLAN[:-1], f"{name}.plan.json")
    topic.push()
    code, _, comment = topic.compare("step_time:+0.1%", base="base")
    assert code == 1
    assert comment.startswith("<!-- shardplan diff -->\n\n**shardplan: 4 of 4 plans FAILED**")
    assert re.findall(r"### `(.)\.plan\.json`\n\n\*\*shardplan: FAILED: (.*)\*\*", comment) == [
        ("a", "step_time:+0.1%"), ("b", "an up-to-date plan"), ("c", "step_time:+0.1%"), ("m", "step_time:+0.1%"),
    ]  # fmt: skip
    assert comment.count("- step_time:+0.1%: step_time is ") == 3


OURS = """stack: ours
about: measured here
base: megatron-2025
launch: {value: 20 us, source: here}
sources:
  here: measured on our machines
"""


def costs_of(own: Repository) -> None:
    """Seconds of the model's operators, as a file."""
    graph = planner.load_graph(str(own.folder / "model.onnx"))
    seconds = {node.key: [1e-4, 2e-4, 1e-4] for node in graph.nodes}
    head = {"format": "shardplan-costs/1", "model": graph.fingerprint, "of": "this machine", "batch": 1}
    (own.folder / "costs.json").write_text(json.dumps({**head, "operators": seconds}))


@pytest.mark.parametrize("source", ["ours.yaml", "costs.json", "configuration.json"])
def test_stacks_costs_and_configurations_are_sources_too(topic: Repository, source: str) -> None:
    (topic.folder / "ours.yaml").write_text(OURS)
    (topic.folder / "configuration.json").write_text(
        '{"format": "shardplan-configuration", "version": 1, "degrees": {"tensor": 2}}'
    )
    costs_of(topic)
    option = {"ours.yaml": "--stack", "costs.json": "--costs", "configuration.json": "--config"}[source]
    job = ("predict", "model.onnx", "-H", "cluster.yaml", "--nodes", "2", "-b", "64", option, source)
    topic.shardplan(*job, "-o", "s.plan.json")
    topic.push()
    topic.run("git", "branch", "-f", "base")
    assert topic.compare(base="base")[0] == 0
    before, after = {
        "ours.yaml": ("20 us", "30 us"),
        "costs.json": ('"of": "', '"of": "other '),
        "configuration.json": ("2}", "4}"),
    }[source]
    topic.edit(source, lambda text: text.replace(before, after, 1))
    topic.push()
    code, annotations, _ = topic.compare(base="base")
    assert code == 1
    assert "file=s.plan.json,title=stale::" in annotations
    assert "m.plan.json" not in annotations


def test_a_plan_whose_sources_are_elsewhere_is_let_pass_and_said_where_it_changed(topic: Repository) -> None:
    topic.run("git", "rm", "-q", "--cached", "model.onnx")
    (topic.folder / ".git" / "info" / "exclude").write_text("model.onnx\n")
    topic.push()
    topic.run("git", "branch", "-f", "base")
    assert topic.compare(base="base") == (0, "::notice title=shardplan::1 plan, no changes\n", "")
    topic.edit("cluster.yaml", halved)
    topic.shardplan(*PLAN)
    topic.push()
    code, annotations, _ = topic.compare("error", base="base")
    assert code == 0
    words = "its model model.onnx is not in the repository: whether it changed is not known"
    assert f"::notice file=m.plan.json,title=unknown-source::{words}" in annotations
    (topic.folder / ".git" / "info" / "exclude").write_text("")


def test_a_revision_alone_is_compared_with_the_work_tree(topic: Repository) -> None:
    assert topic.shardplan("diff", "main") == "1 plan, no changes\n"
    deeper(topic)
    said = topic.shardplan("diff", "main", code=1)
    assert said.startswith("m.plan.json: the plan is for model, as it was: 1 layer more")
    topic.shardplan("diff", "nowhere", code=2)
    topic.shardplan("diff", "--", "--output=x", code=2)
    topic.shardplan("diff", "main", "--model", "model.onnx", code=2)
    topic.shardplan("diff", "m.plan.json", "m.plan.json", "--comment", "x.md", code=2)
    assert not (topic.folder / "x").exists()


def test_the_workflow_runs_the_script_that_is_tested() -> None:
    workflow = (CI / "plan-diff.yml").read_text()
    assert 'run: bash docs/ci/plan-diff.sh "$BASE" plan-diff.md' in workflow
    assert "<!-- shardplan diff -->" in workflow
