"""The terminal browser for checkpoints and runs, built on Textual."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from rich.markup import escape
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, Input, Static, Tree
from textual.widgets.tree import TreeNode

from .. import stores
from .._core.outline import OutlineNode, outline
from .._core.units import count, nbytes
from .._printable import safe, safe_lines
from .._restore.checkpoint import Checkpoint
from .._run.step_fallback import open_step
from .._tools.diff import diff
from .._tools.listing import Listing
from ..errors import TreeringError
from .leaf_text import describe_node, leaf_lines

# A node shows at most this many children; more are shown in groups, because Textual takes long to unfold them.
_MAX_CHILDREN = 1000


@dataclasses.dataclass(frozen=True)
class TreeItem:
    """A node of the tree on the screen: a node of a checkpoint, or a step that unfolding opens."""

    ckpt: Checkpoint | None
    node: OutlineNode | None
    step: int | None = None
    path: str = ""


class CheckpointTree(Tree[TreeItem]):
    """The tree of a checkpoint, or of a run's steps. Unfolding a node reads its children."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", "Down", show=False),
        Binding("k", "cursor_up", "Up", show=False),
        Binding("g", "scroll_home", "First", show=False),
        Binding("G", "scroll_end", "Last", show=False),
        Binding("ctrl+d", "page_down", "Page down", show=False),
        Binding("ctrl+u", "page_up", "Page up", show=False),
        Binding("l", "unfold", "Unfold", show=False),
        Binding("h", "fold", "Fold", show=False),
    ]

    def __init__(self, source: Checkpoint | Listing):
        super().__init__(Text(safe(source.path), style="bold"))
        self.source = source
        self.guide_depth = 2

    def on_mount(self) -> None:
        if isinstance(self.source, Listing):
            for row in reversed(self.source.rows):
                notes = "" if row.state == "good" else f"  {row.state}"
                item = TreeItem(None, None, row.step, row.path)
                self.root.add(Text(f"step {row.step}{notes}"), item, allow_expand=row.state == "good")
        else:
            self.root.data = TreeItem(
                self.source, _group_children(outline(self.source._source.entries, collapse=False))
            )
            self._fill(self.root)
        self.root.expand()

    def on_tree_node_expanded(self, event: Tree.NodeExpanded[TreeItem]) -> None:
        self._fill(event.node)

    def _fill(self, node: TreeNode[TreeItem]) -> None:
        """Adds the children of a node, unless it has them already."""
        item = node.data
        if item is None or node.children:
            return
        if item.step is not None and item.ckpt is None:
            try:
                ckpt = open_step(stores.get(item.path), item.path, item.step, None)
            except (TreeringError, OSError) as error:
                self.notify(escape(safe(error)), severity="error")
                return
            item = node.data = TreeItem(ckpt, _group_children(outline(ckpt._source.entries, collapse=False)), item.step)
        assert item.ckpt is not None and item.node is not None
        for child in item.node.children:
            about = describe_node(item.ckpt, child)
            label = Text.assemble(safe(child.name), "  ", (about, "dim"))
            node.add(label, TreeItem(item.ckpt, child), allow_expand=bool(child.children))

    def action_unfold(self) -> None:
        if self.cursor_node and self.cursor_node.allow_expand:
            self.cursor_node.expand()

    def action_fold(self) -> None:
        node = self.cursor_node
        if node and (not node.is_expanded or not node.allow_expand):
            node = node.parent
        if node:
            node.collapse()
            self.move_cursor(node)

    def reveal(self, path: str) -> bool:
        """Unfolds the ancestors of a leaf or container and moves to it. Returns False if the tree lacks it."""
        node = self._top()
        if node is None:
            return False
        while True:
            self._fill(node)
            node.expand()
            below = next((child for child in node.children if _leads_to(child, path)), None)
            if below is None:
                return False
            assert below.data is not None and below.data.node is not None
            if below.data.node.path == path and not _is_group(below.data.node):
                # The node has no line on the screen until Textual has drawn the unfolded tree.
                self.call_after_refresh(self.move_cursor, below)
                return True
            node = below

    def _top(self) -> TreeNode[TreeItem] | None:
        """Returns the root node of the checkpoint under the cursor."""
        node = self.cursor_node or self.root
        while node.parent is not None and (node.data is None or node.data.step is None):
            node = node.parent
        return node if node.data is not None else None

    @property
    def current(self) -> Checkpoint | None:
        """The checkpoint under the cursor."""
        node = self.cursor_node
        return node.data.ckpt if node and node.data else None


def _leads_to(child: TreeNode[TreeItem], path: str) -> bool:
    node = child.data.node if child.data else None
    if node is None:
        return False
    if _is_group(node):
        return any(one.path == path or path.startswith(one.path + "/") for one in node.children)
    return node.path == path or path.startswith(node.path + "/")


def _is_group(node: OutlineNode) -> bool:
    # Only groups made by `_group` have no path of their own.
    return node.path == "" and bool(node.children)


def _group_children(node: OutlineNode) -> OutlineNode:
    """Cuts containers with more than `_MAX_CHILDREN` children into groups, in place, and returns the tree."""
    for _, one in [(0, node), *node.walk()]:
        if len(one.children) > _MAX_CHILDREN:
            one.children = [_group(part) for part in _chunks(one.children)]
    return node


def _chunks(children: Sequence[OutlineNode]) -> Iterable[Sequence[OutlineNode]]:
    return (children[start : start + _MAX_CHILDREN] for start in range(0, len(children), _MAX_CHILDREN))


def _group(children: Sequence[OutlineNode]) -> OutlineNode:
    group = OutlineNode(f"{children[0].name} … {children[-1].name}", "", children=list(children))
    group.leaves = sum(child.leaves for child in children)
    group.nbytes = sum(child.nbytes for child in children)
    return group


class Browser(App[None]):
    """The application: one checkpoint or run, or two side by side."""

    TITLE = "treering"
    CSS = """
    CheckpointTree { width: 2fr; }
    #detail { width: 3fr; border-left: solid $primary; padding: 0 1; }
    #search { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search"),
        Binding("n", "next(1)", "Next"),
        Binding("N", "next(-1)", "Previous"),
        Binding("s", "statistics", "Statistics"),
        Binding("d", "difference", "Difference"),
        Binding("tab", "focus_next", "Other side", show=False),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(self, sources: Sequence[Checkpoint | Listing]):
        super().__init__()
        self._sources = sources
        self._matches: list[str] = []
        self._match_index = -1

    def compose(self) -> ComposeResult:
        with Horizontal():
            for source in self._sources:
                yield CheckpointTree(source)
            with VerticalScroll(id="detail", can_focus=False):
                yield Static("enter or s: values and statistics of a leaf", id="text", markup=False)
        yield Input(placeholder="part of a path", id="search")
        yield Footer()

    def on_mount(self) -> None:
        self.query(CheckpointTree).first().focus()

    @property
    def side(self) -> CheckpointTree:
        """The tree that has the focus, or the first one."""
        return self.focused if isinstance(self.focused, CheckpointTree) else self.query(CheckpointTree).first()

    def _show_text(self, text: str) -> None:
        self.query_one("#text", Static).update(Text(safe_lines(text)))

    # Leaves

    def on_tree_node_highlighted(self, event: Tree.NodeHighlighted[TreeItem]) -> None:
        item = event.node.data
        if item is None or item.node is None or item.ckpt is None:
            return
        node, ckpt = item.node, item.ckpt
        size = f"{count(node.leaves, 'leaf', 'leaves')}, {nbytes(node.nbytes)}"
        self._show_text("\n".join([node.path or ckpt.path, size if node.entry is None else describe_node(ckpt, node)]))

    def on_tree_node_selected(self, event: Tree.NodeSelected[TreeItem]) -> None:
        if event.node.data and event.node.data.node and event.node.data.node.entry is not None:
            self.action_statistics()

    def action_statistics(self) -> None:
        """Reads the leaf under the cursor in a thread and shows its statistics."""
        node = self.side.cursor_node
        item = node.data if node else None
        if item is None or item.node is None or item.ckpt is None or item.node.entry is None:
            return
        ckpt, path = item.ckpt, item.node.path
        self._show_text(f"{path}\nreading …")
        self.run_worker(lambda: self._read(ckpt, path), thread=True, exclusive=True)

    def _read(self, ckpt: Checkpoint, path: str) -> None:
        try:
            text = "\n".join(leaf_lines(ckpt, path))
        except (TreeringError, OSError) as error:
            text = str(error)
        self.call_from_thread(self._show_text, text)

    def action_difference(self) -> None:
        """Compares the leaf or subtree under the cursor with the one at the same path on the other side."""
        trees = list(self.query(CheckpointTree))
        node = self.side.cursor_node
        if len(trees) < 2 or node is None or node.data is None or node.data.node is None:
            self.notify("expected two checkpoints: treering browse A B")
            return
        path = node.data.node.path
        sides = [tree.current for tree in trees]
        if sides[0] is None or sides[1] is None:
            self.notify("select a step on both sides first")
            return
        self._show_text(f"{path}\ncomparing …")
        self.run_worker(lambda: self._compare(sides, path), thread=True, exclusive=True)

    def _compare(self, sides: Sequence[Checkpoint | None], path: str) -> None:
        try:
            a, b = (_comparable(side, path) for side in sides if side is not None)
            found = diff(a, b)
            lines = [path, str(found), *(f"{one}: {change!r}" for one, change in found.values.items())]
        except (TreeringError, KeyError, OSError) as error:
            lines = [path, str(error)]
        self.call_from_thread(self._show_text, "\n".join(lines))

    # Search

    def action_search(self) -> None:
        search = self.query_one("#search", Input)
        search.display = True
        search.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = False
        tree = self.query(CheckpointTree).first()
        tree.focus()
        ckpt = tree.current or (tree.source if isinstance(tree.source, Checkpoint) else None)
        text = event.value.casefold()
        self._matches = [path for path in ckpt or () if text in path.casefold()]
        self._match_index = -1
        if not self._matches:
            self.notify(escape(f"no path contains {safe(event.value)!r}") if ckpt else "unfold a step first")
        self.action_next(1)

    def action_next(self, offset: int) -> None:
        """Moves both sides to the next match, or with ``by=-1`` to the previous one."""
        if self._matches:
            self._match_index = (self._match_index + offset) % len(self._matches)
            for tree in self.query(CheckpointTree):
                tree.reveal(self._matches[self._match_index])

    def on_key(self, event: Any) -> None:
        search = self.query_one("#search", Input)
        if event.key == "escape" and search.display:
            search.display = False
            self.query(CheckpointTree).first().focus()


def _comparable(ckpt: Checkpoint, path: str) -> Any:
    """Returns the leaf or subtree at a path in a form that `diff` accepts."""
    return {"": ckpt[path]} if path in ckpt else ckpt.at(path)
