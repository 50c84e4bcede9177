"""The page of the Python API, from the public docstrings. Reads the source and imports nothing, so it takes no time."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "poochplan"
MARKER = "<!-- api -->"
RETURNED = {
    "Fit": ".fitting.fit",
    "Rung": ".fitting.probes",
    "Report": ".runtime.run_report",
    "StepReport": ".runtime.run_report",
    "ArenaReport": ".runtime.run_report",
    "PassArena": ".runtime.arena.pass_arena",
    "PassReport": ".runtime.arena.pass_arena",
}
"""What public functions return, without a public name of its own."""
Documented = ast.FunctionDef | ast.ClassDef


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the API in place of the marker."""
    return markdown.replace(MARKER, api_page())


def api_page() -> str:
    """Markdown: a section for each name of ``poochplan.__all__``, functions first, and for what they return."""
    names = [(f"poochplan.{name}", _find(module, name)) for name, module in public_names().items()]
    names.sort(key=lambda item: (isinstance(item[1], ast.ClassDef), item[0]))
    names += [(f"poochplan{module}.{name}", _find(module, name)) for name, module in RETURNED.items()]
    return "\n\n".join(_section(name, node) for name, node in names)


def public_names() -> dict[str, str]:
    """Each public name and the module it is defined in, relative to the package."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    homes: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "__all__":
                homes |= dict.fromkeys(ast.literal_eval(node.value), ".errors")
            elif node.targets[0].id == "_HOMES":
                homes |= ast.literal_eval(node.value)
    return homes


def _find(module: str, name: str) -> Documented:
    path = Path(*module.lstrip(".").split(".")).with_suffix(".py")
    # The three rooms lie at the top; the links to them are missing in a checkout without symbolic links.
    source = ROOT / path if (ROOT / path).is_file() else PACKAGE / path
    tree = ast.parse(source.read_text())
    for node in tree.body:
        if isinstance(node, Documented) and node.name == name:
            if isinstance(node, ast.ClassDef):
                node.body += [item for base in node.bases for item in _inherited(ast.unparse(base), module, tree)]
            return node
    raise LookupError(f"{source}: expected a function or class {name}, found none; correct _HOMES")


def _inherited(base: str, module: str, tree: ast.Module) -> list[ast.stmt]:
    """What a class has from a base in a neighbouring module, without the base's docstring."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and base in (alias.name for alias in node.names):
            found = _find(f"{module.rpartition('.')[0]}.{node.module}", base)
            return found.body[1:] if ast.get_docstring(found) else found.body
    return []


def _section(name: str, node: Documented, level: int = 2) -> str:
    parts = [f"{'#' * level} `{name}`"]
    if isinstance(node, ast.FunctionDef):
        parts.append(f"```python\n{_signature(name, node)}\n```")
    parts.append(_markdown(ast.get_docstring(node) or ""))
    if isinstance(node, ast.ClassDef):
        fields = list(_fields(node))
        if fields:
            rows = [f"| `{field}` | `{kind}` | {text} |" for field, kind, text in fields]
            parts.append("\n".join(["| field | type | meaning |", "|---|---|---|", *rows]))
        short = name.rpartition(".")[2]
        parts += [_section(f"{short}.{method.name}", method, level + 1) for method in _methods(node)]
    return "\n\n".join(part for part in parts if part)


def _signature(name: str, node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ")
    arguments = "" if arguments in ("self", "cls") else re.sub(r"(?<! )=(?! )", " = ", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    is_property = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
    if is_property:
        return f"{name}{returns.replace(' ->', ':')}"
    one_line = f"{name}({arguments}){returns}"
    if len(one_line) <= 100:
        return one_line
    split = re.sub(r", (?=\*|\w+(?::| =))", ",\n    ", arguments)  # before each argument, not inside brackets
    return f"{name}(\n    {split},\n){returns}"


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, type and docstring of each annotated field."""
    for field, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = " ".join(_inline(str(following.value.value)).split()).replace("|", "\\|")
            yield field.target.id, ast.unparse(field.annotation).replace("|", "\\|"), text


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")]


def _markdown(docstring: str) -> str:
    """The docstring with its sections (``Parameters``, ``Raises``) as lists."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        if re.fullmatch(r"-{3,}", line):
            section = lines.pop()
            lines += [f"**{section}**", ""]
        elif section and line and not line.startswith(" "):
            name, colon, text = line.partition(": ")
            shown = ", ".join(f"`{one}`" for one in name.split(", "))
            lines.append(f"* {shown}{': ' + text if colon else ':'}")
            if section == "Parameters" and not colon:  # prose after the list
                lines[-1:] = ["", line]
                section = ""
        else:
            lines.append(line.strip() if section else line)
    return _inline("\n".join(lines))


def _inline(text: str) -> str:
    """Roles and double backticks as code."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1]}`", text)
    return text.replace("``", "`")
