"""Applies edits to a parsed program. Comments and formatting stay, also those of removed statements."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import libcst as cst

Edit = Callable[[Any], Any]  # takes a node whose children are edited, and returns what replaces it


class _Removed(cst.Pass):
    """Stands for a removed statement until its block is edited. LibCST itself would drop the comments of the line."""


def removed(_: Any) -> cst.Pass:
    """Is the edit that removes a statement."""
    return _Removed()


def unwrapped(block: Any) -> Any:
    """Is the edit that replaces a ``with`` by the statements in it."""
    comment = block.body.header.comment
    before = [*block.leading_lines, *([cst.EmptyLine(comment=comment)] if comment else [])]
    return cst.FlattenSentinel(
        [
            cst.SimpleStatementLine([_Removed()], leading_lines=before),
            *block.body.body,
            cst.SimpleStatementLine([_Removed()], leading_lines=block.body.footer),
        ]
    )


def added_after(new: Sequence[cst.SimpleStatementLine]) -> Edit:
    """Returns the edit that adds lines after one, or in its place if all its statements are removed."""

    def edit(line: Any) -> Any:
        if isinstance(line, cst.FlattenSentinel):
            first, *others = line
            return cst.FlattenSentinel([first, *new, *others])
        if _is_removed(line):
            return cst.FlattenSentinel([line.with_changes(body=new[0].body), *new[1:]])
        return cst.FlattenSentinel([line, *new])

    return edit


def edited(module: cst.Module, edits: Mapping[cst.CSTNode, Edit]) -> cst.Module:
    """Returns the module with the edits of its nodes."""
    return cst.ensure_type(module.visit(_Editor(edits)), cst.Module)


class _Editor(cst.CSTTransformer):
    def __init__(self, edits: Mapping[cst.CSTNode, Edit]):
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        edit = self._edits.get(original_node)
        updated = updated_node if edit is None else edit(updated_node)
        if isinstance(updated, cst.Module | cst.IndentedBlock) and updated is not original_node:
            return _without_removed_lines(updated)
        return updated


def _is_removed(line: Any) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and all(isinstance(one, _Removed) for one in line.body)


def _without_removed_lines(block: Any) -> Any:
    """Leaves out the removed statements of a block. Their comments move to the next line."""
    kept: list[Any] = []
    carried: list[cst.EmptyLine] = []
    for line in block.body:
        if _is_removed(line):
            comment = line.trailing_whitespace.comment
            carried += [*line.leading_lines, *([cst.EmptyLine(comment=comment)] if comment else [])]
            continue
        if isinstance(line, cst.SimpleStatementLine) and any(isinstance(one, _Removed) for one in line.body):
            *others, last = (one for one in line.body if not isinstance(one, _Removed))
            line = line.with_changes(body=[*others, last.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)])
        if carried and (any(one.comment for one in carried) or not line.leading_lines):
            line = line.with_changes(leading_lines=(*carried, *line.leading_lines))
        kept.append(line)
        carried = []
    if not kept and isinstance(block, cst.IndentedBlock):
        kept, carried = [cst.SimpleStatementLine([cst.Pass()], leading_lines=carried)], []
    footer = [one for one in carried if one.comment]
    return block.with_changes(body=kept, footer=(*footer, *block.footer))
