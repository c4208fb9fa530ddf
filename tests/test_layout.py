"""The package is laid out as it says: imports go one way, the surface is frozen, one name is installed."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mmprefill

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"mmprefill": "mmprefill", "encoders": "mmprefill.encoders", "pipeline": "mmprefill.pipeline"}
LAYERS = (  # a module imports from its own layer and those before it
    {"", "errors", "config", "types", "files", "streams", "trace", "metrics"},
    {"media", "fetch", "formats", "sources", "models"},
    {"encoders"},
    {"pipeline"},
    {"results", "scoring"},
    {"engine", "flow", "room"},
    {"prefiller"},
)
FACE = len(LAYERS)  # whatever is not named above is for people: commands, jobs, reports
SURFACE = {
    "AsyncPrefiller": "class mmprefill.engine",
    "Choice": "class mmprefill.types",
    "Generation": "class mmprefill.types",
    "MMPrefillError": "class mmprefill.errors",
    "MediaLimits": "class mmprefill.config",
    "Metrics": "class mmprefill.metrics",
    "Observer": "class mmprefill.metrics",
    "PrefillConfig": "class mmprefill.config",
    "PrefillResult": "class mmprefill.results",
    "Prefiller": "class mmprefill.prefiller",
    "Rendered": "class mmprefill.types",
    "Request": "class mmprefill.types",
    "Trace": "class mmprefill.trace",
    "load": "function mmprefill.pipeline.kv_read",
    "load_shard": "function mmprefill.pipeline.kv_read",
    "run_job": "function mmprefill.job",
    "save_shard": "function mmprefill.pipeline.kv_store",
}


def modules():
    """Dotted name -> file, for every module of the package."""
    found = {}
    for folder, package in FOLDERS.items():
        for file in sorted((ROOT / folder).glob("*.py")):
            found[package if file.stem == "__init__" else f"{package}.{file.stem}"] = file
    return found


def layer(module):
    part = module.partition(".")[2].partition(".")[0]
    return next((rank for rank, names in enumerate(LAYERS) if part in names), FACE)


def imports(file, known):
    """Modules of the package that a file imports when it runs, inside functions too."""
    found = set()
    for node in statements(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            children = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= children & known.keys() or {node.module}
    return found & known.keys()


def statements(tree):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from statements(node)


def test_imports_go_one_way():
    """From the face towards errors and types; never back, and in no circle."""
    known = modules()
    graph = {name: imports(file, known) - {name} for name, file in known.items()}
    backward = [f"{name} imports {each}" for name in graph for each in graph[name] if layer(each) > layer(name)]
    assert not backward
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_public_surface_is_frozen():
    assert mmprefill.__all__ == sorted(SURFACE)
    for name, expected in SURFACE.items():
        kind, home = expected.split()
        found = getattr(mmprefill, name)
        assert found.__module__ == home
        assert isinstance(found, type) == (kind == "class")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mmprefill.nothing  # noqa: B018


def test_every_module_imports():
    for name in modules():
        importlib.import_module(name)


def python(code, folder, *path):
    """Run code in a bare interpreter (no site-packages, so no install) that starts in `folder`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


SHOW = "import mmprefill, mmprefill.encoders, mmprefill.pipeline; print(mmprefill.pipeline.__file__, end='')"


def imported_from(code, folder, *path):
    run = python(code, folder, *path)
    assert run.returncode == 0, run.stderr
    return Path(run.stdout)


def test_a_checkout_imports_without_an_install():
    assert imported_from(SHOW, ROOT) == ROOT / "pipeline/__init__.py"


@pytest.mark.parametrize("folder", ["encoders", "pipeline"])
def test_mapped_folders_have_one_name(folder):
    """The same file under two names would be two modules with two sets of classes."""
    run = python(f"import {folder}", ROOT)
    assert f"ImportError: import mmprefill.{folder} instead" in run.stderr


def test_importing_is_cheap():
    code = (
        "import mmprefill, sys; from mmprefill import MediaLimits, MMPrefillError, Request;"
        "assert not {'torch', 'transformers', 'PIL', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def tracked():
    """Files of the three folders that git knows."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *FOLDERS]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git tracks and a build needs."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in [*tracked(), "pyproject.toml", "README.md", "LICENSE"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    return copy


def build(checkout, kind, folder):
    """Build and unpack a wheel as pip would, with the backend that pyproject.toml names."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", code, folder], cwd=checkout, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def site(checkout, tmp_path_factory):
    """A site-packages folder with the installed wheel and nothing else."""
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


def test_an_install_claims_one_name(site):
    names = {entry.name for entry in site.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"mmprefill"}
    assert len(names) == 2


def test_the_wheel_holds_what_git_tracks(site):
    installed = {str(file.relative_to(site)) for file in (site / "mmprefill").rglob("*") if file.is_file()}
    mapped = {f"{FOLDERS[name.split('/')[0]].replace('.', '/')}/{name.split('/', 1)[1]}" for name in tracked()}
    assert installed == mapped


def test_a_wheel_imports_from_anywhere(site, tmp_path):
    """From another folder, and from the root of a checkout, where the folder `mmprefill` comes first."""
    assert imported_from(SHOW, tmp_path, site) == site / "mmprefill/pipeline/__init__.py"
    assert imported_from(SHOW, ROOT, site) == ROOT / "pipeline/__init__.py"


def test_an_editable_install_imports(checkout, tmp_path):
    where = build(checkout, "editable", tmp_path)
    code = f"import site; site.addsitedir({str(where)!r}); {SHOW}"
    assert imported_from(code, tmp_path) == checkout / "pipeline/__init__.py"


def test_pictures_are_decoded_in_one_place():
    """One decoder, Pillow on the CPU, so that every entry gives the same pixels within the same limits (A23)."""
    decoders = re.compile(r"FORMATS\[|Image\.open\(|decode_(image|jpeg|png)|read_image|torchvision\.io|nvjpeg", re.I)
    files = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py") if not path.name.startswith("bench")]
    assert {path.name for path in files if decoders.search(path.read_text(encoding="utf-8"))} == {"formats.py"}
