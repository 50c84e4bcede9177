"""Workload: a model and its step for the command line, and loading one by name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.resources
import importlib.util
import inspect
import re
import sys
import tomllib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from .errors import PoochError, UsageError, did_you_mean, is_out_of_memory, named_line
from .formats.files import one_line
from .integrations import READERS
from .units import format_bytes

if TYPE_CHECKING:
    import torch

_FORMS = "a TOML file, package.module:function, path/to/file.py:function or hf:NAME"
_SETTABLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ASKED = re.compile(r"allocate (\d+) bytes|allocate ([\d.]+ [KMGT]iB)", re.IGNORECASE)


@dataclass(frozen=True)
class Workload:
    """A model and the step that trains it.

    ``step()`` runs forward and returns the scalar loss; it calls neither backward nor the optimizer.
    """

    model: torch.nn.Module
    step: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None


class WorkloadFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload TOML: the Python function ``workload``, and its keyword ``parameters``."""

    workload: str
    """``package.module:function``, or ``path/to/file.py:function`` relative to the TOML's folder."""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    """Values of the function's keyword parameters, checked against its signature and annotations."""


@dataclass(frozen=True)
class LoadedWorkload:
    """A workload and its origin."""

    name: str
    """Short name for tables: the TOML's name without its ending, or the function's name."""
    workload: Workload
    parameters: Mapping[str, Any]
    """The given keyword parameters (by the TOML or by overrides), after conversion, without defaults."""


def load_workload(
    target: str | Callable[..., Workload], overrides: Mapping[str, Any] | None = None, device: str | None = None
) -> LoadedWorkload:
    """Builds the workload ``target``: a TOML file, ``package.module:function``, ``path/to/file.py:function``, an ONNX
    file, the name of a shipped config (:func:`shipped_configs`), ``hf:NAME`` (a model of transformers by the name of
    its configuration), or the function itself.

    ``overrides`` are ``--set key=value`` pairs. Text is read as a TOML value if it is one. They take precedence over
    the TOML's ``[parameters]``. The folder of a ``file.py``, or the current folder for a module, is put on
    ``sys.path``, like ``python file.py`` and ``python -m module`` do. ``device`` is passed to the function's parameter
    of that name, unless ``overrides`` have one; the function puts the model and its data there.

    Raises
    ------
    UsageError
        The file, module or function does not exist or cannot be imported, the TOML is invalid, a parameter is unknown,
        missing or of the wrong type, or the function returns no :class:`Workload`, or one that is not on ``device``.
    PoochError
        The user's own code raised; the original exception is its ``__cause__``.
    """
    function, parameters, short_name, found_at = _resolved(target)
    if device is not None and "device" not in (overrides or {}) and "device" in (_parameters(function) or {}):
        parameters["device"] = device
    arguments = _arguments(function, parameters, overrides or {}, what=found_at)
    try:
        workload = function(**arguments)
    except PoochError:
        raise
    except (Exception, SystemExit) as error:  # a script's sys.exit() must not end the command without a message
        if is_out_of_memory(error):
            raise PoochError(
                f"{found_at}: cannot build its model and data, expected {asked_text(error)}, found less; make them "
                "smaller by --set, or plan without the memory: pooch profile --mode fake"
            ) from error
        raise PoochError(f"{found_at} raised {named_line(error)}; pass -v to see where") from error
    checked = _checked(workload, found_at)
    if device is not None:
        _check_device(checked.model, device, found_at)
    return LoadedWorkload(short_name, checked, arguments)


def asked_text(error: BaseException) -> str:
    """``"memory for 64.0 GiB"`` if the error gives the requested bytes, else ``"its memory"``."""
    match = _ASKED.search(str(error))
    if match is None:
        return "its memory"
    return f"memory for {match[2] or format_bytes(int(match[1]))}"


def parameter_values(target: str | Callable[..., Workload]) -> tuple[str, dict[str, Any]]:
    """The short name of the workload, and its parameters by name, without building it.

    Each has its default value: the TOML's, else the function's, else None. Raises the errors of :func:`load_workload`
    that come before building.
    """
    function, parameters, name, _ = _resolved(target)
    defaults = {
        key: None if parameter.default is parameter.empty else parameter.default
        for key, parameter in (_parameters(function) or {}).items()
        if parameter.kind in _SETTABLE
    }
    return name, defaults | parameters


def _resolved(target: str | Callable[..., Workload]) -> tuple[Callable[..., object], dict[str, Any], str, str]:
    """The function, the TOML's parameters for it, the workload's short name, and the function's name for messages."""
    if not isinstance(target, str):
        name = getattr(target, "__name__", type(target).__name__)
        return target, {}, name, name
    if reader := READERS.get(Path(target).suffix):
        read = importlib.import_module(reader).training_function
        made = read(Path(target), Workload, lambda loss: _find_function(loss, Path(), asked=loss)[0])
        return made, {}, Path(target).stem, target
    if target.startswith("hf:"):
        function: Any = _load_module(f"{__package__}.workloads.hugging_face", "").function_of(target)
        return function, {}, target.removeprefix("hf:"), target
    python_target, parameters, name = target, {}, ""
    folder = Path()
    path = shipped_configs().get(target) or (Path(target) if target.endswith(".toml") else None)
    if path is not None:
        file = read_workload_file(path)
        python_target, parameters, name, folder = file.workload, dict(file.parameters), path.stem, path.parent
    function, found_at = _find_function(python_target, folder, asked=target)
    return function, parameters, name or python_target.rpartition(":")[2], found_at


def shipped_configs() -> dict[str, Path]:
    """The workload TOMLs of this package, by their names for ``pooch profile NAME``."""
    folder = Path(str(importlib.resources.files(f"{__package__}.configs")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_workload_file(path: Path) -> WorkloadFile:
    """The content of a workload TOML.

    Raises ``UsageError`` if the file does not exist or cannot be read, is not TOML (the message names the line), has an
    unknown key, or lacks ``workload``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        neighbours = [str(other) for other in sorted(path.parent.glob("*.toml"))] if path.parent.is_dir() else []
        ships = f"; without a folder, {path.stem} is one that ships" if path.stem in shipped_configs() else ""
        raise UsageError(f"{path}: no such workload file{did_you_mean(str(path), neighbours) or ships}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a workload TOML ({named_line(error)})") from None
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and brackets in brackets
        raise UsageError(f"{path}: not valid TOML: {one_line(error)}; correct that line") from None
    unknown = [key for key in raw if key not in WorkloadFile.__struct_fields__]
    if unknown:
        known = " and ".join(WorkloadFile.__struct_fields__)
        hint = did_you_mean(unknown[0], WorkloadFile.__struct_fields__) or "; parameters belong under [parameters]"
        raise UsageError(f"{path}: unknown key {unknown[0]!r}, expected {known}{hint}")
    try:
        return msgspec.convert(raw, type=WorkloadFile)
    except msgspec.ValidationError as error:
        example = 'workload = "package.module:function"'
        raise UsageError(
            f"{path}: not a valid workload: {error}; expected {example} and a [parameters] table"
        ) from None


def parse_override(text: Any) -> Any:
    """The value of ``--set key=TEXT``: a TOML boolean, number, quoted string or array; else what is given itself."""
    if not isinstance(text, str):
        return text
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = table.pop("value")
    # dates are text, and so is a text whose line break would set another key
    return value if not table and isinstance(value, (bool, int, float, str, list)) else text


def _find_function(python_target: str, folder: Path, asked: str) -> tuple[Callable[..., object], str]:
    """The function and its name for messages; a relative ``file.py`` is in ``folder``."""
    where = "" if asked == python_target else f"{asked}: "
    place, colon, function_name = python_target.rpartition(":")
    if not colon or not place or not function_name:
        raise UsageError(f"{where}{_bad_target(python_target)}")
    if place.endswith(".py") or "/" in place or "\\" in place:
        module = _load_file(folder / Path(place).expanduser(), where)
    else:
        module = _load_module(place, where)
    function: object = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UsageError(f"{where}{_bad_function(module, place, function_name, function)}")
    return function, f"{where}{python_target}"


def _bad_target(target: str) -> str:
    path = Path(target.rstrip(":"))
    if not target.strip(":"):
        remedy = "name one"
    elif path.suffix == ".py":
        remedy = f"name its function: {path}:function" if path.is_file() else "there is no such file"
    elif path.is_file() or path.is_dir():
        remedy = "that file is no TOML" if path.is_file() else "that is a folder"
    elif target.isidentifier():
        ships = shipped_configs()
        remedy = f"the names that ship are {', '.join(ships)}{did_you_mean(target, ships)}"
    else:
        remedy = "it names no function"
    return f"workload: expected {_FORMS}, found {target!r}; {remedy}"


def _bad_function(module: ModuleType, place: str, name: str, found: object) -> str:
    if found is not None:
        return f"{place}: {name!r} is of type {type(found).__name__}, expected a function that returns a Workload"
    functions = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    listed = f"; functions there: {', '.join(functions)}" if functions else "; it defines no functions"
    return f"{place}: no function {name!r}{did_you_mean(name, functions)}{listed}"


class _AlwaysFromSource(importlib.machinery.SourceFileLoader):
    """Never uses cached bytecode, which seems valid after an edit within a second that keeps the size."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _load_file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        neighbours = [str(other) for other in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        raise UsageError(f"{where}{path}: no such python file{did_you_mean(str(path), neighbours)}")
    name = f"_poochplan_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_AlwaysFromSource(name, str(path)))
    if path.suffix != ".py" or spec is None or spec.loader is None:
        raise UsageError(f"{where}{path}: expected a python file whose name ends in .py")
    _put_on_path(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise _import_failure(f"{where}{path}", error) from error
    return module


def _load_module(name: str, where: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{where}workload: expected {_FORMS}, found the module name {name!r}")
    if name.partition(".")[0] != __package__:
        _put_on_path(Path())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsageError(f"{where}{_missing_module(name, error.name)}") from None
        raise _import_failure(f"{where}{name}", error) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(f"{where}{name}", error) from error


def _missing_module(name: str, missing: str) -> str:
    message = f"no module named {missing!r}"
    if missing != name:
        message += f" (of {name})"
    file = Path(*name.split(".")).with_suffix(".py")
    package, _, last = missing.rpartition(".")
    neighbours: list[str] = []
    if package in sys.modules and getattr(sys.modules[package], "__path__", None):
        folders = [Path(folder) for folder in sys.modules[package].__path__]
        neighbours = sorted({other.stem for folder in folders for other in folder.glob("[!_]*.py")})
    close = difflib.get_close_matches(last, neighbours, n=1)
    if close:
        return f"{message}; did you mean {package}.{close[0]}?"
    if file.is_file():
        return f"{message}; to load it as a file write {file}:function"
    return f"{message}; install it, start from the folder it is in, or name a file: path/to/file.py:function"


def _import_failure(place: str, error: Exception | SystemExit) -> PoochError:
    if isinstance(error, ImportError):
        remedy = "install that module" if isinstance(error, ModuleNotFoundError) else "pass -v to see where"
        return UsageError(f"{place} exists, but an import inside it failed: {named_line(error)}; {remedy}")
    if isinstance(error, SyntaxError):
        return UsageError(f"{place}: line {error.lineno} is not valid python: {error.msg}")
    if isinstance(error, PoochError):
        return error
    return PoochError(f"{place} raised {named_line(error)} while it was imported; pass -v to see where")


def _put_on_path(folder: Path) -> None:
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.insert(0, entry)


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """By name; None for some builtins, which have no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _arguments(
    function: Callable[..., object], given: Mapping[str, Any], overrides: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Keyword arguments for ``function``: ``given``, replaced by ``overrides``, each converted to its annotation."""
    every = _parameters(function)
    if every is None:  # the call will raise
        return {**given, **{key: parse_override(value) for key, value in overrides.items()}}
    known = {key: parameter for key, parameter in every.items() if parameter.kind in _SETTABLE}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in every.values())
    for key in (*given, *overrides):
        if key not in known and not takes_any:
            listed = f"; it takes {', '.join(known)}" if known else "; it takes none"
            raise UsageError(f"{what}: unknown parameter {key!r}{did_you_mean(key, known)}{listed}")
    hints = _annotations(function)
    values = {key: _converted(value, None, hints.get(key), key, what) for key, value in given.items()}
    for key, value in overrides.items():
        text = value if isinstance(value, str) else None
        values[key] = _converted(parse_override(value), text, hints.get(key), key, what)
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in values:
            raise UsageError(
                f"{what}: missing parameter {key!r}, which has no default; "
                f"give it under [parameters] or by --set {key}=VALUE"
            )
    return values


def _check_device(model: torch.nn.Module, device: str, what: str) -> None:
    found = next((parameter.device.type for parameter in model.parameters()), device)
    if found != device.partition(":")[0]:
        raise UsageError(
            f"{what}: expected its model on {device}, found it on {found}; give the function a parameter `device` "
            "that says where it puts model and data"
        )


def _annotations(function: Callable[..., object]) -> dict[str, Any]:
    target = function.__init__ if inspect.isclass(function) else getattr(function, "func", function)  # of a partial
    try:
        return typing.get_type_hints(target)
    except Exception:  # names that only a type checker sees: then the function itself checks its arguments
        return {}


def _converted(value: Any, text: str | None, annotation: Any, key: str, what: str) -> Any:
    """``value`` converted to its annotation; ``text`` is an override as written, for parameters that are text."""
    if annotation is None or annotation is Any:
        return value
    try:
        return msgspec.convert(value, type=annotation)
    except msgspec.ValidationError as error:
        if text is not None:
            with contextlib.suppress(msgspec.ValidationError):
                return msgspec.convert(text, type=annotation)
        wanted = inspect.formatannotation(annotation).replace("collections.abc.", "")
        detail = f" ({error})" if " at " in str(error) or "one of" in str(error) else ""
        raise UsageError(
            f"{what}: parameter {key!r}: expected {wanted}, found {value!r} "
            f"of type {type(value).__name__}{detail}; correct the value"
        ) from None
    except TypeError:  # msgspec does not know some annotations, such as torch.dtype
        return value


def _checked(workload: object, what: str) -> Workload:
    remedy = "return poochplan.Workload(model=..., step=..., optimizer=None)"
    if not isinstance(workload, Workload):
        raise UsageError(f"{what}: expected a poochplan.Workload, found {_type_name(workload)}; {remedy}")
    import torch  # here, because a function that returned a Workload has loaded it already

    wanted: tuple[tuple[str, Any, str], ...] = (
        ("model", torch.nn.Module, "a torch.nn.Module"),
        ("step", Callable, "a function that runs forward and returns the scalar loss"),
        ("optimizer", torch.optim.Optimizer | None, "a torch.optim.Optimizer or None"),
    )
    for name, kind, expected in wanted:
        found = getattr(workload, name)
        if not isinstance(found, kind):
            raise UsageError(f"{what}: Workload.{name}: expected {expected}, found {_type_name(found)}")
    return workload


def _type_name(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value)
    return kind.__name__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
