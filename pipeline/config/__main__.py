"""Prints the README's table of all keys: ``python -m pipeline.config``."""

from pipeline.config import markdown_table

print(markdown_table())
