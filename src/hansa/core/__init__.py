"""What every package may use: errors, keys, types, flat vectors and the native kernels."""
