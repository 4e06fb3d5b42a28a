"""Readers for the official on-disk layouts. Each checks what it reads and executes nothing of it."""
