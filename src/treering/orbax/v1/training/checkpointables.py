"""Translates the checkpointables of a step for the manager, which saves trees."""

from typing import Any

from ... import items, nodes
from ...manager_items import ManagerItems
from .. import saving
from ..context import Context, get_context


class CheckpointableItems(ManagerItems):
    """The items of a manager whose arguments are checkpointables by name. `context` has the options of its saves."""

    def __init__(self, context: Context):
        super().__init__(None, None, None, None)
        self.context = context
        self.several = True
        self._writes_orbax = bool(items.format_options(context.write, several=True))

    def to_save(self, given: Any, save_kwargs: Any, args: Any) -> Any:
        """Returns the checkpointables."""
        return args

    def tree(self, args: Any) -> Any:
        """Returns the tree of checkpointables."""
        tree = saving.tree_of(args, get_context(self.context))
        if self._writes_orbax and not isinstance(tree, nodes.Composite):
            return nodes.composite({saving.STATE: tree})  # Orbax finds a step's tree by this name only.
        return tree

    def kinds(self, tree: Any, args: Any) -> dict[str, str]:
        """Returns how the format of Orbax stores each checkpointable."""
        return saving.kinds_of(tree) or {}
