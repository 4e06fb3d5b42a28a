"""Shared by all packages: errors, keys, types, flat vectors and native kernels."""
