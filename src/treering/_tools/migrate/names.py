"""Maps names of Orbax to those of the adapter `treering.orbax`, and knows which names the adapter lacks."""

ORBAX, ADAPTER = "orbax.checkpoint", "treering.orbax"
_OLD_V1 = f"{ORBAX}.experimental.v1"  # Older releases of Orbax have version 1 only there.
MODULES = {_OLD_V1: f"{ADAPTER}.v1", ORBAX: ADAPTER}  # modules with a name of their own, the longest first
FLAX = "flax.training.orbax_utils"  # It imports Orbax.

# A test compares both with the adapter.
_COVERED = frozenset(
    {
        "ArrayCheckpointHandler",
        "ArrayRestoreArgs",
        "AsyncCheckpointHandler",
        "AsyncCheckpointer",
        "AsyncOptions",
        "CheckpointArgs",
        "CheckpointHandler",
        "CheckpointHandlerRegistry",
        "CheckpointManager",
        "CheckpointManagerOptions",
        "Checkpointer",
        "CompositeCheckpointHandler",
        "CompositeOptions",
        "DefaultCheckpointHandlerRegistry",
        "JaxRandomKeyCheckpointHandler",
        "JsonCheckpointHandler",
        "NumpyRandomKeyCheckpointHandler",
        "PLACEHOLDER",
        "PyTreeCheckpointHandler",
        "PyTreeCheckpointer",
        "RestoreArgs",
        "SaveArgs",
        "StandardCheckpointHandler",
        "StandardCheckpointer",
        "args",
        "checkpoint_args",
        "checkpoint_manager",
        "checkpoint_managers",
        "checkpoint_utils",
        "handlers",
        "options",
        "path",
        "step",
        "utils",
        "v1",
    }
)
_UNSUPPORTED = {
    "type_handlers": "register the class with jax.tree_util, or save its arrays",
    "serialization": "save the tree with tr.save",
    "experimental.emergency": "use tr.Checkpointer(run, local=directory)",
    "pathways": "run it with JAX's own processes",
    **dict.fromkeys(
        ("Transform", "RestoreTransform", "apply_transformations", "transform_utils"),
        "use tr.restore(path, like=target, rules=[tr.rules.rename(old, new)])",
    ),
    "merge_trees": "merge the trees with jax.tree.map",
    "test_utils": "use shutil and pathlib",
    "msgpack_utils": "use tr.save(path, tree, format='flax')",
    "multihost": "use jax.experimental.multihost_utils",
    "ProtoCheckpointHandler": "save the text of the message",
}


def relative(name: str) -> str | None:
    """Returns a dotted name within `orbax.checkpoint`, "" for the module itself, or None if it is not of Orbax.

    A name within the adapter is one too, so that a migrated program can be migrated further.
    """
    if f"{name}.".startswith(f"{ADAPTER}."):
        return name[len(ADAPTER) + 1 :]
    if not f"{name}.".startswith(f"{ORBAX}."):
        return None
    if f"{name}.".startswith(f"{_OLD_V1}."):
        name = f"{ORBAX}.v1{name.removeprefix(_OLD_V1)}"
    return name[len(ORBAX) + 1 :]


def problem(inner: str) -> str | None:
    """Returns what to do about a name within `orbax.checkpoint` that the adapter lacks, or None if it has the name."""
    parts = inner.split(".")
    if is_private(inner):
        return "is private to Orbax; use a public name"
    for n in range(len(parts), 0, -1):
        if advice := _UNSUPPORTED.get(".".join(parts[:n])):
            return f"is not in {ADAPTER}; {advice}"
    if inner and parts[0] not in _COVERED:
        return f"is not in {ADAPTER}; see docs/migrate/orbax.md"
    return None


def is_private(inner: str) -> bool:
    """Returns True if a part of a dotted name begins with an underscore."""
    return any(part.startswith("_") for part in inner.split("."))


def new_module(name: str) -> str | None:
    """Returns the module of the adapter that stands for a module of Orbax, or None if there is none."""
    inner = relative(name)
    if inner is None or problem(inner):
        return None
    return f"{ADAPTER}.{inner}" if inner else ADAPTER
