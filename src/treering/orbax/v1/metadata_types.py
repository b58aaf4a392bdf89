"""The classes of metadata of version 1."""

import dataclasses
import datetime
from typing import Any, Generic, TypeVar

from ..metadata import ShardingMetadata

T = TypeVar("T")
PyTreeMetadata = Any  # a tree of dicts and lists with abstract leaves


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """A JAX array in a checkpoint. It is an abstract leaf: `load` restores a JAX array by it."""

    shape: tuple[int, ...]
    dtype: Any
    sharding_metadata: ShardingMetadata | None = None
    storage_metadata: Any = dataclasses.field(default=None, compare=False)
    weak_type: bool = False

    @property
    def sharding(self) -> Any:
        """The saved place in this job, None for the default device. Raises `MismatchError` if this job lacks it."""
        return None if self.sharding_metadata is None else self.sharding_metadata.to_jax_sharding()


@dataclasses.dataclass(frozen=True)
class NumpyMetadata:
    """A NumPy array in a checkpoint. It is an abstract leaf: `load` restores a NumPy array by it."""

    shape: tuple[int, ...]
    dtype: Any
    storage_metadata: Any = dataclasses.field(default=None, compare=False)


class CheckpointMetadata(Generic[T]):
    """The metadata of a checkpoint. `metadata` is a tree of abstract leaves, or a dict of them by name.

    Times are nanoseconds since 1970, or None. Treering records one time for each checkpoint, that of the commit.
    """

    def __init__(
        self,
        path: Any,
        *,
        metadata: T,
        init_timestamp_nsecs: int | None = None,
        commit_timestamp_nsecs: int | None = None,
        custom_metadata: Any = None,
    ):
        self.path, self.metadata, self.custom_metadata = path, metadata, custom_metadata
        self.init_timestamp_nsecs, self.commit_timestamp_nsecs = init_timestamp_nsecs, commit_timestamp_nsecs

    @property
    def init_timestamp(self) -> datetime.datetime | None:
        """The time at which the save began, in UTC."""
        return as_time(self.init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime.datetime | None:
        """The time of the commit, in UTC."""
        return as_time(self.commit_timestamp_nsecs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def as_time(nanoseconds: int | None) -> datetime.datetime | None:
    """Returns nanoseconds since 1970 as a time in UTC."""
    return None if nanoseconds is None else datetime.datetime.fromtimestamp(nanoseconds / 1e9, datetime.UTC)


def as_nanoseconds(time: datetime.datetime | None) -> int | None:
    """Returns a time in nanoseconds since 1970."""
    return None if time is None else int(time.timestamp() * 1_000_000) * 1000
