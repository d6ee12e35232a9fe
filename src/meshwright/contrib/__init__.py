"""Hold what the core can do without, one room for each thing.

A room may import the core. The core imports none of them: it asks for one by its name (`registry`), which
pyproject.toml lists as an entry point. Each room has its own tests, which `make test-rooms` runs.
"""
