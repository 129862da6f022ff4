"""What the documents show works: every code block runs, every name exists, every link leads somewhere.

In a document, a `python` block whose first line is `# NAME.py` is a file; other `python`
blocks run in order, in one namespace. Of a `bash` block each line runs: `torchrun` on at
most two local ranks, `python` and `efftra` as written, and of `make` the target must exist.
`console`, `text`, `json` and `toml` blocks show what a person sees or a file holds.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

import efftra_fx
from efftra_fx import errors
from efftra_fx.api import CompiledModel

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
SHOWN = ("console", "text", "json", "toml", "dot", "diff")

# Runs a document's steps in the folder it is started in; a failure shows the document's own line.
DRIVER = """
import json, subprocess, sys
document, steps = json.loads(sys.stdin.read())
names = {"__name__": "__main__"}
for step in steps:
    if step["language"] == "python":
        exec(compile("\\n" * step["line"] + step["text"], document, "exec"), names)
    else:
        print(f"{document}:{step['line']}:", step["text"], flush=True)
        subprocess.run(step["text"], shell=True, check=True, stdin=subprocess.DEVNULL)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document; `line` is the fence's."""

    language: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """The file that the block is, if it is one."""
        found = re.match(r"# (\w+\.(?:py|toml))\n", self.text)
        return found.group(1) if found else None


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match.group(1), match.group(2), text.count("\n", 0, match.start()) + 1) for match in found]


def commands(block: Block) -> list[str]:
    """Return the lines of a shell block in the form in which they can run here."""
    runnable = []
    for line in block.text.replace("\\\n", " ").splitlines():
        line = line.partition("  #")[0].strip()
        if not line or line.startswith(("#", "make ", "pip install", "git clone", "cd ")):
            continue
        line = re.sub(r"--nproc-per-node[= ]\d+", "--nproc-per-node 2", line)
        for tool, module in (
            ("torchrun", "torch.distributed.run --standalone"),
            ("efftra", "efftra_fx"),
            ("python", ""),
        ):
            if line.split()[0] == tool:
                runnable.append(line.replace(tool, f"{sys.executable} -m {module}" if module else sys.executable, 1))
                break
        else:
            pytest.fail(f"line {block.line}: nothing here runs {line!r}")
    return runnable


def steps(path: Path) -> list[Block]:
    """Return what there is to run of a document, in order."""
    ordered = []
    for block in blocks(path):
        if block.language == "python" and block.file_name is None:
            ordered.append(block)
        elif block.language == "bash":
            ordered += [Block("bash", command, block.line) for command in commands(block)]
    return ordered


@pytest.mark.parametrize("path", DOCUMENTS[1:], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_a_document_runs(path: Path, tmp_path: Path) -> None:
    for block in blocks(path):
        assert block.language in ("python", "bash", *SHOWN), f"{path.name}:{block.line} names no language"
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text, encoding="utf-8")
    ran = run([path.name, [asdict(step) for step in steps(path)]], tmp_path)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"


def run(job: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a document's steps in a folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", DRIVER]
    return subprocess.run(
        command, input=json.dumps(job), cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def test_the_readme_runs_and_what_it_converts_in_ten_lines_prints_the_same(tmp_path: Path) -> None:
    found = {block.file_name: block for block in blocks(ROOT / "README.md") if block.file_name}
    single, train = found["single.py"].text, found["train.py"].text
    changes = list(difflib.ndiff(single.splitlines()[1:], train.splitlines()[1:]))
    assert sum(line.startswith("+ ") for line in changes) <= 10
    assert sum(line.startswith("- ") for line in changes) <= 10
    (tmp_path / "single.py").write_text(single, encoding="utf-8")
    (tmp_path / "train.py").write_text(train, encoding="utf-8")
    alone = run(["README.md", [asdict(Block("bash", f"{sys.executable} single.py", 0))]], tmp_path)
    together = run(["README.md", [asdict(step) for step in steps(ROOT / "README.md")]], tmp_path)
    shown = [re.findall(r"epoch \d: loss [\d.]+|accuracy [\d.]+", ran.stdout) for ran in (alone, together)]
    assert len(shown[0]) == 6, alone.stderr
    assert shown[0] == shown[1], together.stderr


def test_make_has_every_target_that_the_documents_name() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        for block in blocks(path):
            if block.language == "bash":
                assert set(re.findall(r"^make (\w+)", block.text, re.MULTILINE)) <= targets


def test_every_name_that_the_documents_give_exists() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`program\.(\w+)", text):
            assert hasattr(CompiledModel, name), f"{path.name} names program.{name}"
        for name in re.findall(r"`efftra_fx\.(\w+)", text):
            assert hasattr(efftra_fx, name), f"{path.name} names efftra_fx.{name}"


def test_every_link_between_documents_leads_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_every_error_has_its_place_in_the_documents() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    named = [
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.EfftraError)
    ]
    assert [name for name in named if f"`{name}`" not in text] == []
