"""Schemas of tables: how the columns of a CSV file become inputs and targets, the same at every site."""
