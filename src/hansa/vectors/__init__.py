"""Arithmetic on flat vectors: the layout of a module in one, whole-vector passes, memory that is used again."""
