"""Translates the checkpointables of a step for the manager, which saves trees."""

from typing import Any

from ... import nodes
from ...manager_items import ManagerItems
from .. import saving
from ..context import Context, get_context


class CheckpointableItems(ManagerItems):
    """The items of a manager whose arguments are checkpointables by name. `context` has the options of its saves."""

    def __init__(self, context: Context):
        super().__init__(None, None, None, None)
        self.context = context
        self.several = True

    def to_save(self, given: Any, save_kwargs: Any, args: Any) -> Any:
        """Returns the checkpointables."""
        return args

    def tree(self, args: Any, *, for_orbax: bool) -> Any:
        """Returns the tree of checkpointables."""
        tree = saving.tree_of(args, get_context(self.context), for_orbax=for_orbax)
        if for_orbax and not isinstance(tree, nodes.Composite):
            return nodes.composite({saving.STATE: tree})  # Orbax finds a step's tree by this name only.
        return tree
