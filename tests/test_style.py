"""House rules that a linter does not know: who imports whom, lengths, docstrings, and anchors of errors."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "maestro_jax"
CHECKED_FOLDERS = ("maestro_jax", "tests", "benchmarks", "examples")
LINES_IN_FILE = 500
LINES_IN_FUNCTION = 80
LINES_IN_ENTRY_POINT = 150

Function = ast.FunctionDef | ast.AsyncFunctionDef

ALLOWED_OUTSIDE = {
    "schedules": {"numpy"},
    "meshes": {"numpy", "jax"},
    "models": {"numpy", "jax", "flax", "safetensors"},
    "drawing": {"rich"},
}
ALLOWED_INSIDE = {
    "schedules": {"schedules", "errors"},
    "meshes": {"meshes", "errors"},
    "models": {"models", "errors", "config"},
    "drawing": {"drawing", "errors", "graph", "schedules"},
}
ALLOWED_WHERE_DRAWN = {"schedules": {"drawing"}}
"""Imported where something draws itself (in `_repr_html_`), and nowhere else."""
RUNTIME = {"runtime", "run", "trainer", "checkpoint", "train", "plan", "plan_table", "plan_html", "history", "simulate"}


@dataclass(frozen=True, kw_only=True)
class Imported:
    """One imported module: where, whether relative and to draw, and its first name (inside the package for relative imports)."""

    place: str
    relative: bool
    drawn: bool
    name: str


def sources(*folders: str) -> list[Path]:
    found = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert found, f"no Python files in {folders}"
    return found


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def imports(path: Path) -> Iterator[Imported]:
    """Yields every import of a file, also those inside functions and under TYPE_CHECKING."""
    folder = path.relative_to(PACKAGE).parent.parts
    module = parsed(path)
    drawings = [node for node in ast.walk(module) if isinstance(node, Function) and node.name == "_repr_html_"]
    drawn = {node for drawing in drawings for node in ast.walk(drawing)}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Imported(place=place(path, node), relative=False, drawn=node in drawn, name=alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield Imported(place=place(path, node), relative=False, drawn=node in drawn, name=(node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] + tuple((node.module or "").split(".") if node.module else ())
            names = [base[0]] if base else [alias.name for alias in node.names]
            for name in names:
                yield Imported(place=place(path, node), relative=True, drawn=node in drawn, name=name)


def foreign_imports(part: str) -> list[str]:
    """Returns the imports of one part of the package that are neither standard library nor on its lists."""
    outside = ALLOWED_OUTSIDE[part] | set(sys.stdlib_module_names)
    inside = {False: ALLOWED_INSIDE[part], True: ALLOWED_INSIDE[part] | ALLOWED_WHERE_DRAWN.get(part, set())}
    return [
        f"{found.place} imports {found.name}"
        for path in sources(f"maestro_jax/{part}")
        for found in imports(path)
        if found.name not in (inside[found.drawn] if found.relative else outside)
    ]


def entry_points() -> list[Path]:
    """Returns the modules at the top of the package that run as commands."""
    conditions = {path: [node.test for node in parsed(path).body if isinstance(node, ast.If)] for path in sorted(PACKAGE.glob("*.py"))}
    return [path for path, tests in conditions.items() if any("__name__" in ast.unparse(test) for test in tests)]


def public_definitions(path: Path) -> Iterator[ast.ClassDef | Function | ast.Module]:
    """Yields the module, its public classes and functions, and the public methods of its public classes."""
    module = parsed(path)
    pending: list[ast.AST] = [module]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield node
        if isinstance(node, ast.Module | ast.ClassDef):
            inner = [child for child in node.body if isinstance(child, ast.ClassDef | Function)]
            pending += [child for child in inner if not child.name.startswith("_") and not is_repeated(child)]


def is_repeated(node: ast.ClassDef | Function) -> bool:
    """Says whether a definition only adds to one that has the docstring: an overload, an override or a property's setter."""
    marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
    return bool(marks & {"overload", "override", "setter", "deleter"})


def anchor_positions(paths: list[Path]) -> dict[str, int]:
    """Returns, for each function of the package with a parameter `anchor`, its position in a call (`self` not counted)."""
    positions = {}
    for node in [node for path in paths for node in ast.walk(parsed(path)) if isinstance(node, Function)]:
        names = [name.arg for name in [*node.args.posonlyargs, *node.args.args] if name.arg not in ("self", "cls")]
        if "anchor" in names:
            positions[node.name] = names.index("anchor")
    return positions


def anchors(path: Path, positions: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields (place, anchor) for every string given as an argument `anchor`, by name or position, and for its defaults."""
    values: list[ast.expr] = []
    for node in ast.walk(parsed(path)):
        # What an exception hands to its own base is a text.
        if isinstance(node, ast.Call) and not ast.unparse(node.func).startswith("super()"):
            position = positions.get(ast.unparse(node.func).split(".")[-1], len(node.args))
            values += [keyword.value for keyword in node.keywords if keyword.arg == "anchor"] + node.args[position : position + 1]
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            defaults = [*zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)]
            defaults += [(name, value) for name, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value is not None]
            values += [value for name, value in defaults if name.arg == "anchor"]
    for value in values:
        for part in ast.walk(value):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield place(path, part), part.value


def headings(page: Path) -> set[str]:
    """Returns the anchors of a Markdown page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*?) *$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_schedules_import_numpy_and_errors_only() -> None:
    assert foreign_imports("schedules") == []


def test_meshes_import_jax_only() -> None:
    assert foreign_imports("meshes") == []


def test_models_import_jax_flax_and_safetensors_only() -> None:
    assert foreign_imports("models") == []


def test_drawing_imports_rich_graphs_and_schedules_only() -> None:
    assert foreign_imports("drawing") == []


def test_graph_and_data_import_none_of_the_runtime() -> None:
    found = [each for path in sources("maestro_jax/graph", "maestro_jax/data") for each in imports(path)]
    assert [f"{each.place} imports {each.name}" for each in found if each.relative and each.name in RUNTIME] == []


def test_imports_inside_the_package_are_relative() -> None:
    found = [each for path in sources("maestro_jax") for each in imports(path)]
    assert [each.place for each in found if not each.relative and each.name == "maestro_jax"] == []


def test_schedules_load_no_jax_in_a_fresh_process() -> None:
    program = (
        "import importlib, pkgutil, sys, maestro_jax.schedules as schedules\n"
        "for module in pkgutil.walk_packages(schedules.__path__, schedules.__name__ + '.'): importlib.import_module(module.name)\n"
        "schedules.Schedule(tasks=(schedules.Task(section='a', replica=0, kind='update', step=0),))._repr_html_()\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in {'jax', 'jaxlib', 'flax'}))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_entry_points_are_thin() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in entry_points()}
    assert "train.py" in lengths
    assert {name: length for name, length in lengths.items() if length > LINES_IN_ENTRY_POINT} == {}


def test_nothing_imports_an_entry_point() -> None:
    names = {path.stem for path in entry_points()}
    assert names, "no entry points"
    found = [each for path in sources("maestro_jax") for each in imports(path)]
    assert [f"{each.place} imports {each.name}" for each in found if each.relative and each.name in names] == []


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*CHECKED_FOLDERS)}
    assert {name: length for name, length in lengths.items() if length > LINES_IN_FILE} == {}


def test_functions_are_short() -> None:
    functions = [(path, node) for path in sources(*CHECKED_FOLDERS) for node in ast.walk(parsed(path)) if isinstance(node, Function)]
    lengths = {f"{place(path, node)} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for path, node in functions}
    assert {name: length for name, length in lengths.items() if length > LINES_IN_FUNCTION} == {}


def test_public_names_have_docstrings() -> None:
    found = [(path, node) for path in sources("maestro_jax") for node in public_definitions(path)]
    bare = [f"{place(path, node)} {getattr(node, 'name', 'module')}" for path, node in found if not ast.get_docstring(node)]
    assert bare == []


def test_package_has_no_assert() -> None:
    nodes = [(path, node) for path in sources("maestro_jax") for node in ast.walk(parsed(path))]
    assert [place(path, node) for path, node in nodes if isinstance(node, ast.Assert)] == []


def test_anchors_of_errors_are_headings_of_the_error_page() -> None:
    known = headings(ROOT / "docs" / "errors.md")
    paths = sources("maestro_jax")
    positions = anchor_positions(paths)
    used = [each for path in paths for each in anchors(path, positions)]
    assert used, "no anchors in the package"
    assert [f"{where} {anchor}" for where, anchor in used if anchor not in known] == []


def test_root_links_lead_into_the_package() -> None:
    assert {name: (ROOT / name).resolve() for name in ("meshes", "models", "schedules")} == {
        name: PACKAGE / name for name in ("meshes", "models", "schedules")
    }
