"""A seeded fictional world: encyclopedia passages and multi-hop questions about them."""

from data_builders.world.corpus import iter_passages, write_corpus
from data_builders.world.write import write_world

__all__ = ["iter_passages", "write_corpus", "write_world"]
