"""The tree is as CONTRIBUTING.md says: links, package list, imports, and what the wheel holds."""

from __future__ import annotations

import ast
import configparser
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("passes", "runtime")
LIBRARY = sorted(path for folder in ("efftra_fx", *MAPPED) for path in (ROOT / folder).glob("*.py"))
SOURCES = sorted(
    LIBRARY + [path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).glob("*.py")]
)


@cache
def parsed(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str, int, tuple[str, ...]]]:
    """Yield (level, module, line, names) of each import in a file; `import a.b` has no names."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name, node.lineno, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", node.lineno, tuple(alias.name for alias in node.names)


@pytest.mark.parametrize("folder", MAPPED)
def test_the_package_shows_the_root_folder_by_a_link(folder: str) -> None:
    link = ROOT / "efftra_fx" / folder
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{folder}"
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", MAPPED)
def test_mapped_folders_stay_flat(folder: str) -> None:
    assert [path.name for path in (ROOT / folder).iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_setup_lists_every_package_and_maps_it() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    packages = setup["options"]["packages"].split()
    assert packages == ["efftra_fx", *(f"efftra_fx.{folder}" for folder in MAPPED)]
    mapping = dict(line.split(" = ") for line in setup["options"]["package_dir"].strip().splitlines())
    assert mapping == {"efftra_fx": "efftra_fx"} | {f"efftra_fx.{folder}": folder for folder in MAPPED}


def test_nobody_imports_the_mapped_folders_by_their_bare_name() -> None:
    for path in SOURCES:
        for level, module, line, _ in imports(path):
            assert level or module.split(".")[0] not in MAPPED, f"{path.name}:{line} imports {module}"


def test_nobody_inside_imports_from_the_face() -> None:
    submodules = {source.stem for source in LIBRARY} | set(MAPPED)
    for path in LIBRARY:
        for level, module, line, names in imports(path):
            if level == 0 and module == "efftra_fx":
                assert names and set(names) <= submodules, f"{path.name}:{line} imports {names or 'all'} from the face"


@pytest.mark.parametrize("folder", MAPPED)
def test_neighbours_are_imported_relatively_and_the_rest_absolutely(folder: str) -> None:
    for path in sorted((ROOT / folder).glob("*.py")):
        for level, module, line, names in imports(path):
            assert level <= 1, f"{path.name}:{line} climbs out of its folder"
            assert level or not module.startswith(f"efftra_fx.{folder}"), (
                f"{path.name}:{line} names a neighbour absolutely"
            )
            if level:
                neighbours = (module,) if module else names
                assert all((ROOT / folder / f"{name.split('.')[0]}.py").exists() for name in neighbours), (
                    f"{path.name}:{line}"
                )


def test_loaded_files_are_data_and_only_the_generator_runs_text() -> None:
    for path in LIBRARY:
        modules = {module.split(".")[0] for _, module, _, _ in imports(path)}
        assert not modules & {"pickle", "dill", "shelve", "marshal", "cloudpickle"}, path.name
        called = {ast.unparse(node.func) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)}
        assert "torch.load" not in called, path.name
        assert path.name == "emit.py" or not called & {"eval", "exec"}, path.name


def test_the_wheel_has_one_top_level_package_with_everything_in_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns(
        ".git", ".venv", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", "tests", "build"
    )
    shutil.copytree(ROOT, tree, symlinks=True, ignore=skip)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"efftra_fx"}
    inside = {f"efftra_fx/{path.name}" for path in (ROOT / "efftra_fx").glob("*.py")}
    for folder in MAPPED:
        inside |= {f"efftra_fx/{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
    assert inside | {"efftra_fx/py.typed"} <= set(names)
