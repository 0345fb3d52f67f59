"""What can be wrong with a store, each with the way out of it."""

from collections.abc import Sequence
from os import PathLike


class StoreError(ValueError):
    """A store cannot do what was asked; the message says what to do."""

    is_user_error = True


class NotAStoreError(StoreError):
    """A folder holds no store, or only parts of one."""


class StoreExistsError(StoreError):
    """A new store was asked for where one is."""


class IndexDamagedError(StoreError):
    """The index is no SQLite database any more, or a malformed one."""


class StoreBusyError(StoreError):
    """Another process or object is writing to the store."""


class StoreReadOnlyError(StoreError):
    """The store's folder takes no writes."""


class StoreWriteError(StoreError):
    """The system refuses a write to the store: a folder is gone, or something is in its place."""


class StoreFullError(StoreError):
    """The byte budget has no room for a chunk."""


class DiskFullError(StoreError):
    """The disk, a quota or a file size limit has no room."""


class ShardDamagedError(StoreError):
    """A shard is missing or not what the index says."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"shard {name} {why}; `coinrag cache verify` names the chunks that it held and takes "
            "them out of the index, and the next build computes them again"
        )
        self.name = name
        self.why = why


class ForeignStoreError(StoreError):
    """A store holds what other settings made; names each part that differs and its way out."""

    def __init__(self, folder: PathLike[str] | str, differences: Sequence[str]) -> None:
        lines = "".join(f"\n  - {difference}" for difference in differences)
        super().__init__(f"the store at {folder} does not belong to this run:{lines}")
        self.differences = tuple(differences)
