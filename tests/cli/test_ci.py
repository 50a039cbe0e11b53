"""Plans held fixed in CI: the hook and the workflow's script of docs/ci in a git repository with two branches."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

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

    def commit(self) -> subprocess.CompletedProcess[str]:
        """Commit everything; the hook may refuse."""
        self.run("git", "add", ".")
        return self.run("git", "commit", "-m", "work")

    def compare(self, *gates: str) -> tuple[int, str, str]:
        """The workflow's step: exit code, annotations, comment."""
        output = self.folder / "out.md"
        done = self.run(str(CI / "plan-diff.sh"), "main", "out.md", *gates)
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
    assert annotations.startswith("::notice file=m.plan.json,title=shardplan::")
    assert comment.startswith("<!-- shardplan diff -->\n\n**shardplan: ")
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


def test_the_workflow_runs_the_script_that_is_tested() -> None:
    workflow = (CI / "plan-diff.yml").read_text()
    assert 'run: bash docs/ci/plan-diff.sh "$BASE" plan-diff.md' in workflow
    assert "<!-- shardplan diff -->" in workflow
