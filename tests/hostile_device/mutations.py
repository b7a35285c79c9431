"""Takes one wait out of the runtime at a time, to see whether the hostile device notices.

wait     a call that has a stream, the host, a thread or a rank wait is left out; what the same line begins is begun
         (``copy(...).finish()``)
event    an event is recorded as if it had been long before
order    a copy is queued on the copy stream without waiting for compute
keeping  what was begun is not noted for those who are to wait for it
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tiers", "step", "generation", "meter", "ranks")
_WAITS = {
    "wait", "wait_event", "wait_stream", "synchronize", "finish", "arrive", "arrive_first", "may_change", "settle", "join",
    "require", "result", "exception", "release_all", "_synchronize", "_wait", "_finish", "barrier",
}
_WAIT_FUNCTIONS = {"_wait_for", "_settle", "_finish"}
_KEEPERS = {"leaving", "_leaving", "coming", "_copies_out", "writes", "fetches", "sources", "_under_way"}
_LEFT_OUT = ("optimizer.runtime.meter.device",)
"""It asks a card how much memory its libraries take."""
_STALE = "__stale_event__"


@dataclass(frozen=True)
class Mutation:
    """One change of one module, by its place among those that the module allows."""

    module: str
    index: int
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.module.removeprefix('optimizer.runtime.')}:{self.line}"

    @property
    def name(self) -> str:
        return f"{self.place} {self.kind}: {self.text}"


class _Changer(ast.NodeTransformer):
    """Numbers what can be changed, in the order of the source, and changes the one that is wanted."""

    def __init__(self, module: str, *, wanted: int | None = None) -> None:
        self._module, self._wanted = module, wanted
        self._in_assignment = False
        self.found: list[Mutation] = []

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        if isinstance(call, ast.Call) and _is_wait(call) and self._is_wanted(call, "wait"):
            return _without_wait(call)
        if isinstance(call, ast.Call) and _is_wait_elsewhere(call) and self._is_wanted(call, "wait"):
            return ast.Pass()
        if isinstance(call, ast.Call) and _is_keeping(call) and self._is_wanted(call, "keeping"):
            return ast.Expr(call.args[0])
        return self.generic_visit(node)

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        call = node.body
        if isinstance(call, ast.Call) and _is_wait(call) and self._is_wanted(call, "wait"):
            node.body = ast.Constant(None)
            return node
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        call = node.value
        is_wait = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("wait", "result")
        if is_wait and self._is_wanted(call, "wait"):
            assert isinstance(call, ast.Call)
            assert isinstance(call.func, ast.Attribute)
            # Of a device copy its bytes, of a transfer no event.
            is_copy = isinstance(call.func.value, ast.Call)
            node.value = ast.Attribute(call.func.value, "data", ast.Load()) if is_copy else ast.Constant(None)
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "record_event" and self._is_wanted(node, "event"):
                return ast.Call(ast.Name(_STALE, ast.Load()), [node.func.value], [])
            if node.func.attr == "_on_copy_stream" and self._is_wanted(node, "order"):
                return ast.parse("self._backend.on(self._copy_stream)", mode="eval").body
        return self.generic_visit(node)

    def _is_wanted(self, node: ast.expr, kind: str) -> bool:
        self.found.append(
            Mutation(self._module, len(self.found), node.lineno, kind, ast.unparse(node).replace("\n", " ")[:90])
        )
        return self._wanted == len(self.found) - 1


def _without_wait(call: ast.Call) -> ast.stmt:
    """Begin what the same line begins: ``copy(...)`` of ``copy(...).finish()``, or of ``_finish(copy(...))``."""
    begun = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    calls = [each for each in (*begun, *call.args[:1]) if isinstance(each, ast.Call)]
    return ast.Expr(calls[0]) if calls else ast.Pass()


def _is_wait(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _WAITS
    return isinstance(call.func, ast.Name) and call.func.id in _WAIT_FUNCTIONS


def _is_wait_elsewhere(call: ast.Call) -> bool:
    """Report whether a thread is given a wait to do."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "submit"
        and isinstance(call.args[0], ast.Attribute)
        and call.args[0].attr in _WAITS
    )


def _is_keeping(call: ast.Call) -> bool:
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "append") or isinstance(call.args[0], ast.Tuple):
        return False
    kept = call.func.value
    if isinstance(kept, ast.Subscript):
        kept = kept.value
    name = kept.attr if isinstance(kept, ast.Attribute) else ""
    return name in _KEEPERS or name == "_copies"


def list_mutations() -> Iterator[Mutation]:
    """All of the folders that queue copies, or wait for them."""
    for folder in FOLDERS:
        for file in sorted((ROOT / "optimizer/runtime" / folder).rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            if module in _LEFT_OUT:
                continue
            changer = _Changer(module)
            changer.visit(ast.parse(file.read_text()))
            yield from changer.found


def install(mutation: Mutation) -> None:
    """Have the module be imported with the change. Call it in a process that has not imported it."""
    assert mutation.module not in sys.modules
    sys.meta_path.insert(0, _Finder(mutation))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutation.module:
            return None
        file = ROOT / (fullname.replace(".", "/") + ".py")
        return importlib.util.spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file), self._mutation))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, mutation: Mutation) -> None:
        super().__init__(fullname, path)
        self._mutation = mutation

    def get_code(self, fullname: str) -> Any:
        changer = _Changer(self._mutation.module, wanted=self._mutation.index)
        tree = changer.visit(ast.parse(Path(self.path).read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        from tests.hostile_device.streams import stale_event

        vars(module)[_STALE] = stale_event
        super().exec_module(module)
