"""Keys and values of chunks on disk: many readers, one writer, whole or not at all.

`store` is what others use; `reading` fetches slices. The rest are the parts of them.
"""

from cache_ops.store.store import Store

__all__ = ["Store"]
