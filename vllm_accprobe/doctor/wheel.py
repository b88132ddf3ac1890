"""What capture relies on, compared with the sources of a wheel and of the vLLM that it is for.

The problem: a vendor's runner may be vLLM's, derive from it, or be a copy that has gone its own way; half of what
capture reads are attributes that some method sets; and a wheel comes from anywhere. The idea: only regular ``*.py``
files and the metadata are read where they lie, up to limits that are counted while bytes come out; nothing is unpacked,
imported or run. Names are followed through imports and bases, from the vendor's package into vLLM's. Each place of the
declaration is searched for as vLLM's class, runners and workers also among the vendor's classes, by their methods. A
mode is found by a line of source. A base that is in no package is reported, not guessed. What is missing comes first,
each with what follows from it.

Not here: the declaration and the modes (capture/vllm/names_by_release.py).
"""

from __future__ import annotations

import ast
import gzip
import lzma
import re
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from vllm_accprobe.capture.vllm.names_by_release import MODES, PLACES, V1, V2, WORKER, Mode, Need, Release, VllmPlace
from vllm_accprobe.doctor.checks import ERROR, OK, WARNING, Finding, release
from vllm_accprobe.doctor.inside import release_of

MOST_FILES = 60_000
"""chosen: vLLM 0.33's wheel has about 6,000 entries."""
MOST_OF_ONE = 8 << 20
"""chosen: bytes of one file; the largest of vLLM 0.33 has 0.4 MB."""
MOST_OF_ALL = 512 << 20
"""chosen: bytes of all Python files; those of vLLM 0.33 have 40 MB."""
_MOST_STREAMED = 4 << 30
"""chosen: bytes that a compressed tar may unfold to while it is passed by."""
_BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError)


class WheelError(Exception):
    """One line: what cannot be read, where, what to do."""


@dataclass(frozen=True)
class Package:
    """path: of the file. name, version: as its metadata says, "" where it does not. files: a file's path inside (the
    package's directory first, such as ``vllm/envs.py``) → its bytes."""

    path: Path
    name: str
    version: str
    files: dict[str, bytes] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip() or self.path.name


def read(path: Path) -> Package:
    """The package in the wheel or ``.tar.gz`` at ``path``. Raises WheelError."""
    try:
        if path.name.endswith((".whl", ".zip")):
            files, metadata = _taken(path, _zipped(path))
        elif path.name.endswith((".tar.gz", ".tgz")):
            files, metadata = _taken(path, _tarred(path))
            files = {re.sub(r"\A[^/]*/(?:src/)?", "", name): data for name, data in files.items() if "/" in name}
        else:
            raise WheelError(f"{path}: neither a wheel (.whl) nor a source distribution (.tar.gz)")
    except OSError as error:
        raise WheelError(f"{path}: {error.strerror or error}") from None
    except _BROKEN as error:
        text = " ".join(str(error).split())[:200]
        raise WheelError(f"{path}: not a readable archive ({text}); download it again") from None
    if not files:
        raise WheelError(f"{path}: no Python file is in it")
    return Package(path, _header(metadata, "Name"), _header(metadata, "Version"), files)


_Entry = tuple[str, bool, "IO[bytes] | None"]
"""A file's path inside, whether it is a link or a device, and its content where it is a file."""


def _taken(path: Path, entries: Iterator[_Entry]) -> tuple[dict[str, bytes], bytes]:
    files: dict[str, bytes] = {}
    metadata, total, n = b"", 0, 0
    for name, strange, content in entries:
        n += 1
        if n > MOST_FILES:
            raise WheelError(f"{path}: more than {MOST_FILES} files: refused")
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
            raise WheelError(f"{path}: {name[:100]!r} leads out of the archive: refused")
        about = parts[-1] in ("METADATA", "PKG-INFO") and len(parts) == 2
        if not (name.endswith(".py") or about):
            continue
        if strange or content is None:
            raise WheelError(f"{path}: {name[:100]!r} is a link or a device: refused")
        data = content.read(MOST_OF_ONE + 1)
        total += len(data)
        if len(data) > MOST_OF_ONE or total > MOST_OF_ALL:
            raise WheelError(f"{path}: {name[:100]!r} is larger than any source file: refused")
        if about:
            metadata = metadata or data
        elif name in files:
            raise WheelError(f"{path}: {name[:100]!r} is in it twice: refused")
        else:
            files[name] = data
    return files, metadata


def _zipped(path: Path) -> Iterator[_Entry]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            strange = info.external_attr >> 28 not in (0, 8)  # the upper half is a Unix mode, 8 a regular file
            wanted = info.filename.endswith((".py", "METADATA"))
            if wanted and not strange:
                with archive.open(info) as content:
                    yield info.filename, False, content
            else:
                yield info.filename, strange, None


def _tarred(path: Path) -> Iterator[_Entry]:
    with gzip.open(path) as unfolded, tarfile.open(fileobj=cast(Any, _Limited(path, unfolded)), mode="r|") as archive:
        for info in archive:
            if not info.isdir():
                yield info.name, not info.isreg(), archive.extractfile(info) if info.isreg() else None


class _Limited:
    """A stream that ends in a refusal when it has given too much."""

    def __init__(self, path: Path, stream: gzip.GzipFile):
        self._path, self._stream, self._left = path, stream, _MOST_STREAMED

    def read(self, n: int = -1) -> bytes:
        data = self._stream.read(n)
        self._left -= len(data)
        if self._left < 0:
            raise WheelError(f"{self._path}: it unfolds to more than {_MOST_STREAMED >> 30} GB: refused")
        return data


def _header(metadata: bytes, name: str) -> str:
    found = re.search(rf"^{name}: *([A-Za-z0-9._+!-]{{1,80}})\s*$", metadata.decode("utf-8", "replace"), re.MULTILINE)
    return found[1] if found else ""


Function = ast.FunctionDef | ast.AsyncFunctionDef
_DEEP = 40
"""chosen: imports that a name is followed through."""


@dataclass
class SourceModule:
    """name: dotted. file: its path in the package. bound: what is defined at its top, also under if and try; imports:
    local name → (module, name there or "" for the module itself); stars: modules whose names it has all."""

    name: str
    file: str
    package: Package
    tree: ast.Module = field(repr=False)
    bound: dict[str, ast.AST] = field(default_factory=dict, repr=False)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict, repr=False)
    stars: list[str] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Definition:
    """A definition: its node and the module that it stands in."""

    node: ast.AST
    module: SourceModule

    @property
    def at(self) -> str:
        """``file.py:line``."""
        return f"{self.module.file}:{getattr(self.node, 'lineno', 1)}"


class Sources:
    """The modules of ``packages``; where two have the same module, the first counts."""

    def __init__(self, packages: Sequence[Package]):
        self.packages = packages
        self._modules: dict[str, SourceModule | None] = {}

    def module(self, name: str) -> SourceModule | None:
        """The module of that dotted name, or None. Raises WheelError where it is no Python."""
        if name not in self._modules:
            self._modules[name] = None
            base = name.replace(".", "/")
            for package in self.packages:
                for file in (f"{base}.py", f"{base}/__init__.py"):
                    if file in package.files:
                        self._modules[name] = _parsed(name, file, package)
                        return self._modules[name]
        return self._modules[name]

    def modules(self, package: Package, word: str) -> Iterator[SourceModule]:
        """The modules of ``package`` in whose text ``word`` stands."""
        needle = word.encode()
        for file, data in sorted(package.files.items()):
            if needle in data:
                found = self.module(_dotted(file))
                if found is not None and found.package is package:
                    yield found

    def find(self, module: str, name: str, deep: int = _DEEP) -> Definition | None:
        """What ``name`` is in ``module``: followed through imports; a SourceModule's own node for a module."""
        where = self.module(module)
        if where is None or deep < 0:
            return None
        if name in where.bound:
            return Definition(where.bound[name], where)
        if name in where.imports:
            source, there = where.imports[name]
            if there:
                found = self.find(source, there, deep - 1)
                if found is not None:
                    return found
                whole = self.module(f"{source}.{there}")
            else:
                whole = self.module(source)
            return None if whole is None else Definition(whole.tree, whole)
        for star in where.stars:
            found = self.find(star, name, deep - 1)
            if found is not None:
                return found
        return None

    def has(self, module: SourceModule, name: str) -> bool:
        """Whether ``module`` has the name at all, also as an import of a package that is not here."""
        return name in module.bound or name in module.imports or self.find(module.name, name) is not None

    def resolve(self, expression: ast.AST, module: SourceModule) -> Definition | None:
        """What a name, or a dotted one, is in ``module``."""
        if isinstance(expression, ast.Subscript):  # Generic[T]
            return self.resolve(expression.value, module)
        if isinstance(expression, ast.Name):
            return self.find(module.name, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.resolve(expression.value, module)
            if owner is not None and isinstance(owner.node, ast.Module):
                return self.find(owner.module.name, expression.attr)
            dotted = _spelt(expression.value)
            return self.find(dotted, expression.attr) if dotted else None
        return None

    def origin(self, expression: ast.AST, module: SourceModule) -> str:
        """The top package that a name comes from, as its import says; "" for one of the module's own."""
        while isinstance(expression, (ast.Attribute, ast.Subscript)):
            expression = expression.value
        if isinstance(expression, ast.Name) and expression.id in module.imports:
            return module.imports[expression.id][0].partition(".")[0]
        return ""


def _dotted(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _spelt(expression: ast.AST) -> str:
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        return f"{_spelt(expression.value)}.{expression.attr}"
    return ""


def _parsed(name: str, file: str, package: Package) -> SourceModule:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(package.files[file])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise WheelError(f"{package.path}: {file}{line} cannot be parsed ({type(error).__name__})") from None
    module = SourceModule(name, file, package, tree)
    try:
        _bind(module, tree.body)
    except RecursionError:
        raise WheelError(f"{package.path}: {file} cannot be parsed (too deep)") from None
    return module


def _bind(module: SourceModule, body: Sequence[ast.stmt]) -> None:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            module.bound[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        module.bound.setdefault(part.id, node)
        elif isinstance(node, ast.Import):
            for one in node.names:
                module.imports.setdefault(one.asname or one.name.partition(".")[0],
                                          (one.name if one.asname else one.name.partition(".")[0], ""))  # fmt: skip
        elif isinstance(node, ast.ImportFrom):
            _import_from(module, node)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for inner in ("body", "orelse", "finalbody"):
                _bind(module, getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                _bind(module, handler.body)


def _import_from(module: SourceModule, node: ast.ImportFrom) -> None:
    source = node.module or ""
    if node.level:
        parts = module.name.split(".")
        drop = node.level - (1 if module.file.endswith("__init__.py") else 0)
        source = ".".join([*parts[: len(parts) - drop], *([source] if source else [])])
    for one in node.names:
        if one.name == "*":
            module.stars.append(source)
        else:
            module.imports.setdefault(one.asname or one.name, (source, one.name))


@dataclass
class Class:
    """A class with all its bases. lineage: itself first. members: name → where it stands. called: attributes of self
    that its methods call, those of replaced methods left out. unknown_bases: the packages of bases that are in none of
    those at hand."""

    node: ast.ClassDef
    module: SourceModule
    lineage: list[Definition] = field(default_factory=list)
    members: dict[str, Definition] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    made_of: dict[str, tuple[ast.AST, SourceModule]] = field(default_factory=dict)
    unknown_bases: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """As it is spelt in its module."""
        return self.node.name

    @property
    def at(self) -> str:
        """``file.py:line``."""
        return Definition(self.node, self.module).at


def class_of(sources: Sources, found: Definition | None) -> Class | None:
    """The class that ``found`` is; None where it is none."""
    if found is None or not isinstance(found.node, ast.ClassDef):
        return None
    made = Class(found.node, found.module)
    _lineage(sources, found, made, set(), _DEEP)
    replaced: set[str] = set()
    for one in made.lineage:
        assert isinstance(one.node, ast.ClassDef)
        for name, node in _members(one.node).items():
            made.members.setdefault(name, Definition(node, one.module))
        methods = {part.name: part for part in one.node.body if isinstance(part, Function)}
        made.called |= _calls(part for part in one.node.body if getattr(part, "name", "") not in replaced)
        replaced |= methods.keys()
        replaced -= _calls_of_bases(one.node, {base.node.name for base in made.lineage})  # type: ignore[attr-defined]
        for node in ast.walk(one.node):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                for target in node.targets:
                    if _of_self(target):
                        made.made_of.setdefault(target.attr, (node.value.func, one.module))  # type: ignore[attr-defined]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and _of_self(node.target):
                made.made_of.setdefault(node.target.attr, (node.value.func, one.module))  # type: ignore[union-attr]
    return made


def attribute_class(sources: Sources, owner: Class, name: str) -> Class | None:
    """The class that ``owner`` makes ``self.name`` of, as far as it is named where it is set."""
    if name not in owner.made_of:
        return None
    expression, module = owner.made_of[name]
    return class_of(sources, sources.resolve(expression, module))


def parameters(node: ast.AST) -> tuple[list[str], set[str], bool] | None:
    """(positional parameters in order without self and cls, all names, whether anything else is taken too)."""
    if not isinstance(node, Function):
        return None
    args = node.args
    ordered = [a.arg for a in (*args.posonlyargs, *args.args)]
    if ordered and ordered[0] in ("self", "cls"):
        ordered = ordered[1:]
    return ordered, {*ordered, *(a.arg for a in args.kwonlyargs)}, args.kwarg is not None


def _lineage(sources: Sources, found: Definition, made: Class, seen: set[int], deep: int) -> None:
    if id(found.node) in seen or deep < 0:
        return
    seen.add(id(found.node))
    made.lineage.append(found)
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        other = sources.resolve(base, found.module)
        if other is not None and isinstance(other.node, ast.ClassDef):
            _lineage(sources, other, made, seen, deep - 1)
        else:
            made.unknown_bases.add(sources.origin(base, found.module))


def _calls(parts: Iterable[ast.AST]) -> set[str]:
    """The attributes of self that are called in these."""
    nodes = (node for part in parts for node in ast.walk(part))
    return {node.func.attr for node in nodes if isinstance(node, ast.Call) and _of_self(node.func)}  # type: ignore[attr-defined]


def _calls_of_bases(node: ast.AST, bases: set[str]) -> set[str]:
    """The methods that are called as ``super().name(`` or ``Base.name(``."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            owner = part.value.func if isinstance(part.value, ast.Call) else part.value
            if isinstance(owner, ast.Name) and owner.id in {"super", *bases}:
                found.add(part.attr)
    return found


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _members(node: ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for part in node.body:
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            # A property's setter, or an overload, comes after what it belongs to: the last one is the method.
            found[part.name] = part
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.setdefault(part.target.id, part)
        elif isinstance(part, ast.Assign):
            for target in part.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, part)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and _of_self(inner):
            found.setdefault(inner.attr, inner)
    return found


VLLM = "vllm"


@dataclass(frozen=True)
class Lack:
    """Something needed that is not there. what: the names, or what is otherwise; loss: what follows; at: where it
    should stand, ``file.py:line``."""

    place: str
    owner: str
    what: str
    loss: str
    at: str


@dataclass(frozen=True)
class CheckedPlace:
    """One class or module that was examined. there: how many needs are met."""

    place: str
    owner: str
    at: str
    there: int
    lacks: tuple[Lack, ...]


@dataclass(frozen=True)
class Wheels:
    """What is compared: ``wheel``, and ``base``, the vLLM that it is for (itself, where it is vLLM)."""

    wheel: Package
    base: Package
    sources: Sources

    @property
    def release(self) -> Release | None:
        """Of the vLLM; None for a development version."""
        return release_of(self.base.version)


def wheel_pair(packages: Sequence[Package]) -> Wheels:
    """The wheel and its base, in either order. Raises WheelError where vLLM itself is in none or in both of two."""
    cores = [one for one in packages if f"{VLLM}/__init__.py" in one.files]
    if not cores:
        raise WheelError(
            f"{packages[0].path}: vLLM itself is not in it; name the wheel of the vLLM that it is for, "
            "with a second --wheel"
        )
    if len(cores) > 1 or len(packages) > 2:
        raise WheelError("--wheel: name one wheel, or a vendor's and that of the vLLM that it is for")
    others = [one for one in packages if one is not cores[0]]
    return Wheels((others or cores)[0], cores[0], Sources([*others, *cores]))


def checked_places(wheels: Wheels, declaration: Sequence[VllmPlace] = PLACES) -> list[CheckedPlace]:
    """Every place of the declaration that this release has, as it is in the wheel. Raises WheelError for a source file
    that is no Python."""
    places = [place for place in declaration if place.due(wheels.release)]
    roles = _roles(wheels)
    owners: dict[str, list[Class]] = {}
    answers: list[CheckedPlace] = []
    for place in places:
        if all(":" not in one for one in place.at):
            answers.append(_module(wheels, place))
            continue
        owners[place.name] = found = list(_classes(wheels, place, roles, owners))
        answers += [_class(wheels, place, one) for one in found] or [_absent(place)]
    return answers


def _roles(wheels: Wheels) -> dict[str, list[Class]]:
    """The vendor's own runners and workers."""
    found: dict[str, list[Class]] = {V1: [], V2: [], WORKER: []}
    if wheels.wheel is wheels.base:
        return found
    seen = set()
    for word in ("execute_model", "ModelRunner", "Worker"):
        for module in wheels.sources.modules(wheels.wheel, word):
            for node in module.bound.values():
                one = class_of(wheels.sources, Definition(node, module)) if id(node) not in seen else None
                seen.add(id(node))
                if (
                    one is None
                    or not {"execute_model", "load_model"} <= one.members.keys()
                    or VLLM in one.unknown_bases
                ):
                    continue  # not one, or what is left of one for a vLLM that was: it cannot be imported with this
                if "init_device" in one.members:
                    found[WORKER].append(one)
                else:
                    found[V2 if "prepare_inputs" in one.members else V1].append(one)
    return found


def _classes(
    wheels: Wheels, place: VllmPlace, roles: dict[str, list[Class]], owners: dict[str, list[Class]]
) -> Iterator[Class]:
    """The classes that are this place in these wheels: the vendor's, else vLLM's."""
    mine = roles.get(place.kind, [])
    if place.of is not None:
        made = [attribute_class(wheels.sources, owner, place.of[1]) for owner in owners.get(place.of[0], ())]
        mine = list({id(one.node): one for one in made if one is not None}.values())
    if mine:
        yield from mine
        return
    for one in place.at:
        module, _, name = one.partition(":")
        found = class_of(wheels.sources, wheels.sources.find(module, name))
        if found is not None:
            yield found
            return


def _absent(place: VllmPlace) -> CheckedPlace:
    where = place.at[0].replace(":", ".")
    loss = place.loss or place.needs[0].loss
    return CheckedPlace(place.name, where, "", 0, (Lack(place.name, where, "it is not there", loss, ""),))


def _class(wheels: Wheels, place: VllmPlace, one: Class) -> CheckedPlace:
    lacks, there = [], 0
    for need in place.needs:
        if not need.due(wheels.release):
            continue
        have = [one.members[name] for name in need.names if name in one.members]
        why = _other_signature(need, have) if have else f"{' or '.join(need.names)} is not there"
        if not why and need.called and not any(_called(wheels, one, name) for name in need.names):
            why = f"{need.names[0]} is there, and nothing calls it through its object"
        if why:
            lacks.append(Lack(place.name, one.name, why, need.loss, have[0].at if have else one.at))
        there += not why
    return CheckedPlace(place.name, one.name, one.at, there, tuple(lacks))


def _module(wheels: Wheels, place: VllmPlace) -> CheckedPlace:
    for name in place.at:
        module = wheels.sources.module(name)
        if module is not None:
            break
    else:
        return _absent(place)
    lacks, there = [], 0
    for need in place.needs:
        if not need.due(wheels.release):
            continue
        have = [one for name in need.names if (one := wheels.sources.find(module.name, name)) is not None]
        known = have or any(wheels.sources.has(module, name) or _sets(module, name) for name in need.names)
        why = _other_signature(need, have) if known else f"{' or '.join(need.names)} is not there"
        if why:
            lacks.append(Lack(place.name, module.name, why, need.loss, have[0].at if have else module.file))
        there += not why
    return CheckedPlace(place.name, module.name, module.file, there, tuple(lacks))


def _sets(module: SourceModule, name: str) -> bool:
    """Whether the module sets an attribute of that name on anything, or registers a parameter under it."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Call) and _registers(node) == name)
        for node in ast.walk(module.tree)
    )


def _registers(node: ast.Call) -> str:
    """The name under which a call registers a parameter or a buffer; "" for other calls."""
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    first = node.args[0] if node.args else None
    named = called in ("register_parameter", "register_buffer") and isinstance(first, ast.Constant)
    return str(first.value) if named and isinstance(first, ast.Constant) else ""


def _other_signature(need: Need, have: Sequence[Definition]) -> str:
    """How the signature differs from what is needed; "" where it does not, or nothing of it is needed."""
    known = parameters(have[0].node) if have else None
    if known is None or not (need.takes or need.keywords):
        return ""
    ordered, names, more = known
    if tuple(ordered[: len(need.takes)]) != need.takes:
        return f"{need.names[0]} takes ({', '.join(ordered[: max(len(need.takes), 3)])}), not ({', '.join(need.takes)})"
    gone = [name for name in need.keywords if name not in names and not more]
    return f"{need.names[0]} does not take {', '.join(gone)}" if gone else ""


def _called(wheels: Wheels, one: Class, name: str) -> bool:
    """Whether its own methods, or a worker through its ``model_runner``, call it as an attribute of the object."""
    if name in one.called:
        return True
    call = re.compile(rb"\b(?:model_)?runner\.%s\(" % name.encode())
    return any(
        call.search(data)
        for package in wheels.sources.packages
        for file, data in package.files.items()
        if "worker" in file
    )


@dataclass(frozen=True)
class ModeFound:
    """at: ``file.py:line``."""

    mode: Mode
    at: str


def modes_found(wheels: Wheels) -> list[ModeFound]:
    """The modes of the wheel and its vLLM, in the declaration's order; a vendor's own line before vLLM's."""
    found = []
    for mode in MODES:
        at = next((where for mark in mode.marks if (where := _line(wheels, mark))), "")
        if at:
            found.append(ModeFound(mode, at))
    return found


def _line(wheels: Wheels, mark: str) -> str:
    end, _, text = mark.partition(":")
    for package in wheels.sources.packages:
        for file, data in sorted(package.files.items()):
            if f"/{file}".endswith(f"/{end}") and text.encode() in data:
                for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
                    if text in line and not line.lstrip().startswith("#"):
                        return f"{file}:{number}"
    return ""


def findings(wheels: Wheels, looked: Sequence[CheckedPlace], modes: Sequence[ModeFound]) -> list[Finding]:
    """One finding for what was examined, one for each lack, one for each mode."""
    out = [_what(wheels)]
    there, kinds = sum(one.there for one in looked), len(looked)
    out.append(Finding(OK, "names", f"{there} names that capture relies on are there, in {kinds} classes and modules"))
    for one in lacks(looked):
        where = f" ({one.at})" if one.at else ""
        out.append(Finding(ERROR, "missing", f"{one.owner}: {one.what}{where}", one.loss))
    for found in modes:
        mode = found.mode
        out.append(Finding(OK, f"mode: {mode.fate}", f"{mode.name} ({found.at})", "" if mode.on else mode.says))
    return out


def lacks(looked: Sequence[CheckedPlace]) -> list[Lack]:
    """All of them."""
    return [lack for one in looked for lack in one.lacks]


def to_json(wheels: Wheels, looked: Sequence[CheckedPlace], modes: Sequence[ModeFound]) -> dict[str, Any]:
    """``accprobe doctor --wheel FILE --json``."""
    return {
        "schema": 1,
        "ok": not lacks(looked),
        "wheel": str(wheels.wheel),
        "vllm": str(wheels.base),
        "findings": [one.to_json() for one in findings(wheels, looked, modes)],
        "places": [{"place": one.place, "owner": one.owner, "at": one.at, "there": one.there} for one in looked],
        "missing": [asdict(one) for one in lacks(looked)],
        "modes": [{"mode": one.mode.name, "fate": one.mode.fate, "says": one.mode.says, "at": one.at} for one in modes],
    }


def summary(looked: Sequence[CheckedPlace]) -> str:
    """The last line."""
    n = len(lacks(looked))
    if not n:
        return "everything that capture relies on is there"
    return f"{n} thing{'s' * (n > 1)} that capture relies on {'are' if n > 1 else 'is'} missing"


def _what(wheels: Wheels) -> Finding:
    if wheels.wheel is wheels.base:
        return Finding(OK, "wheel", str(wheels.wheel))
    text = f"{wheels.wheel}, with {wheels.base} as the vLLM that it is for"
    if release(wheels.wheel.version) != release(wheels.base.version):
        return Finding(WARNING, "wheel", text, "their releases differ: name the vLLM that this version is made for")
    return Finding(OK, "wheel", text)
