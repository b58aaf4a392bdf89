"""Holds a suggestion for an error about a template: arguments of a restore, as text and in a form to try them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import rules
from .._core import views
from .._core.entries import Entry
from .._core.leaf_paths import relative_to
from .._core.skeleton import Skeleton, subtree
from .._rules.base import Leaves, Rule, apply
from .policy import Policy


class RuleCall(NamedTuple):
    """One item in a list of rules, as the user would write it, and the rules that it makes."""

    text: str
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, name: str, *values: Any) -> "RuleCall":
        written = [f"r{value!r}".replace("\\\\", "\\") if "\\" in str(value) else repr(value) for value in values]
        return cls(f"tr.rules.{name}({', '.join(written)})", (getattr(rules, name)(*values),))


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A possible cause of differences, and the arguments that fix it."""

    text: str
    at: str = ""
    rules: tuple[RuleCall, ...] = ()
    missing: tuple[str, ...] = ()
    extra: str | tuple[str, ...] = ()
    dtype: str | None = None
    grow: tuple[str, ...] = ()

    def arguments(self, policy: Policy) -> str:
        """The arguments as the user would write them, with those that were given already."""
        given = {}
        if self.at:
            given["at"] = repr(f"{policy.at}/{self.at}".lstrip("/"))
        if self.rules:
            given["rules"] = f"[{', '.join([*(['…'] if policy.rules else []), *(call.text for call in self.rules)])}]"
        for name, globs in (("missing", self.missing), ("extra", self.extra)):
            if globs:
                value = _joined(getattr(policy, name), globs)
                given[name] = repr(value if isinstance(value, str) else list(value))
        if self.dtype:
            given["dtype"] = repr(self.dtype)
        if self.grow:
            given["grow"] = repr([*policy.grow, *self.grow])
        return ", ".join(f"{name}={value}" for name, value in given.items())

    def policy(self, policy: Policy) -> Policy:
        return dataclasses.replace(
            policy,
            missing=_joined(policy.missing, self.missing),
            extra=_joined(policy.extra, self.extra),
            dtype=self.dtype or policy.dtype,
            grow=(*policy.grow, *self.grow),
        )

    def leaves(self, entries: Mapping[str, Entry]) -> Leaves:
        """Returns the checkpoint's leaves under these arguments. `source` of each leaf is its path in the checkpoint.

        Raises `TreeringError` if a rule cannot be applied.
        """
        if self.at:
            entries = {path: entry for path, entry in entries.items() if relative_to(path, self.at) is not None}
        leaves = apply_calls(self.rules, entries)
        return {relative_to(path, self.at) or "": leaf for path, leaf in leaves.items()} if self.at else leaves

    def skeleton(self, skeleton: Skeleton | None) -> Skeleton | None:
        """Returns the checkpoint's skeleton under these arguments, or None with rules, which may change it."""
        return None if skeleton is None or self.rules else subtree(skeleton, self.at) if self.at else skeleton


def apply_calls(calls: Sequence[RuleCall], entries: Mapping[str, Entry]) -> Leaves:
    """Returns the leaves that rules make of a checkpoint's. Raises `TreeringError` if a rule cannot be applied."""
    leaves = views.plain_leaves({path: entry.at(path) for path, entry in entries.items()})
    return apply([rule for call in calls for rule in call.rules], leaves)


def is_plain(path: str, entries: Mapping[str, Entry]) -> bool:
    """Returns True if rules see the leaf under this path.

    They do not if the checkpoint's own path has a level for a box of Flax, which this path hides.
    """
    return path not in entries or entries[path].path.endswith(path)


def _joined(given: Any, globs: str | tuple[str, ...]) -> Any:
    """Returns the globs that were given together with more of them. A value that allows everything stays."""
    if isinstance(globs, str) or not globs or given in ("template", "ignore"):
        return globs if isinstance(globs, str) else given
    return tuple(dict.fromkeys((*(() if given == "error" else given), *globs)))
