"""Small mistakes that can be made in a module: one change of its syntax tree each."""

import ast
import copy
import dataclasses
from collections.abc import Callable, Iterator

_FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}
_UNSEEN = ("_log", "warn", "doing", "__repr__", "_repr_html_")  # what is said, not done


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of a module: the line and what is done there. `number` counts the changes of a module from 0."""

    number: int
    line: int
    what: str


def mutants(source: str) -> list[Mutant]:
    """Lists every mutant of a module."""
    return [Mutant(n, line, what) for n, (line, what, _) in enumerate(_changes(ast.parse(source)))]


def mutated(source: str, number: int) -> str:
    """Returns the text of a module with one change. Comments are lost."""
    tree = ast.parse(source)
    for n, (_, _, change) in enumerate(_changes(tree)):
        if n == number:
            change()
            return ast.unparse(ast.fix_missing_locations(tree))
    raise IndexError(number)


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, Callable[[], None]]]:
    """The changes of a tree in the order of its nodes: the line, what is changed, and a function that does it."""
    for node in _nodes(tree):
        match node:
            case ast.Compare(ops=[op], left=left) if type(op) in _FLIPPED:
                yield node.lineno, f"{_text(left)}: {_name(op)}", _set(node, "ops", [_FLIPPED[type(op)]()])
            case ast.BoolOp(op=op):
                yield node.lineno, f"{_text(node)}: {_name(op)}", _set(node, "op", _FLIPPED[type(op)]())
            case ast.BinOp(op=op) if type(op) in _FLIPPED and not _is_text(node):
                yield node.lineno, f"{_text(node)}: {_name(op)}", _set(node, "op", _FLIPPED[type(op)]())
            case ast.If(test=test) | ast.IfExp(test=test):
                negated = ast.UnaryOp(ast.Not(), copy.deepcopy(test))
                yield node.lineno, f"if {_text(test)}: negated", _set(node, "test", negated)
            case ast.Constant(value=bool(value)):
                yield node.lineno, f"{value}: negated", _set(node, "value", not value)
            case ast.Constant(value=int(value)):
                yield node.lineno, f"{value}: one more", _set(node, "value", value + 1)
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield node.lineno, f"return {_text(value)}: None", _set(node, "value", ast.Constant(None))
            case ast.Expr(value=ast.Call() as call):
                yield node.lineno, f"{_text(call)}: left out", _set(node, "value", ast.Constant(None))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are executed and change what is done: no annotations, messages, imports or docstrings."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            said = isinstance(child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom)
            said |= isinstance(child, ast.If) and _text(child.test) == "TYPE_CHECKING"
            named = getattr(child, "name", "") if isinstance(child, ast.FunctionDef) else ""
            if (
                said
                or named in _UNSEEN
                or (isinstance(child, ast.Expr) and any(one in _text(child) for one in _UNSEEN))
            ):
                continue
            yield child
            yield from _nodes(child)


def _set(node: ast.AST, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "…"


def _name(op: ast.AST) -> str:
    return f"{type(op).__name__} → {_FLIPPED[type(op)].__name__}"


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)
