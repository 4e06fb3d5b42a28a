"""Flat vectors: the layout of a module's tensors, whole-vector arithmetic, and reuse of memory."""
