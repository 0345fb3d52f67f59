"""A seeded fictional world: encyclopedia passages and multi-hop questions in IRCoT's format."""

from data_builders.world.write import iter_passages, write_world

__all__ = ["iter_passages", "write_world"]
