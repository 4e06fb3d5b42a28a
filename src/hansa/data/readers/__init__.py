"""Readers for the official file formats. They check what they read and never execute it."""
