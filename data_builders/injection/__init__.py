"""A test set for prompt injection: instructions planted in the passages of questions."""

from data_builders.injection.planting import KINDS, PLACES, Injection
from data_builders.injection.write import write_injections

__all__ = ["KINDS", "PLACES", "Injection", "write_injections"]
