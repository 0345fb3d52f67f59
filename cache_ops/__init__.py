"""The shared core of training and serving: plans, rotation, packing, attention, encoding, assembly.

Tensor names end in their shape: B batch, T tokens, L layers, H heads, D head dimension,
P prefix tokens, Q query heads, A answer tokens, C capacity in tokens, R bytes of a record.
"""
